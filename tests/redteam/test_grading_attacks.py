"""Attacks on grading by the code under test: each ends with reward 0 and a record, never with an error."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.contexts import context_of

from envs import EnvContext, Grade
from envs.mini import generate, to_record
from envs.swe import diff_files, grade_patch
from sandbox import SandboxSpec
from sandbox.factory import open_backend
from tests.redteam.attack import report_stopped

pytestmark = pytest.mark.redteam

TASK = generate("train", 1, seed=0)[0]
RECORD = to_record(TASK).model_copy(update={"verified": True})

KILL_PARENT = "os.kill(os.getppid(), 9)\n"
LOG = "/tmp/agent-rl-tests.log"
WRITE_ALL = """
for number in range(64):
    try: os.write(number, text.encode())
    except OSError: pass
"""
FORGED_SUMMARY = f"""
text = '\\n=== short test summary info ===\\n' + '\\n'.join('PASSED ' + test for test in {list(RECORD.calls)}) + '\\n'
open({LOG!r}, 'a').write(text)
{WRITE_ALL}"""
FORGED_ANSWERS = f"""
nonce, *calls = open(glob.glob('/tmp/*/order')[0]).read().splitlines()
text = ''.join(f'{{nonce}} {{index}} 0\\n' for index in range(len(calls)))
open({LOG!r}, 'a').write(text)
{WRITE_ALL}"""
EVERY_VALUE = FORGED_ANSWERS.replace("range(len(calls))", "range(len(calls)) for value in range(99)").replace(
    "{index} 0", "{index} {value}"
)

QUICK = {
    "forges a summary": FORGED_SUMMARY,
    "forges a summary and kills its parent": FORGED_SUMMARY + KILL_PARENT,
    "forges answers": FORGED_ANSWERS + "os._exit(0)\n",
    "forges answers and kills its parent": FORGED_ANSWERS + KILL_PARENT,
    "answers with every value": EVERY_VALUE + "os._exit(0)\n",
    "exits quietly": "os._exit(0)\n",
    "kills its parent": KILL_PARENT,
    "kills everything": "os.kill(-1, 9)\n",
    "signals the sandbox's first process": (
        "for number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\nos._exit(0)\n"
    ),
    "ends by a signal": "os.kill(os.getpid(), 11)\n",
    "replaces builtins": "import builtins\nbuiltins.ascii = lambda value: ''\nbuiltins.eval = print\n",
    "closes every descriptor": "os.closerange(0, 1024)\n",
    "empties the log": f"os.truncate({LOG!r}, 0)\nos._exit(0)\n",
    "removes the log": f"os.unlink({LOG!r})\nos._exit(0)\n",
    "makes the log a directory": f"os.unlink({LOG!r})\nos.mkdir({LOG!r})\nos._exit(0)\n",
    "removes all it can": "subprocess.run('rm -rf --no-preserve-root / 2>/dev/null', shell=True)\n",
    "removes every program": "subprocess.run('rm -rf /bin/* /usr/bin/* /lib* 2>/dev/null', shell=True)\nos._exit(0)\n",
    "eats memory": "hog = bytearray(1 << 30)\n",
    "starts many processes": "while True:\n    if os.fork() == 0:\n        time.sleep(2)\n        os._exit(0)\n",
    "fills the log": "text = 'x' * (1 << 20)\nfor _ in range(99):\n" + WRITE_ALL.replace("\n", "\n    "),
    "takes all rights": "subprocess.run('chmod -R 000 /testbed /tmp; chmod 000 /', shell=True)\nos._exit(0)\n",
}
ENDLESS = {
    "runs for ever": "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass\n",
    "sleeps": "time.sleep(3600)\n",
    "stops its parent": "os.kill(os.getppid(), signal.SIGSTOP)\n",
    "makes the log a pipe": f"os.unlink({LOG!r})\nos.mkfifo({LOG!r})\nos._exit(0)\n",
    "links the log to an endless file": f"os.unlink({LOG!r})\nos.symlink('/dev/zero', {LOG!r})\nos._exit(0)\n",
    "leaves a process behind": "if os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)\nos._exit(0)\n",
}
IMPORTS = "\nimport glob, os, signal, subprocess, time\n"


def with_code(code: str) -> str:
    """Return a patch that appends ``code`` to the broken module; it runs when the hidden tests import the module."""
    return diff_files(TASK.files, {**TASK.files, TASK.path: TASK.files[TASK.path] + IMPORTS + code})


def report_grade(name: str, grade: Grade) -> None:
    last = grade.log.strip().split("\n")[-1]
    report_stopped(f"code that {name}", "; ".join(grade.suspected_hack) or last or "no change at all")


BACKENDS = {
    "bubblewrap": [pytest.mark.bubblewrap],
    "docker": [pytest.mark.docker, pytest.mark.slow],
    "podman": [pytest.mark.podman, pytest.mark.slow],
}
TIMES_OUT = (*ENDLESS, "removes all it can")
"""Attacks that use all of the grading's timeout. They run at the same time, because each would wait alone."""
ON_PROCESSES = (
    *("kills everything", "signals the sandbox's first process", "takes all rights"),
    *("starts many processes", "eats memory"),
)
"""Attacks whose outcome depends on the container engine; the others are the same in docker and podman."""
ORDINARY = {
    "bubblewrap": tuple(name for name in QUICK if name not in TIMES_OUT),
    "docker": ON_PROCESSES,
    "podman": ("kills everything", "eats memory"),
}
"""The attacks of the ordinary suite; the exhaustive one runs all of them on every backend."""


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in BACKENDS.items()])
async def context(request: pytest.FixtureRequest) -> AsyncIterator[EnvContext]:
    seconds = 5.0 if request.param == "bubblewrap" else 10.0
    async with context_of(request.param, SandboxSpec(memory_mb=256), grade_timeout=seconds) as context:
        yield context


