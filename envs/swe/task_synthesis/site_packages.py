"""Directories of the packages that tests import, one for each set of requirements.

Only wheels are installed: pip unpacks them, and nothing of a package is run. It is the one step that uses the network.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envs.swe.task_synthesis.candidate import Fallen
from envs.swe.task_synthesis.requirements import PYTEST

_SECONDS = 600.0
_DROPPED = 12
_MISSING = re.compile(r"requirement ([A-Za-z0-9][\w.-]*)[^\n]*?(?:\(from ([A-Za-z0-9][\w.-]*))?[^\n]*\(from versions")
_ABOUT = "agent-rl-site.json"


class SitePackages:
    """The directories ``site-*`` in ``directory`` for sandboxes whose Python is ``python`` (as "3.11"), of ``mb``
    MiB at most.

    ``always`` is what each of them holds.
    """

    def __init__(self, directory: Path, python: str, mb: int = 4096, always: str = PYTEST) -> None:
        self._directory, self._python, self._mb, self._always = directory, python, mb, always
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, requirements: Sequence[str]) -> str:
        """The name of the directory that holds the requirements, made unless it is there.

        A requirement that can't be had as a wheel is left out, and named in the directory's file
        ``agent-rl-site.json``. Raises ``Fallen``.
        """
        asked = [self._always, *requirements]
        key = hashlib.sha256(json.dumps([self._python, asked]).encode()).hexdigest()[:10]
        return await self.named(f"site-{key}", asked)

    async def named(self, name: str, asked: Sequence[str]) -> str:
        """The same for a directory that is given a name, of these requirements alone."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not (self._directory / name).is_dir():
                await self._make(self._directory / name, asked)
        return name

    async def _make(self, target: Path, asked: Sequence[str]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=".site."))
        try:
            kept = await self._install(fresh / "site", list(asked))
            (fresh / "site").mkdir(exist_ok=True)
            about = {"requirements": kept, "left out": [need for need in asked if need not in kept]}
            (fresh / "site" / _ABOUT).write_text(json.dumps(about))
            (fresh / "site").chmod(0o755)
            (fresh / "site").rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    async def _install(self, site: Path, asked: list[str]) -> list[str]:
        """Install what can be had, and return it."""
        arguments = ("--no-compile", "--only-binary", ":all:", "--python-version", self._python, "--target", str(site))
        for _ in range(_DROPPED):
            code, output = await pip(["install", "--quiet", *arguments, *asked], watched=site.parent, mb=self._mb)
            if code == 0:
                return asked
            shutil.rmtree(site, ignore_errors=True)
            missing = {canonicalize_name(name) for pair in _MISSING.findall(output) for name in pair if name}
            left = [
                need
                for need in asked
                if need == self._always or canonicalize_name(Requirement(need).name) not in missing
            ]
            if len(left) == len(asked):
                left = [self._always] if len(asked) > 1 else []
            if not left:
                raise Fallen("dependencies can't be installed", pip_error(output))
            asked = left
        raise Fallen("dependencies can't be installed", pip_error(output))


async def pip(arguments: Sequence[str], *, watched: Path, mb: int, seconds: float = _SECONDS) -> tuple[int, str]:
    """Run pip and return its exit code and what it wrote. It is ended when ``watched``, which also holds its temporary
    files, has grown beyond ``mb`` MiB or its time is over: ``Fallen``."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments]
    return await run_watched(command, watched=watched, mb=mb, seconds=seconds)


async def run_watched(command: Sequence[str], *, watched: Path, mb: int, seconds: float) -> tuple[int, str]:
    """Run a command that writes below ``watched``, within the time and the disk it is given; else ``Fallen``."""
    (watched / "tmp").mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(watched / "tmp"), "PIP_NO_INPUT": "1"},
        start_new_session=True,
    )
    talking = asyncio.create_task(process.communicate())
    try:
        ends = asyncio.get_running_loop().time() + seconds
        while not (await asyncio.wait((talking,), timeout=0.5))[0]:
            if await asyncio.to_thread(dir_mb, watched) > mb:
                raise Fallen("dependencies too large", f"more than {mb} MiB")
            if asyncio.get_running_loop().time() > ends:
                raise Fallen("dependencies can't be installed", f"no end within {seconds:.0f} s")
        return process.returncode or 0, talking.result()[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait((talking,))


def dir_mb(directory: Path) -> int:
    """MiB of the files below a directory, links not followed."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue  # gone meanwhile
    return total >> 20


def pip_error(text: str) -> str:
    """The last error that pip tells, or else its last line."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
