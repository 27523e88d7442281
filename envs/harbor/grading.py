"""Grades the state of the agent's sandbox by the task's ``tests/test.sh``, as Harbor's verifier does.

Before the tests enter the sandbox, the agent's processes are killed, the reward files and ``/tests`` are removed, and
programs that the agent replaced are looked for from outside of the sandbox. The exit code of ``test.sh`` counts for
nothing; only the reward file does. Without a valid one there is no reward: an infrastructure failure, never 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import PurePosixPath

from envs.grades import MAX_NAMES, PART_NAME
from envs.harbor.tasks import HarborTask, read_files, resolve
from envs.types import Grade, GradingError
from sandbox import Change, ExecResult, Sandbox, SandboxFileError
from sandbox.types import EXIT_DISK_LIMIT

LOGS = "/logs"
TESTS = "/tests"
MAX_LOG = 1 << 16
_SETUP_SECONDS = 60.0
_REWARD_BYTES = 1 << 20
_LISTED = 10
_PROGRAMS = ("/bin", "/sbin", "/lib", "/usr")
_NOT_PROGRAMS = ("/usr/share", "/usr/local/share", "/usr/include", "/usr/src")
_PYTHON_STARTUP = ("sitecustomize.py", "usercustomize.py")
# Pytest reads these beside and above its tests.
_ABOVE_TESTS = ("/conftest.py", "/pytest.ini", "/.pytest.ini", "/tox.ini", "/setup.cfg", "/pyproject.toml")
# Root without capabilities cannot remove another user's files, but it can rename their directory.
_CLEAR = f"""
[ -d {LOGS} ] && [ ! -L {LOGS} ] || {{ rm -rf {LOGS} && mkdir {LOGS}; }}
rm -rf {LOGS}/verifier 2>/dev/null || mv {LOGS}/verifier "{LOGS}/verifier.agent.$$"
rm -rf {TESTS}
mkdir {LOGS}/verifier && chmod 777 {LOGS}/verifier && [ ! -e {TESTS} ] && [ ! -L {TESTS} ]
"""
_RUN = f'cd -- "$1" 2>/dev/null || cd /; exec {TESTS}/test.sh'


@dataclass(frozen=True, slots=True)
class Survey:
    """The image before the agent's first command: the directories of PATH, and the names of their programs.

    ``may_replace`` are patterns of paths that the agent may change nevertheless.
    """

    path: tuple[str, ...]
    programs: frozenset[str]
    may_replace: tuple[str, ...] = ()


def parse_reward(name: str, content: bytes) -> tuple[float, dict[str, float]]:
    """The reward and the metrics of a reward file; numbers whose names a grade does not allow are left out.

    Raises ``GradingError`` for a file without a finite reward.
    """
    try:
        value = json.loads(content) if name.endswith(".json") else float(content)
        named: Mapping[str, object] = value if isinstance(value, dict) else {"reward": value}
        numbers = {key: float(number) for key, number in named.items() if isinstance(number, int | float)}
    except (ValueError, OverflowError, RecursionError):
        raise GradingError(f"{name} is {'empty' if not content.strip() else f'not valid: {content[:60]!r}'}") from None
    if len(numbers) < len(named) or not all(map(math.isfinite, numbers.values())):
        raise GradingError(f"{name} has a value that is not a finite number: {content[:100]!r}")
    if "reward" not in numbers:
        raise GradingError(f"{name} has no number named reward: {content[:100]!r}")
    reward = numbers.pop("reward")
    metrics = {key: number for key, number in numbers.items() if re.fullmatch(PART_NAME, key)}
    return reward, dict(islice(metrics.items(), MAX_NAMES))


def replaced_programs(changes: Mapping[str, Change], survey: Survey) -> list[str]:
    """The changed paths through which the agent could run code of its own in place of the image's programs."""
    return [f"{path}: {change}" for path, change in sorted(changes.items()) if _replaces(path, change, survey)]


