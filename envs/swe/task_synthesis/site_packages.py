"""Installs the packages that tests import, one directory per set of requirements.

Only wheels are installed: pip unpacks them without running code of a package. This step uses the network.
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

from envs.swe.task_synthesis.candidate import CandidateRejected
from envs.swe.task_synthesis.requirements import PYTEST

_PIP_TIMEOUT_S = 600.0
_MAX_ATTEMPTS = 12
_MISSING = re.compile(r"requirement ([A-Za-z0-9][\w.-]*)[^\n]*?(?:\(from ([A-Za-z0-9][\w.-]*))?[^\n]*\(from versions")
_SUMMARY_FILE = "agent-rl-site.json"


class SitePackages:
    """The directories ``site-*`` in ``directory`` for sandboxes with the Python version ``python`` (such as "3.11").

    Each has at most ``mb`` MiB and contains the requirement ``always``.
    """

    def __init__(self, directory: Path, python: str, mb: int = 4096, always: str = PYTEST) -> None:
        self._directory, self._python, self._mb, self._always = directory, python, mb, always
        self._locks: dict[str, asyncio.Lock] = {}

    async def install(self, requirements: Sequence[str]) -> str:
        """Return the name of the directory with the requirements, created if it is missing.

        A requirement without a wheel is left out and listed in the directory's file ``agent-rl-site.json``. Raises
        ``CandidateRejected``.
        """
        requirements = [self._always, *requirements]
        key = hashlib.sha256(json.dumps([self._python, requirements]).encode()).hexdigest()[:10]
        return await self.install_as(f"site-{key}", requirements)

    async def install_as(self, name: str, requirements: Sequence[str]) -> str:
        """As :meth:`install`, with a given directory name and without ``always``."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not (self._directory / name).is_dir():
                await self._create(self._directory / name, requirements)
        return name

    async def _create(self, target: Path, requirements: Sequence[str]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=".site."))
        try:
            installed = await self._install(fresh / "site", list(requirements))
            (fresh / "site").mkdir(exist_ok=True)
            omitted = [requirement for requirement in requirements if requirement not in installed]
            summary = {"requirements": installed, "left out": omitted}
            (fresh / "site" / _SUMMARY_FILE).write_text(json.dumps(summary))
            (fresh / "site").chmod(0o755)
            (fresh / "site").rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    async def _install(self, site: Path, requirements: list[str]) -> list[str]:
        """Install the requirements that have wheels, and return them."""
        arguments = ("--no-compile", "--only-binary", ":all:", "--python-version", self._python, "--target", str(site))
        for _ in range(_MAX_ATTEMPTS):
            command = ["install", "--quiet", *arguments, *requirements]
            code, output = await run_pip(command, watched=site.parent, mb=self._mb)
            if code == 0:
                return requirements
            shutil.rmtree(site, ignore_errors=True)
            missing = {canonicalize_name(name) for pair in _MISSING.findall(output) for name in pair if name}
            missing -= {canonicalize_name(Requirement(self._always).name)}
            available = [line for line in requirements if canonicalize_name(Requirement(line).name) not in missing]
            if len(available) == len(requirements):
                available = [self._always] if len(requirements) > 1 else []
            if not available:
                raise CandidateRejected("dependencies can't be installed", pip_error(output))
            requirements = available
        raise CandidateRejected("dependencies can't be installed", pip_error(output))


async def run_pip(
    arguments: Sequence[str], *, watched: Path, mb: int, seconds: float = _PIP_TIMEOUT_S
) -> tuple[int, str]:
    """Run pip and return its exit code and output; limits and errors as :func:`run_limited`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments]
    return await run_limited(command, watched=watched, mb=mb, seconds=seconds)


async def run_limited(command: Sequence[str], *, watched: Path, mb: int, seconds: float) -> tuple[int, str]:
    """Run a command and return its exit code and output (stdout and stderr).

    The command and its temporary files write below ``watched``. Raises ``CandidateRejected`` and kills the command if
    ``watched`` exceeds ``mb`` MiB or the run takes longer than ``seconds``.
    """
    (watched / "tmp").mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(watched / "tmp"), "PIP_NO_INPUT": "1"},
        start_new_session=True,
    )
    communication = asyncio.create_task(process.communicate())
    try:
        deadline = asyncio.get_running_loop().time() + seconds
        while not (await asyncio.wait((communication,), timeout=0.5))[0]:
            if await asyncio.to_thread(directory_mb, watched) > mb:
                raise CandidateRejected("dependencies too large", f"more than {mb} MiB")
            if asyncio.get_running_loop().time() > deadline:
                raise CandidateRejected("dependencies can't be installed", f"no end within {seconds:.0f} s")
        return process.returncode or 0, communication.result()[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait((communication,))


def directory_mb(directory: Path) -> int:
    """Size of the files below a directory in MiB. Does not follow links."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # deleted in the meantime
    return total >> 20


def pip_error(text: str) -> str:
    """The last error line in pip's output, or its last line."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
