"""R2E-Gym's own tool scripts, its parser of calls and its wording of observations, run from a checkout of it.

    PYTHONPATH=.:tests python -m support.r2egym_scripts CHECKOUT

has them answer the turns in ``tests/tools/r2egym-recorded.json.xz`` again, in sandboxes of bubblewrap, and writes the
answers there. The turns were drawn at random: calls, right and wrong, on a small repository. This needs a checkout
(github.com/R2E-Gym/R2E-Gym, Apache-2.0), with ``chardet`` (5.2.0, as of its time) beside this Python. The file keeps
nothing of the checkout's text but what a model reads.
"""

from __future__ import annotations

import ast
import concurrent.futures
import hashlib
import importlib
import importlib.metadata
import json
import logging
import lzma
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.r2egym_files import FILES

RECORDED = Path(__file__).parents[1] / "tools/r2egym-recorded.json.xz"
CHECKOUT = "R2E_GYM"
"""The environment variable that names a checkout, whose scripts then answer in place of the recording."""

_AGENTHUB = "src/r2egym/agenthub"
_TOOLS = ("file_editor", "search", "execute_bash", "finish")


class Scripts:
    """The parts of a checkout that answer: its parser and observations are imported, two methods are taken out of files
    that import much more, and a Python in the sandbox runs the scripts."""

    def __init__(self, checkout: Path) -> None:
        sys.path.insert(0, str(checkout / "src"))
        self.action = importlib.import_module("r2egym.agenthub.action").Action
        self.observation = importlib.import_module("r2egym.agenthub.observation").Observation
        self.parse: Callable[[Any, str], tuple[str, Any]] = _method(
            checkout / _AGENTHUB / "agent/agent.py", "Agent", "parse_response", re=re, Tuple=tuple, Action=self.action
        )
        run_names = {"re": re, "concurrent": concurrent, "CMD_TIMEOUT": 120, "DOCKER_PATH": ""}
        self.run: Callable[..., tuple[str, str]] = _method(
            checkout / _AGENTHUB / "runtime/docker.py", "DockerRuntime", "run", **run_names
        )
        self.tools = checkout / _AGENTHUB / "tools"

    def answers(self, turns: Sequence[str], files: Mapping[str, bytes]) -> dict[str, Any]:
        """The observations of a sequence of turns, and what its files became: a digest by path."""
        with tempfile.TemporaryDirectory() as directory, _sandbox(Path(directory), self.tools, files) as sandbox:
            log = logging.getLogger("r2egym")
            runtime = SimpleNamespace(container=sandbox, repo_path="/testbed", logger=log)
            observations = []
            for text in turns:
                action = self.parse(None, text)[1]
                named = action.function_name
                output, code = self.run(runtime, action.to_bashcmd(), timeout=90) if named else ("", 0)
                observations.append(str(self.observation(output, code, action)))
            return {"turns": list(turns), "observations": observations, "files": digests(Path(directory) / "testbed")}


def digests(directory: Path) -> dict[str, str]:
    """A digest of each file below ``directory`` by its path, bytecode left out."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(directory)): digest(path.read_bytes()) for path in files}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def repository() -> dict[str, bytes]:
    return {path: text.encode() for path, text in FILES.items()}


def recorded() -> list[dict[str, Any]]:
    """What the scripts answer to every sequence: asked now where ``R2E_GYM`` names a checkout, else as recorded."""
    if checkout := os.environ.get(CHECKOUT):
        return record(Path(checkout))
    return recording()


def recording() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(lzma.decompress(RECORDED.read_bytes()))["sequences"]
    return found


def record(checkout: Path) -> list[dict[str, Any]]:
    scripts, files = Scripts(checkout), repository()
    logging.getLogger("r2egym").disabled = True
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda sequence: scripts.answers(sequence["turns"], files), recording()))


def _method(path: Path, owner: str, name: str, **names: Any) -> Callable[..., Any]:
    """The method ``owner.name`` of the module at ``path``, which is not imported: it would want all that it imports."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    methods = [node for kind in classes if kind.name == owner for node in kind.body]
    (method,) = [node for node in methods if isinstance(node, ast.FunctionDef) and node.name == name]
    exec(compile(ast.Module([method], []), str(path), "exec"), names)
    made: Callable[..., Any] = names[name]
    return made


class _Sandbox:
    """Enough of a container for ``DockerRuntime.run``."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    def exec_run(self, *, cmd: Sequence[str], workdir: str, **options: Any) -> SimpleNamespace:
        argv = [*self._argv, "--chdir", workdir, *cmd]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return SimpleNamespace(output=done.stdout, exit_code=done.returncode)


@contextmanager
def _sandbox(directory: Path, tools: Path, files: Mapping[str, bytes]) -> Iterator[_Sandbox]:
    for path, data in files.items():
        file = directory / "testbed" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    for name in ("bin", "python", "tmp"):
        (directory / name).mkdir()
    for name in _TOOLS:
        (directory / "bin" / name).write_bytes((tools / f"{name}.py").read_bytes())
        (directory / "bin" / name).chmod(0o755)
    chardet = importlib.import_module("chardet")
    python, base = os.path.realpath(sys.executable), sys.base_prefix
    (directory / "python/python").symlink_to(python)
    shared = ["--ro-bind", base, base, "--ro-bind", str(Path(chardet.__file__).parent.parent), "/opt/chardet"]
    argv = ["bwrap", "--die-with-parent", "--unshare-all", "--clearenv"]
    argv += ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
    argv += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *shared]
    argv += ["--ro-bind", f"{directory}/bin", "/opt/bin", "--ro-bind", f"{directory}/python", "/root/.venv/bin"]
    argv += ["--bind", f"{directory}/testbed", "/testbed", "--bind", f"{directory}/tmp", "/var/tmp"]
    argv += ["--setenv", "PATH", "/opt/bin:/usr/local/bin:/usr/bin:/bin", "--setenv", "PYTHONPATH", "/opt/chardet"]
    argv += ["--setenv", "PYTHONDONTWRITEBYTECODE", "1"]
    yield _Sandbox(argv)


def main(checkout: Path) -> None:
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    source = f"github.com/R2E-Gym/R2E-Gym at {commit or os.environ.get('R2E_GYM_COMMIT', 'a commit that is not known')}"
    versions = {"python": platform.python_version(), "chardet": importlib.metadata.version("chardet")}
    whole = {"source": source, **versions, "sequences": record(checkout)}
    RECORDED.write_bytes(lzma.compress(json.dumps(whole, ensure_ascii=False).encode(), preset=9))
    print(f"{RECORDED}: {len(whole['sequences'])} sequences, {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
