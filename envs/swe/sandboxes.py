"""A task's repository in a sandbox: started for the agent, and started afresh for the hidden tests."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from envs.context import EnvContext
from envs.swe.apart import UNANSWERED, Link
from envs.swe.calls import SECONDS, CallRun
from envs.swe.diff.git_diff import patched_paths
from envs.swe.diff.snapshot import LIST, LISTING, MAX_LISTING, Base
from envs.swe.integrity import IntegrityMonitor, Report
from envs.swe.records import SWEBENCH_SCRIPT, WORKDIR, SweRecord
from envs.swe.repositories import SETUP_TIMEOUT, Repositories, first_commit, in_workdir
from envs.swe.swebench import eval_script
from envs.types import TaskRecordError
from sandbox import (
    ExecResult,
    ImageMissingError,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxSpec,
    SandboxStartError,
)

SITE = "/opt/agent-rl/site"
_LOG = "/tmp/agent-rl-tests.log"
_LOG_BYTES = 400_000
_LOG_FILE_KIB = 64 * 1024
_BEGIN = b"agent-rl: tests begin\n"
_NAMED = "/tmp/agent-rl-named"
# What a machine or a sandbox's limits are short of, in the words of Python and of libc's programs.
_LACKS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS)
_TROUBLE = ("MemoryError", *map(os.strerror, _LACKS))
_SIGNALS = 128  # bash's exit codes from here on are those of processes that a signal ended
# Applies the patch, and ends where a path changed (its inode, time, size, mode or kind) that the patch does not name.
_APPLY = f"""(export LC_ALL=C
list() {{ find . -path ./.git -prune -o ! -type d -printf '%P\\t%i %C@ %s %m %y\\0' | sort -z; }}
list >{_NAMED}.before && git apply --whitespace=nowarn - >&2 && list >{_NAMED}.after || exit
changed=$(sort -z {_NAMED}.before {_NAMED}.after | uniq -zu | cut -zf1 | sort -zu | comm -z23 - {_NAMED} | tr '\\0' ' ')
if [ -n "$changed" ]; then echo "it changes files that it does not name: $changed" >&2; exit 1; fi) || exit
"""

_GIT_ENV = {
    "GIT_AUTHOR_NAME": "agent-rl",
    "GIT_AUTHOR_EMAIL": "agent-rl@localhost",
    "GIT_COMMITTER_NAME": "agent-rl",
    "GIT_COMMITTER_EMAIL": "agent-rl@localhost",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
# What R2E-Gym's images hold of a task and R2E-Gym hides from its agents (SKIP_FILES, src/r2egym/agenthub/__init__.py;
# Dockerfile.sympy puts all of it into the repository): the hidden tests and their script, and what tells of the fix.
_TESTS_IN_IMAGE = ("r2e_tests", "run_tests.sh")
_TOLD_IN_IMAGE = (
    *("parsed_commit.json", "execution_result.json", "expected_test_output.json"),
    *("syn_issue.json", "modified_files.json", "modified_entities.json"),
)
_PLACES = ("/", "/root/", "")
_FIX_IN_IMAGE = tuple(place + name for place in _PLACES for name in _TOLD_IN_IMAGE)
HIDDEN_IN_IMAGE = tuple(place + name for place in _PLACES for name in _TESTS_IN_IMAGE) + _FIX_IN_IMAGE
# The agent's sandbox also loses the history, and bytecode, which may have been compiled from the fixed code. Scripts of
# R2E-Gym's look for the environment in /root.
_LINK_ENVIRONMENT = 'if [ -d .venv ] && [ ! -e /root/.venv ]; then ln -s "$PWD/.venv" /root/.venv; fi\n'
_STRIP_IMAGE = f"""rm -rf {" ".join(HIDDEN_IN_IMAGE)} .git
left=$(ls -d {" ".join(HIDDEN_IN_IMAGE)} .git 2>/dev/null)
if [ -n "$left" ]; then echo "not to be removed from the agent's sight: $left"; exit 1; fi
find . -name .venv -prune -o \\( -name __pycache__ -o -name '*.pyc' \\) -print0 | xargs -0 rm -rf
{_LINK_ENVIRONMENT}"""
_IMAGE_PATH = (
    "/testbed/.venv/bin:/root/.venv/bin:/root/.local/bin:/opt/miniconda3/envs/testbed/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
# Code under test is the agent's, and would read the fix from there.
_LINK_IMAGE_TESTS = f"""rm -rf {" ".join(_FIX_IN_IMAGE)}
{_LINK_ENVIRONMENT}for place in / /root/; do
    if [ -d "${{place}}r2e_tests" ]; then rm -rf r2e_tests; ln -s "${{place}}r2e_tests" r2e_tests; fi
    if [ ! -e run_tests.sh ] && [ -f "${{place}}run_tests.sh" ]; then cp "${{place}}run_tests.sh" .; fi
