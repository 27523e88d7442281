"""Records what the package index says about the releases for GPUs, for ``tests/engine/test_cuda_requirements.py``.

``python -m scripts.record_cuda_metadata`` needs ``uv`` (``pip install uv``), whose resolver takes seconds. It resolves
the trainer's and the engine's environment of every torch for Linux x86_64 without installing anything. pip reads the
requirements of single releases (minutes). It writes ``tests/engine/cuda_metadata.json`` and, for every torch, the
engine's constraints.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agent_rl.bootstrap import PYPROJECT, ROOT, TORCHES, TRAINER_CONSTRAINTS, engine_files, train_extra

METADATA = ROOT / "tests" / "engine" / "cuda_metadata.json"
PYTHONS = ("3.11", "3.12")
KERNELS = ("flash-attn-4==4.0.0b36", "transformer-engine-cu13==2.20.2")
"""Optional packages of the trainer that have wheels. Transformer Engine's part for torch and DeepEP are compiled on the
machine, against its torch."""
GLIBC, SGLANG_GLIBC = "2_28", "2_34"
"""SGLang's wheels need a newer glibc than all others."""
PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in range(34, 16, -1)), "manylinux2014_x86_64", "linux_x86_64")
Resolved = dict[str, dict[str, str]]
"""Versions by Python and name of the package."""
_HEADER = """\
# Versions of the engine environment on a GPU with torch {torch}, resolved for Linux x86_64, Python 3.11 and 3.12.
# Not run on a GPU. Renew: python -m scripts.record_cuda_metadata
"""


def read_requirements(paths: Iterable[Path]) -> dict[str, Requirement]:
    """The requirements of ``paths`` by name, without comments and includes."""
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def engine_requirements(torch: str) -> dict[str, Requirement]:
    """The requirements of the engine for GPUs with ``torch``, by name."""
    requirements, nodeps, _, *included = engine_files(cuda=True, torch=torch)
    return read_requirements([requirements, nodeps, *included])


def metadata(release: str) -> dict[str, Any]:
    """The metadata of ``release``, a package as NAME==VERSION, for Linux x86_64, read by pip."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary=:all:", f"--target={directory}", f"--python-version={PYTHONS[0]}"]
        command += [f"--platform={name}" for name in PLATFORMS]
        # Three equal signs exclude local versions such as 2.13.0+cpu.
        subprocess.run([*command, f"--report={report}", release.replace("==", "===")], check=True)
        return dict(json.loads(report.read_text())["install"][0]["metadata"])


def resolve(torch: str, *arguments: str | Path, glibc: str = GLIBC, packages: Sequence[str] = ()) -> Resolved:
    """What uv selects beside ``torch`` and ``packages`` for each Python. Raises SystemExit without uv."""
    if shutil.which("uv") is None:
        raise SystemExit("uv is not installed: pip install uv")
    found: Resolved = {}
    for python in PYTHONS:
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary=:all:"]
        command += [f"--python-platform=x86_64-manylinux_{glibc}", f"--python-version={python}"]
        command += [*map(str, arguments), "-"]
        done = subprocess.run(
            command, input="\n".join((f"torch==={torch}", *packages)), stdout=subprocess.PIPE, text=True, check=True
        )
        pairs = (line.partition("==") for line in done.stdout.splitlines())
        found[python] = {canonicalize_name(name): version for name, _, version in pairs}
    return found


def resolve_engine(torch: str) -> Resolved:
    """The engine environment for GPUs."""
    requirements, nodeps, *_ = engine_files(cuda=True, torch=torch)
    alone = resolve(torch, "--no-deps", nodeps, glibc=SGLANG_GLIBC)
    return {python: alone[python] | versions for python, versions in resolve(torch, requirements).items()}


def resolve_trainer(torch: str, packages: Sequence[str] = ()) -> Resolved:
    """The trainer's environment without the extra ``dev``, with further ``packages``."""
    extra, constraints = f"--extra={train_extra(torch)}", f"--constraint={TRAINER_CONSTRAINTS}"
    return resolve(torch, PYPROJECT, extra, constraints, packages=packages)


def write_constraints(torch: str, resolved: Resolved) -> None:
    """Pin the engine's versions that are the same on every Python."""
    same = sorted(set.intersection(*(set(versions.items()) for versions in resolved.values())))
    lines = "".join(f"{name}=={version}\n" for name, version in same)
    engine_files(cuda=True, torch=torch)[2].write_text(_HEADER.format(torch=torch) + lines)


def main() -> None:
    engines = {torch: resolve_engine(torch) for torch in TORCHES}
    trainers = {torch: resolve_trainer(torch) for torch in TORCHES}
    pairs = product(TORCHES, ("sglang", "sglang-kernel", "torch"))
    releases = [str(engine_requirements(torch)[name]) for torch, name in pairs]
    required = {
        release: sorted(line for line in metadata(release).get("requires_dist", ()) if "extra ==" not in line)
        for release in releases
    }
    recorded = {
        "source": "https://pypi.org, by the resolver of uv and by pip (scripts/record_cuda_metadata.py)",
        "requires": required,
        "engine": engines,
        "trainer": trainers,
        "trainer with kernels": {torch: resolve_trainer(torch, KERNELS) for torch in TORCHES},
    }
    METADATA.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    for torch in TORCHES:
        write_constraints(torch, engines[torch])


if __name__ == "__main__":
    main()
