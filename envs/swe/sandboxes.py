"""Starts sandboxes with a task's repository: one for the agent, and a fresh one for each run of the hidden tests."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from envs.context import EnvContext
from envs.swe.calls import TIMEOUT_S, CallRun
from envs.swe.diff.git_diff import patched_paths, split_patch
from envs.swe.diff.snapshot import LIST_COMMAND, LISTING_PATH, MAX_LISTING_BYTES, BaseSnapshot
from envs.swe.records import SWEBENCH_SCRIPT, WORKDIR, SweRecord
from envs.swe.repositories import SETUP_TIMEOUT, RepositoryCache, create_initial_commit, workdir_files
from envs.swe.swebench import eval_script
from envs.swe.test_side import Trace
from envs.types import TaskRecordError
from sandbox import ExecResult, ImageMissingError, Sandbox, SandboxFileError, SandboxSpec, SandboxStartError

SITE_PACKAGES = "/opt/agent-rl/site"
_LOG = "/tmp/agent-rl-tests.log"
_LOG_BYTES = 400_000
_LOG_FILE_KIB = 64 * 1024
_BEGIN = b"agent-rl: tests begin\n"
_PATCHED_PATHS = "/tmp/agent-rl-named"
# Messages of Python and of libc's programs for a resource that the machine or the sandbox's limits lack.
_RESOURCE_ERRORS = ("ENOSPC", "EDQUOT", "ENOMEM", "EAGAIN", "EMFILE", "ENFILE", "EIO", "EROFS")
_RESOURCE_MESSAGES = ("MemoryError", *(os.strerror(getattr(errno, name)) for name in _RESOURCE_ERRORS))
_SIGNALS = 128  # bash exits with 128 + N for a process that signal N ended
# Applies the patch. Fails if a path that the patch does not name changed its inode, time, size, mode or kind.
_APPLY = f"""(export LC_ALL=C
list() {{ find . -path ./.git -prune -o ! -type d -printf '%P\\t%i %C@ %s %m %y\\0' | sort -z; }}
list >{_PATCHED_PATHS}.before && git apply --whitespace=nowarn - >&2 && list >{_PATCHED_PATHS}.after || exit
changed=$(sort -z {_PATCHED_PATHS}.before {_PATCHED_PATHS}.after | uniq -zu | cut -zf1 | sort -zu \
    | comm -z23 - {_PATCHED_PATHS} | tr '\\0' ' ')
if [ -n "$changed" ]; then echo "it changes files that it does not name: $changed" >&2; exit 1; fi) || exit
"""
# A module that is importable as a top-level one: in the repository's top directory, or in one that is usual for code.
_TOP_MODULE = re.compile(r"(?:(?:src|lib)/)?([^/.]+)(?:\.py|/__init__\.py)")
_SHADOWING = """for place in $(find / /usr /opt /root /home . -xdev -maxdepth 7 -type d \\( -name site-packages \
    -o -name dist-packages \\) 2>/dev/null) ${{PYTHONPATH//:/ }}; do for name in {names}; do
    for path in "$place/$name/__init__.py" "$place/$name".*; do if [ -e "$path" ] && [ "$place" != . ]; then
        echo "its module $name shadows $path" >&2; exit 1
    fi; done
done; done
"""

_GIT_ENV = {
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "agent-rl"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "agent-rl@localhost"),
    **{"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "1"},
    **{"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
}
# Files in R2E-Gym's images that R2E-Gym hides from its agents (SKIP_FILES, src/r2egym/agenthub/__init__.py;
# Dockerfile.sympy copies them into the repository): the hidden tests, their script, and descriptions of the fix.
_TESTS_IN_IMAGE = ("r2e_tests", "run_tests.sh")
_FIX_FILES = (
    *("parsed_commit.json", "execution_result.json", "expected_test_output.json"),
    *("syn_issue.json", "modified_files.json", "modified_entities.json"),
)
_PREFIXES = ("/", "/root/", "")
_FIX_IN_IMAGE = tuple(prefix + name for prefix in _PREFIXES for name in _FIX_FILES)
HIDDEN_IN_IMAGE = tuple(prefix + name for prefix in _PREFIXES for name in _TESTS_IN_IMAGE) + _FIX_IN_IMAGE
PRESENT = """present() { for each; do if [ -e "$each" ] || [ -L "$each" ]; then echo "$each"; fi; done; }
"""
"""A function of bash that prints those of its arguments that exist. ``ls`` of coreutils 9 fails under gVisor."""
# The agent's sandbox also loses the git history, the bytecode, which may be compiled from the fixed code, and pytest's
# cache, which names the tests that ran. R2E-Gym's scripts look for the virtual environment in /root.
_LINK_ENVIRONMENT = 'if [ -d .venv ] && [ ! -e /root/.venv ]; then ln -s "$PWD/.venv" /root/.venv; fi\n'
_STRIP_IMAGE = f"""{PRESENT}rm -rf {" ".join(HIDDEN_IN_IMAGE)} .git
left=$(present {" ".join(HIDDEN_IN_IMAGE)} .git)
if [ -n "$left" ]; then echo "could not be hidden from the agent: $left"; exit 1; fi
find . -name .venv -prune -o \\( -name __pycache__ -o -name '*.pyc' -o -name .pytest_cache \\) -print0 | xargs -0 rm -rf
{_LINK_ENVIRONMENT}"""
_IMAGE_PATH = (
    "/testbed/.venv/bin:/root/.venv/bin:/root/.local/bin:/opt/miniconda3/envs/testbed/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
# The code under test comes from the agent and could read the fix from these files.
_LINK_IMAGE_TESTS = f"""rm -rf {" ".join(_FIX_IN_IMAGE)}
{_LINK_ENVIRONMENT}for place in / /root/; do
    if [ -d "${{place}}r2e_tests" ]; then rm -rf r2e_tests; ln -s "${{place}}r2e_tests" r2e_tests; fi
    if [ ! -e run_tests.sh ] && [ -f "${{place}}run_tests.sh" ]; then cp "${{place}}run_tests.sh" .; fi
done
"""


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of the hidden tests.

    ``started`` is False if the patch did not apply. ``log`` is the end of the log; if the tests are calls, it is a
    pytest summary made from their results. ``test_side`` has the files of the test side if the run was traced.
    """

    __test__ = False  # pytest collects classes named Test*

    started: bool
    result: ExecResult
    log: str
    test_side: frozenset[str] = frozenset()

    @property
    def ended_normally(self) -> bool:
        """Whether no limit or signal ended the run, no message names a lack of resources, and git did not fail itself.

        git exits with 1 for a patch that does not apply and with 128 for its own failures.
        """
        cut_off = self.result.timed_out or self.result.oom_killed or self.result.exit_code >= _SIGNALS
        text = self.log + self.result.text
        return not cut_off and not any(message in text for message in _RESOURCE_MESSAGES)

    @property
    def outcome(self) -> str:
        """How the run ended, on one line."""
        if not self.started:
            return f"the patch does not apply: {_tail(self.result.text)}"
        if self.result.oom_killed:
            return "the tests ran out of memory"
        if self.result.timed_out:
            return f"the tests did not end within {self.result.seconds:.0f} s"
        return f"exit code {self.result.exit_code}: {_tail(self.log)}"


def _tail(text: str) -> str:
    """The last 300 characters of a text, on one line."""
    return " ".join(text[-1000:].split())[-300:]


def sandbox_spec(context: EnvContext, record: SweRecord, site_root: Path | None) -> SandboxSpec:
    """The spec of a task's sandboxes: the context's limits, the record's image and its site packages.

    ``site_packages`` of the record is relative to ``site_root``.
    """
    env = {"PYTHONDONTWRITEBYTECODE": "1", **_GIT_ENV}
    if not record.is_local and record.workdir == WORKDIR:  # other images keep their own
        env["PATH"] = _IMAGE_PATH
    if record.swebench:  # eval scripts reinstall installed packages; without an index pip fails without retries
        env["PIP_NO_INDEX"] = "1"
    image = record.docker_image if not record.is_local else context.limits.image
    spec = replace(context.limits, image=image, workdir=record.workdir, env={**env, **context.limits.env})
    return with_site_packages(spec, site_packages_dir(record, site_root)) if record.site_packages else spec


def with_site_packages(spec: SandboxSpec, directory: Path) -> SandboxSpec:
    """The spec of a sandbox that imports from ``directory``."""
    env = {**spec.env, "PYTHONPATH": SITE_PACKAGES}
    return replace(spec, env=env, ro_binds={**spec.ro_binds, str(directory): SITE_PACKAGES})


def site_packages_dir(record: SweRecord, site_root: Path | None) -> Path:
    """The resolved path of the record's ``site_packages`` directory.

    Raises ``TaskRecordError`` if it is not a directory below ``site_root``: a row must not choose which directories of
    the host a sandbox sees.
    """
    root = (site_root or Path()).resolve()
    directory = (root / record.site_packages).resolve()
    if root not in directory.parents or not directory.is_dir():
        raise TaskRecordError(
            f"task {record.id}: site_packages: {record.site_packages!r} leads to {directory}; right would be a "
            f"directory below that of the task file ({root})"
        )
    return directory


@asynccontextmanager
async def task_sandbox(context: EnvContext, record: SweRecord, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """A fresh sandbox with the image's repository and the record's ``bug_patch`` applied.

    Raises ``SandboxStartError`` if the bug does not apply.
    """
    async with context.sandbox(spec) as sandbox:
        if record.bug_patch:
            bug = record.bug_patch.encode(errors="replace")
            done = await sandbox.exec("git apply --whitespace=nowarn -", timeout=SETUP_TIMEOUT, stdin=bug)
            if not done.ok:
                raise SandboxStartError(f"task {record.id}: the bug does not apply to the image: {_tail(done.text)}")
        yield sandbox


@asynccontextmanager
async def agent_sandbox(
    context: EnvContext, record: SweRecord, spec: SandboxSpec, repositories: RepositoryCache | None = None
) -> AsyncIterator[tuple[Sandbox, bytes]]:
    """A sandbox with the repository as the agent finds it, without hidden tests, and git's listing of the repository.

    The listing is empty for a local record. ``repositories`` caches the git directories of local records.
    """
    async with AsyncExitStack() as stack:
        try:
            sandbox = await stack.enter_async_context(task_sandbox(context, record, spec))
        except ImageMissingError as error:
            raise ImageMissingError(f"task {record.id}: docker_image: {error}") from None
        if record.is_local:
            await (repositories or RepositoryCache()).populate(sandbox, record.files)
            yield sandbox, b""
        else:
            hidden = shlex.join(record.swebench.hidden_files if record.swebench else ())
            await create_initial_commit(sandbox, before=f"{_STRIP_IMAGE}rm -rf -- {hidden}\n", after=LIST_COMMAND)
            yield sandbox, await _read_listing(sandbox)


async def _read_listing(sandbox: Sandbox) -> bytes:
    try:
        listing = await sandbox.read_file(LISTING_PATH, max_bytes=MAX_LISTING_BYTES)
        await asyncio.to_thread(BaseSnapshot.from_listing, listing)
        return listing
    except (SandboxFileError, ValueError) as error:
        raise SandboxStartError(f"the repository could not be listed: {error}") from None


async def run_tests(
    context: EnvContext,
    record: SweRecord,
    spec: SandboxSpec,
    patch: str,
    other_files: Mapping[str, bytes] | None = None,
    trace: Trace | None = None,
) -> TestRun:
    """Apply ``patch`` to the original repository in a fresh sandbox and run the hidden tests there.

    ``other_files`` (absolute path -> content) are written into the sandbox first. ``trace`` lists opened files.
    """
    calls = CallRun(record.calls) if record.calls else None
    script = await asyncio.to_thread(eval_script, record) if record.swebench else ""
    paths = await asyncio.to_thread(_sorted_paths, patch)
    async with task_sandbox(context, record, spec) as sandbox:
        # The hidden tests can be written before the patch applies, because a screened patch touches none of them.
        files = {**workdir_files({**record.files, **record.tests}), **(other_files or {})}
        files |= trace.files() if trace else {}
        files |= calls.files() if calls else {}
        if script:
            files[SWEBENCH_SCRIPT] = script.encode()
        await sandbox.write_files({**files, _PATCHED_PATHS: paths})
        tests = (trace.exports if trace else "") + (calls.command if calls else record.command)
        timeout = min(context.grade_timeout, TIMEOUT_S) if calls else context.grade_timeout
        command = _grade_command(record, patch, tests)
        result = await sandbox.exec(command, timeout=timeout, stdin=patch.encode())
        started = result.stdout.startswith(_BEGIN)
        test_side = await trace.read(sandbox) if trace else frozenset()
        log = result.stdout[len(_BEGIN) :] if started else b""
        if script and started:  # the results stand between markers, and the first one may be far from the end
            log = await _read_full_log(sandbox)
    text = log.decode(errors="replace")
    return TestRun(started, result, calls.summary(text) if calls else text, test_side)


def _sorted_paths(patch: str) -> bytes:
    """The paths that a patch names, sorted by their bytes, each followed by a null byte (for ``comm -z``)."""
    return b"".join(path + b"\0" for path in sorted(path.encode(errors="replace") for path in patched_paths(patch)))


async def _read_full_log(sandbox: Sandbox) -> bytes:
    """The tests' whole output, or nothing if it exceeds 64 MiB; the run then has no verdict."""
    try:
        return await sandbox.read_file(_LOG, max_bytes=_LOG_FILE_KIB << 10)
    except SandboxFileError:
        return b""


def _shadowing_check(record: SweRecord, patch: str) -> str:
    """Bash that ends with a message if the patch adds a module with the name of an installed one."""
    added = {part.path for part in split_patch(patch) if part.is_new} - patched_paths(record.gold)
    names = {match[1] for path in added if (match := _TOP_MODULE.fullmatch(path))}
    return _SHADOWING.format(names=shlex.join(sorted(names))) if names else ""


def _grade_command(record: SweRecord, patch: str, tests: str) -> str:
    """Bash that applies the patch from standard input, prints ``_BEGIN``, runs ``tests`` and prints the log's end.

    The log goes to a file of limited size, because the summary is at its end and the sandbox keeps only the start of
    a command's output. A daemon that a test leaves behind then holds no pipe open.
    """
    prepare = "" if record.is_local else _LINK_IMAGE_TESTS
    apply = _shadowing_check(record, patch) + _APPLY if patch else ""
    return (
        f"{prepare}{apply}echo '{_BEGIN.decode().strip()}'\n"
        f"( ulimit -f {_LOG_FILE_KIB}; eval {shlex.quote(tests)} ) >{_LOG} 2>&1 </dev/null; code=$?\n"
        f"tail -c {_LOG_BYTES} {_LOG}; exit $code"
    )