def _replaces(path: str, change: Change, survey: Survey) -> bool:
    where = PurePosixPath(path)
    if any(fnmatch(path, pattern) for pattern in survey.may_replace):
        return False
    if path in _ABOVE_TESTS:
        return True
    if change == "added":
        shadows = str(where.parent) in survey.path and where.name in survey.programs
        return shadows or where.name in _PYTHON_STARTUP or path == "/etc/ld.so.preload"
    directories = tuple(map(PurePosixPath, (*_PROGRAMS, *survey.path)))
    if "__pycache__" in where.parts or any(where.is_relative_to(other) for other in _NOT_PROGRAMS):
        return False
    return any(where.is_relative_to(directory) or directory.is_relative_to(where) for directory in directories)


async def copy_in(sandbox: Sandbox, files: Mapping[str, tuple[bytes, bool]], target: str) -> ExecResult:
    """Write ``files`` below ``target``, owned by root, readable by all, writable by no one else."""
    await sandbox.write_files({f"{target}/{name}": content for name, (content, _) in files.items()})
    programs = [f"{target}/{name}" for name, (_, executable) in files.items() if executable]
    command = 'chmod -R u=rwX,go=rX "$1" && shift && { [ $# = 0 ] || chmod 755 "$@"; }'
    return await sandbox.exec(["sh", "-c", command, "sh", target, *programs], timeout=_SETUP_SECONDS)


async def grade(sandbox: Sandbox, task: HarborTask, survey: Survey, users: Sequence[str], verifier: str) -> Grade:
    """Grade ``task`` in the agent's ``sandbox``. ``users`` are all who ran commands there; ``verifier`` runs the tests.

    Raises ``GradingError`` if ``test.sh`` takes too long or leaves no valid reward.
    """
    for user in users:  # the end of a command kills all processes of its user
        await sandbox.exec(["/bin/sh", "-c", ":"], timeout=_SETUP_SECONDS, user=user)
    tests = read_files(task.directory / "tests", task)
    tests["test.sh"] = tests["test.sh"][0], True
    try:
        if replaced := replaced_programs(await sandbox.changes(), survey):
            hacks = [f"a program of the image was replaced: {each}" for each in replaced[:_LISTED]]
            return Grade(0.0, False, suspected_hack=hacks)
        prepared = await sandbox.exec(["/bin/sh", "-c", _CLEAR], timeout=_SETUP_SECONDS, cwd="/")
        prepared = await copy_in(sandbox, tests, TESTS) if prepared.ok else prepared
    except SandboxFileError as error:
        return Grade(0.0, False, suspected_hack=[f"the tests cannot enter the agent's sandbox: {error}"])
    if not prepared.ok:
        reason = prepared.text.strip()[-200:] or f"exit code {prepared.exit_code}"
        return Grade(0.0, False, suspected_hack=[f"the agent's sandbox cannot be graded: {reason}"])
    timeout, env = task.config.verifier.timeout_sec, resolve(task.config.verifier.env)
    run = ["bash", "-c", _RUN, "bash", sandbox.spec.workdir]
    result = await sandbox.exec(run, timeout=timeout, cwd="/", env=env, user=verifier)
    if result.exit_code == EXIT_DISK_LIMIT:
        return Grade(0.0, False, log=result.text[-MAX_LOG:], suspected_hack=["the tests outgrew the sandbox's disk"])
    if result.timed_out:
        raise GradingError(f"task {task.id}: test.sh did not end within {timeout:.0f} s")
    reward, metrics = await _read_reward(sandbox, task, result)
    log = result.text[-MAX_LOG:]
    return Grade(reward, reward >= 1.0, log=log, seconds=result.seconds, metrics=metrics)


async def _read_reward(sandbox: Sandbox, task: HarborTask, result: ExecResult) -> tuple[float, dict[str, float]]:
    """The reward and the metrics that ``test.sh`` left; reward.json comes before reward.txt."""
    for name in ("reward.json", "reward.txt"):
        try:
            content = await sandbox.read_file(f"{LOGS}/verifier/{name}", max_bytes=_REWARD_BYTES)
        except SandboxFileError as error:
            if "no such file" in str(error):
                continue
            raise GradingError(f"task {task.id}: {error}") from None
        return parse_reward(f"task {task.id}: {name}", content)
    end = f"exit code {result.exit_code}: {' '.join(result.text[-1000:].split())[-300:]}"
    raise GradingError(f"task {task.id}: test.sh wrote neither reward.json nor reward.txt ({end})")
