"""Makes a CPU build of torch accept GPU tensors, by a small library that is built once and loaded before torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from agent_rl.errors import UserError

_SOURCE = Path(__file__).with_name("guard.cpp")


def build_device_guard() -> Path:
    """Returns the library for this torch version, built if it does not exist (2 s). Raises UserError if that fails."""
    compiler, torch = shutil.which("c++") or shutil.which("g++"), _torch_dir()
    if compiler is None:
        raise UserError("agent-rl dry-run builds a small library and found no C++ compiler: install g++")
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha256(_SOURCE.read_bytes() + version + str(torch).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"agent-rl-dry run-{os.getuid()}" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        options = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib"]
        command = [compiler, *options, str(_SOURCE), "-o", str(partial), "-lc10", "-ltorch_cpu"]
        done = subprocess.run([*command, f"-Wl,-rpath,{torch}/lib"], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = _first_error(done.stderr)
            raise UserError(f"agent-rl dry-run: {compiler} could not build {_SOURCE.name}: {reason}")
        partial.rename(library)
    return library


def load_device_guard(library: Path) -> None:
    """Load the library into this process. Call before torch is imported: torch looks for CUDA hooks during import."""
    assert "torch" not in sys.modules, "torch was imported before the device guard"
    ctypes.CDLL(str(library))


def _torch_dir() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError("not installed: torch; `agent-rl install trainer` installs it")
    directory = Path(spec.origin).parent
    if (directory / "lib" / "libtorch_cuda.so").exists():
        raise UserError("agent-rl dry-run needs a CPU build of torch; this one has CUDA: use another environment")
    return directory


def _first_error(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line), text.strip().splitlines()[-1] if text else "")