done
"""


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of the hidden tests. ``began`` is False where the patch did not apply; ``log`` is the log's end, or what
    was made of the answers where the tests are calls.

    ``witnessed`` says that pytest runs the tests and a plugin watched it; ``report`` is what the plugin left.
    """

    __test__ = False  # not a test class, whatever its name says to pytest

    began: bool
    result: ExecResult
    log: str
    witnessed: bool
    report: Report | None

    @property
    def ended(self) -> bool:
        """Whether the run came to an end by itself: no limit or signal cut it off, nothing says that the machine lacked
        anything, and git had no trouble of its own (it ends with 1 for a patch that does not apply, else with 128)."""
        cut_off = self.result.timed_out or self.result.oom_killed or self.result.exit_code >= _SIGNALS
        text = self.log + self.result.text
        return not cut_off and not any(trouble in text for trouble in _TROUBLE)

    @property
    def account(self) -> str:
        """What happened, in a few words."""
        if not self.began:
            return f"the patch does not apply: {_end(self.result.text)}"
        if self.result.oom_killed:
            return "the tests ran out of memory"
        if self.result.timed_out:
            return f"the tests did not end within {self.result.seconds:.0f} s"
        return f"exit code {self.result.exit_code}: {_end(self.log)}"


def _end(text: str) -> str:
    """The end of a text, on one line."""
    return " ".join(text[-1000:].split())[-300:]


def sandbox_spec(context: EnvContext, record: SweRecord, site_root: Path | None) -> SandboxSpec:
    """The sandbox of a task: the context's limits, the record's image, its site packages (found below
    ``site_root``)."""
    env = {"PYTHONDONTWRITEBYTECODE": "1", **_GIT_ENV}
    if not record.is_local and record.workdir == WORKDIR:  # other images keep their own
        env["PATH"] = _IMAGE_PATH
    if record.swebench:
        env["PIP_NO_INDEX"] = "1"  # its scripts install again what is installed: fail at once, not after retries
    env |= context.limits.env
    binds = dict(context.limits.ro_binds)
    if record.site_packages:
        binds[str(site_dir(record, site_root))] = SITE
        env["PYTHONPATH"] = SITE
    image = record.docker_image if not record.is_local else context.limits.image
    return replace(context.limits, image=image, workdir=record.workdir, env=env, ro_binds=binds)


def site_dir(record: SweRecord, site_root: Path | None) -> Path:
    """The directory that the record's ``site_packages`` names, its links resolved.

    Raises ``TaskRecordError`` where that is no directory below ``site_root``: a row must not choose what of the host is
    seen.
    """
    root = (site_root or Path()).resolve()
    directory = (root / record.site_packages).resolve()
    if root not in directory.parents or not directory.is_dir():
        raise TaskRecordError(
            f"task {record.id}: site_packages: {record.site_packages!r} leads to {directory}; right would be a "
            "directory "
            f"below that of the task file ({root})"
        )
    return directory


