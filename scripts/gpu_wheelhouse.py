"""Collects the wheels that ``tests/gpu/gpu_run.py`` needs beside torch, for a GPU machine without network.

``python -m scripts.gpu_wheelhouse DIRECTORY`` downloads them for Linux x86_64 (15.7 MiB for Python 3.12) and fails
above 60 MiB. There: ``pip install --no-deps --no-index --target packages DIRECTORY/*.whl``, and ``packages`` goes into
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from agent_rl.bootstrap import TRAINER_CONSTRAINTS
from scripts.record_cuda_metadata import PLATFORMS

PACKAGES = (
    *("megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "pyyaml"),
    *("aiohttp", "aiosignal", "aiohappyeyeballs", "attrs", "frozenlist", "multidict", "propcache", "yarl", "idna"),
    *("orjson", "pybase64", "xxhash", "zstandard", "urllib3", "safetensors", "packaging", "tenacity"),
)
"""Packages that an image with torch and transformers may lack, without numpy and torch's own."""
MAX_BYTES = 60 << 20


def pins(lines: list[str]) -> list[str]:
    """The constraints of :data:`PACKAGES`. Raises SystemExit for one that has none."""
    known = {line.partition("==")[0].lower().replace("_", "-"): line for line in lines if "==" in line}
    if missing := [name for name in PACKAGES if name not in known]:
        raise SystemExit(f"{TRAINER_CONSTRAINTS.name} has no version of {', '.join(missing)}")
    return [known[name] for name in PACKAGES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine.")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={options.python}", *(f"--platform={name}" for name in PLATFORMS)]
    command += [f"--dest={options.directory}", *pins(TRAINER_CONSTRAINTS.read_text().splitlines())]
    subprocess.run(command, check=True)
    size = sum(file.stat().st_size for file in options.directory.glob("*.whl"))
    print(f"{len(PACKAGES)} packages, {size / 2**20:.1f} MiB")
    if size > MAX_BYTES:
        raise SystemExit(f"{size >> 20} MiB: at most {MAX_BYTES >> 20} MiB are allowed")


if __name__ == "__main__":
    main()