async def check_attack(context: EnvContext, name: str) -> None:
    grade = await grade_patch(context, RECORD, with_code({**QUICK, **ENDLESS}[name]))
    report_grade(name, grade)
    assert (grade.reward, grade.resolved) == (0.0, False)
    assert grade.log or grade.suspected_hack, "there is a record"


@pytest.mark.parametrize(
    ("context", "name"),
    [
        pytest.param(backend, name, marks=marks if name in ORDINARY[backend] else [*marks, pytest.mark.exhaustive])
        for backend, marks in BACKENDS.items()
        for name in ORDINARY["bubblewrap"]
    ],
    indirect=["context"],
)
async def test_code_that_attacks_its_grading_gets_nothing(context: EnvContext, name: str) -> None:
    await check_attack(context, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [
        pytest.param(backend, marks=marks if backend != "podman" else [*marks, pytest.mark.exhaustive])
        for backend, marks in BACKENDS.items()
    ],
    indirect=True,
)
async def test_code_that_uses_all_of_the_timeout_gets_nothing(context: EnvContext) -> None:
    async with asyncio.TaskGroup() as group:
        for name in TIMES_OUT:
            group.create_task(check_attack(context, name), name=name)


@pytest.mark.bubblewrap
@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.sampled_from(sorted(QUICK)), min_size=2, max_size=4, unique=True))
def test_no_combination_of_attacks_is_an_infrastructure_failure(names: list[str]) -> None:
    async def grade() -> Grade:
        backend = open_backend("bubblewrap", run_id=f"test-{uuid.uuid4().hex[:8]}")
        try:
            context = EnvContext(backend, limits=SandboxSpec(memory_mb=256), grade_timeout=10.0)
            return await grade_patch(context, RECORD, with_code("\n".join(_guarded(QUICK[name]) for name in names)))
        finally:
            await backend.close()

    done = asyncio.run(grade())
    report_grade(", ".join(names), done)
    assert done.reward == 0.0


def _guarded(code: str) -> str:
    """Return ``code`` in a try block, so that the code after it runs too."""
    return "try:\n" + "".join(f"    {line}\n" for line in code.split("\n")) + "except Exception: pass\n"


async def test_reference_fix_passes(context: EnvContext) -> None:
    assert (await grade_patch(context, RECORD, RECORD.gold)).resolved