@asynccontextmanager
async def task_sandbox(context: EnvContext, record: SweRecord, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """A fresh sandbox with what the task starts from: its image's repository, broken where ``bug_patch`` breaks it.

    Raises ``SandboxStartError`` where that does not apply.
    """
    async with context.sandbox(spec) as sandbox:
        if record.bug_patch:
            bug = record.bug_patch.encode(errors="replace")
            done = await sandbox.exec("git apply --whitespace=nowarn -", timeout=SETUP_TIMEOUT, stdin=bug)
            if not done.ok:
                raise SandboxStartError(f"task {record.id}: the bug does not apply to the image: {_end(done.text)}")
        yield sandbox


@asynccontextmanager
async def agent_sandbox(
    context: EnvContext, record: SweRecord, spec: SandboxSpec, repositories: Repositories | None = None
) -> AsyncIterator[tuple[Sandbox, bytes]]:
    """A sandbox with the repository as the agent finds it, without hidden tests, and git's listing of it for a task
    in an image (empty for one that brings its files along).

    ``repositories`` remembers the git directories of local records from one sandbox to the next.
    """
    async with AsyncExitStack() as stack:
        try:
            sandbox = await stack.enter_async_context(task_sandbox(context, record, spec))
        except ImageMissingError as error:
            raise ImageMissingError(f"task {record.id}: docker_image: {error}") from None
        if record.is_local:
            await (repositories or Repositories()).set_up(sandbox, record.files)
            yield sandbox, b""
        else:
            await first_commit(sandbox, before=_STRIP_IMAGE + _strip_tests(record), after=LIST)
            yield sandbox, await _listing(sandbox)


def _strip_tests(record: SweRecord) -> str:
    """Bash that removes the hidden tests which the image's repository has."""
    files = record.swebench.hidden_files if record.swebench else ()
    return f"rm -rf -- {shlex.join(files)}\n" if files else ""


async def _listing(sandbox: Sandbox) -> bytes:
    try:
        listing = await sandbox.read_file(LISTING, max_bytes=MAX_LISTING)
        await asyncio.to_thread(Base.of_listing, listing)
        return listing
    except (SandboxFileError, ValueError) as error:
        raise SandboxStartError(f"the repository could not be listed: {error}") from None


async def run_tests(context: EnvContext, record: SweRecord, spec: SandboxSpec, patch: str) -> TestRun:
    """Apply ``patch`` to the original repository in a fresh sandbox and run the hidden tests there."""
    witness = IntegrityMonitor(watched=sorted(record.hidden) or ["r2e_tests"]) if record.runs_pytest else None
    calls = CallRun(record.calls) if record.calls else None
    script = await asyncio.to_thread(eval_script, record) if record.swebench else ""
    named = await asyncio.to_thread(_sorted_paths, patch)
    async with task_sandbox(context, record, spec) as sandbox:
        # Hidden tests may be written first: a screened patch touches none of them.
        files = {**in_workdir({**record.files, **record.tests}), **(witness.files() if witness else {})}
        files |= calls.files() if calls else {}
        if script:
            files[SWEBENCH_SCRIPT] = script.encode()
        await sandbox.write_files({**files, _NAMED: named})
        tests = f"{witness.exports if witness else ''}{calls.command if calls else record.command}"
        timeout = min(context.grade_timeout, SECONDS) if calls else context.grade_timeout
        command = _grade_command(record, patch, tests)
        result = await sandbox.exec(command, timeout=timeout, stdin=patch.encode())
        began = result.stdout.startswith(_BEGIN)
        report = await witness.read(sandbox) if witness and began else None
        log = result.stdout[len(_BEGIN) :] if began else b""
        if script and began:  # its results stand between markers, the first of which may be far from the end
            log = await _whole_log(sandbox)
    text = log.decode(errors="replace")
    return TestRun(began, result, calls.summary(text) if calls else text, witness is not None, report)


async def run_apart(context: EnvContext, record: SweRecord, spec: SandboxSpec, patch: str) -> TestRun:
    """The same with two sandboxes: the patch is applied, and its code runs, in one; the hidden tests run in the other.

    Raises ``SandboxError`` also where the two sandboxes do not meet.
    """
    witness = IntegrityMonitor(watched=sorted(record.hidden))
    named = await asyncio.to_thread(_sorted_paths, patch)
    async with Link.open(context.backend, spec, sorted(record.hidden)) as link:
        spec = replace(spec, ro_binds={**spec.ro_binds, **link.binds})
        async with context.pairs, context.sandbox(spec) as code, context.sandbox(spec) as tests:
            data = {path: text for path, text in record.tests.items() if not path.endswith(".py")}
            await code.write_files({**in_workdir({**record.files, **data}), **link.code_files(), _NAMED: named})
            given = {**in_workdir({**record.files, **record.tests}), **link.tests_files(), **witness.files()}
            await tests.write_files(given)
            serve = _grade_command(record, patch, link.serve(WORKDIR))
            command = _grade_command(record, "", link.exports + witness.exports + record.command)
            limit = context.grade_timeout
            serving = asyncio.create_task(code.exec(serve, timeout=limit + 5, cwd=WORKDIR, stdin=patch.encode()))
            testing = asyncio.create_task(tests.exec(command, timeout=limit, cwd=WORKDIR))
            try:
                await asyncio.wait((serving, testing), return_when=asyncio.FIRST_COMPLETED)
                if serving.done() and not (served := serving.result()).stdout.startswith(_BEGIN):
                    return TestRun(False, served, "", True, None)
                result = await testing
                if result.exit_code == UNANSWERED:
                    raise SandboxError(f"task {record.id}: the sandbox of the code under test did not answer")
                report = await witness.read(tests)
            finally:
                serving.cancel()
                testing.cancel()
                await asyncio.wait((serving, testing))
    return TestRun(True, result, result.stdout.removeprefix(_BEGIN).decode(errors="replace"), True, report)


def _sorted_paths(patch: str) -> bytes:
    """The paths that a patch names, sorted by their bytes, each with a null byte at its end."""
    return b"".join(path + b"\0" for path in sorted(path.encode(errors="replace") for path in patched_paths(patch)))


async def _whole_log(sandbox: Sandbox) -> bytes:
    """All that the tests printed; nothing where that is more than can be read, which makes a run without verdict."""
    try:
        return await sandbox.read_file(_LOG, max_bytes=_LOG_FILE_KIB << 10)
    except SandboxFileError:
        return b""


def _grade_command(record: SweRecord, patch: str, tests: str) -> str:
    """Bash that applies the patch on standard input, announces the ``tests``, runs them and prints their log's end.

    The log goes through a file, since the summary stands at its end and the sandbox caps output from its start; the
    file's size is limited, and no pipe is left open for a daemon that a test may leave behind.
    """
    prepare = "" if record.is_local else _LINK_IMAGE_TESTS
    apply = _APPLY if patch else ""
    return (
        f"{prepare}{apply}echo '{_BEGIN.decode().strip()}'\n"
        f"( ulimit -f {_LOG_FILE_KIB}; eval {shlex.quote(tests)} ) >{_LOG} 2>&1 </dev/null; code=$?\n"
        f"tail -c {_LOG_BYTES} {_LOG}; exit $code"
    )
