"""Records what the releases for GPUs link and import, for ``tests/engine/test_cuda_kernels.py``.

``python -m scripts.record_kernel_symbols`` downloads the wheels of both pairs (2 GB, minutes; none is installed). Of
torch and what links against it, it reads the symbol tables with ``nm``; of SGLang's kernels also the names that each
module has. It writes ``tests/engine/kernel_symbols.json``.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from agent_rl.bootstrap import ROOT, TORCHES
from scripts.record_cuda_metadata import PLATFORMS, PYTHONS, engine_requirements

RECORD = ROOT / "tests" / "engine" / "kernel_symbols.json"
PACKAGES = {"sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer"}
"""Releases of which SGLang's server imports names on a GPU only, with their package."""
_OF_TORCH = re.compile(r"3c10|2at\d|5torch|6caffe2|aoti_torch|^THP")
"""Symbols without it, such as those of CUDA's driver, come from other libraries."""


def download(release: str, directory: Path) -> Path:
    """The unpacked wheel of ``release``, a package as NAME==VERSION, for Linux x86_64 and CUDA."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHONS[0]}", *(f"--platform={name}" for name in PLATFORMS)]
    # Three equal signs exclude local versions such as 2.13.0+cpu.
    subprocess.run([*command, f"--dest={directory}", release.replace("==", "===")], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if re.search(r"\.so|\.py$", name)])
    return directory


def needed_symbols(objects: Iterable[Path]) -> set[str]:
    """The symbols that ``objects`` need from torch."""
    rows = (row.split() for path in objects for row in _nm("--undefined-only", path))
    return {row[-1] for row in rows if row[-2] == "U" and _OF_TORCH.search(row[-1])}


def exported_symbols(objects: Iterable[Path]) -> set[str]:
    """The symbols that ``objects`` define for others."""
    return {row.split()[-1].partition("@")[0] for path in objects for row in _nm("--defined-only", path)}


def _nm(kind: str, path: Path) -> list[str]:
    done = subprocess.run(["nm", "--dynamic", kind, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def module_names(package: Path) -> dict[str, list[str]]:
    """The public names that can be imported from ``package`` and the modules in it, read from their source."""
    paths = {_module(package, path): path for path in sorted(package.rglob("*.py"))}

    def names(module: str) -> set[str]:
        own = set(_defined(ast.parse(paths[module].read_text())))
        starred = {name[1:] for name in own if name.startswith("*")}
        plain = {name for name in own if not name.startswith("*")}
        return plain.union(*(names(other) for other in starred if other in paths))

    public = [module for module in paths if module.count(".") < 2 and "._" not in module]
    return {module: sorted(name for name in names(module) if not name.startswith("_")) for module in public}


def _module(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names bound outside of functions and classes; ``*MODULE`` for all names of a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None)
            yield from (f"*{source}" if each.name == "*" else each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _defined(node)


def main() -> None:
    needed, names, exported = dict[str, set[str]](), dict[str, dict[str, list[str]]](), dict[str, set[str]]()
    for torch, name in product(TORCHES, ("torch", "torchvision", *PACKAGES)):
        release = str(engine_requirements(torch)[name])
        with tempfile.TemporaryDirectory() as directory:
            unpacked = download(release, Path(directory))
            objects = sorted(unpacked.rglob("*.so*"))
            if name == "torch":
                exported[release] = exported_symbols(objects)
            if name in ("sglang-kernel", "torchvision"):
                needed[release] = needed_symbols(objects)
            if name in PACKAGES:
                names[release] = module_names(unpacked / PACKAGES[name])
    every = set[str]().union(*needed.values())
    recorded = {
        "names": names,
        "needed": {release: sorted(symbols) for release, symbols in needed.items()},
        "exported": {release: sorted(symbols & every) for release, symbols in exported.items()},
    }
    RECORD.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
