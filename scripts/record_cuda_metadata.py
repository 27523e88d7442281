"""Records what the package index says about the releases for GPUs, for ``tests/engine/test_cuda_requirements.py``.

``python -m scripts.record_cuda_metadata`` runs pip's resolver for Linux x86_64 without installing anything (minutes).
It writes ``tests/engine/cuda_metadata.json`` and ``agent_rl/engine/constraints-cuda.txt``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from agent_rl.bootstrap import ROOT, TORCH, engine_files

METADATA = ROOT / "tests" / "engine" / "cuda_metadata.json"
PYTHONS = ("3.11", "3.12")
PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in range(34, 16, -1)), "manylinux2014_x86_64", "linux_x86_64")
RELEASES = (
    *("sglang==0.5.21", "sglang-kernel==0.4.7", "torch==2.13.0"),
    *("sglang==0.5.23", "sglang-kernel==0.4.10", "torch==2.14.1"),
)
_HEADER = """\
# Versions of the engine environment on a GPU, resolved for Linux x86_64, Python 3.11 and 3.12. Not run on a GPU.
# Renew: python -m scripts.record_cuda_metadata
"""


def resolve(python: str, *arguments: str, torch: str = "") -> list[dict[str, Any]]:
    """The metadata of the packages that pip would install for ``python``."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        platforms = [f"--platform={name}" for name in PLATFORMS]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", f"--target={directory}", f"--python-version={python}", *platforms]
        constraint = Path(directory) / "constraints.txt"
        constraint.write_text(f"torch==={torch}\n" if torch else "")  # not a local version such as 2.13.0+cpu
        command.append(f"--constraint={constraint}")
        subprocess.run([*command, f"--report={report}", *arguments], check=True)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def resolve_engine(python: str) -> dict[str, str]:
    """The versions in the engine environment for GPUs, by name."""
    requirements, nodeps, _, _ = engine_files(cuda=True)
    torch = TORCH.partition("==")[2]
    found = [*resolve(python, "--no-deps", "-r", str(nodeps)), *resolve(python, "-r", str(requirements), torch=torch)]
    return {canonicalize_name(metadata["name"]): metadata["version"] for metadata in found}


def main() -> None:
    required = {
        release: sorted(line for line in metadata.get("requires_dist", ()) if "extra ==" not in line)
        for release in RELEASES
        for metadata in resolve(PYTHONS[0], "--no-deps", release.replace("==", "==="))
    }
    with ThreadPoolExecutor() as threads:
        resolved = dict(zip(PYTHONS, threads.map(resolve_engine, PYTHONS), strict=True))
    source = "https://pypi.org, by pip's resolver (scripts/record_cuda_metadata.py)"
    recorded = {"source": source, "requires": required, "resolved": resolved}
    METADATA.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    same = sorted(set.intersection(*(set(versions.items()) for versions in resolved.values())))
    engine_files(cuda=True)[2].write_text(_HEADER + "".join(f"{name}=={version}\n" for name, version in same))


if __name__ == "__main__":
    main()
