"""Damage by an agent to its own sandbox: the episode ends with a grade, never with an infrastructure failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.contexts import context_of

from envs import EnvContext, Grade
from envs.mini import generate, to_record
from envs.swe import SweRecord, diff_files, start_episode
from sandbox import SandboxSpec
from sandbox.docker.backend import DEFAULT_IMAGE
from tests.envs.conftest import BROKEN, FIXED, TESTS
from tests.redteam.attack import report_stopped
from tools import ToolCall

pytestmark = pytest.mark.redteam

DAMAGE = {
    "removes the shells": "rm -f /bin/sh /bin/bash /usr/bin/sh /usr/bin/bash /bin/dash",
    "removes every program": "rm -rf /bin/* /usr/bin/* /usr/local/bin/*",
    "removes the libraries": "rm -rf /lib/* /usr/lib/* /lib64/*",
    "removes all it can": "rm -rf --no-preserve-root /",
    "removes /tmp": "rm -rf /tmp",
    "removes its working directory": "cd /; rm -rf /testbed",
    "takes all rights": "chmod -R 000 /testbed /tmp; chmod 000 /",
    "takes all rights to programs": "chmod -R 000 /usr /bin /lib",
    "takes all rights to /usr": "chmod 000 /usr",
    "gives its files away": "chown -R 1234:1234 /testbed /tmp; chmod -R 700 /testbed",
    "moves its working directory": "cd /; mv /testbed /elsewhere",
    "moves the programs": "mv /usr /usr2",
    "moves /tmp": "mv /tmp /tmp2; ln -s /nowhere /tmp",
    "links its working directory": "cd /; mv /testbed /x; ln -s / /testbed",
    "links its working directory to itself": "cd /; rm -rf /testbed; ln -s /testbed /testbed",
    "makes a file of its working directory": "cd /; rm -rf /testbed; echo x > /testbed",
    "puts pipes in the places of files": "rm -rf *; mkfifo calc.py README.md .git conftest.py",
    "puts endless files in the places of files": "rm -f *; ln -s /dev/zero calc.py; ln -s /dev/random README.md",
    "puts devices in the places of files": "rm -f *; mknod calc.py c 1 5; mknod README.md c 1 8; ln -s /dev/tty z.py",
    "puts sockets in the places of files": (
        "rm -f calc.py; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('calc.py')\""
    ),
    "puts directories in the places of files": "rm -rf calc.py .git; mkdir -p calc.py .git/HEAD .git/index README.md/x",
    "breaks its git directory": "echo x > .git/HEAD; rm -rf .git/objects; echo x > .git/index; chmod 000 .git/refs",
    "locks its git directory": "touch .git/index.lock .git/HEAD.lock; mkdir .git/objects/tmp; chmod -w .git",
    "steers git": "git config core.fsmonitor 'sleep 2'; git config core.pager 'sleep 2'",
    "filters files without end": "git config filter.x.clean 'head -c 1G /dev/zero'; echo '* filter=x' > .gitattributes",
    "replaces programs by those that fail": (
        "for name in env sh bash tar cat git python3 find timeout sleep setsid; do cp /bin/false /usr/bin/$name; "
        "cp /bin/false /bin/$name; done"
    ),
    "replaces programs by those that never end": (
        "for name in env tar cat git find timeout; do printf '#!/bin/bash\\nread < /dev/tty' > /usr/bin/$name; done"
    ),
    "kills everything": "kill -9 -1",
    "stops everything": "kill -STOP -1",
    "signals the first process": "for number in $(seq 64); do kill -$number 1; done",
    "kills what runs its shell": "kill -9 $PPID",
    "closes its output": "exec >&- 2>&- <&-; sleep 1",
    "starts processes without end": "f() { f | f & }; f; sleep 1",
    "leaves processes behind": "for i in $(seq 90); do setsid sleep 1000 & done",
    "eats memory": "python3 -c 'hog = bytearray(1 << 31)'; head -c 2G /dev/zero | tail",
    "fills its disk": "head -c 300M /dev/zero > /testbed/big; head -c 300M /dev/zero > /tmp/big",
    "fills /dev/shm": "head -c 2G /dev/zero > /dev/shm/x",
    "makes many files": "mkdir m; cd m; for i in $(seq 3000); do : > $i; done",
    "makes a deep directory": "for i in $(seq 300); do mkdir -p ddddddddddddddd && cd ddddddddddddddd; done; : > x",
    "gives files names of every kind": (
        "touch $'a\\nb' $'\\xff\\xfe' '\"' '\\' ./-rf $'\\x1b[2J' \"$(printf %0250d 0)\""
    ),
    "floods its output": "yes | head -c 300M; yes | head -c 300M >&2",
    "sets its variables": "export PATH= LD_PRELOAD=/x BASH_ENV=/x HOME=/x; readonly PATH; set -e; trap '' TERM INT",
    "redefines what its shell runs": "eval() { :; }; exec() { :; }; exit() { :; }; trap 'sleep 99' EXIT",
    "preloads a broken library": "echo x > /etc/ld.so.preload; echo x > /etc/ld.so.cache",
    "breaks its accounts": "rm -f /etc/passwd /etc/group /etc/shadow; rm -rf /etc /root /home",
    "fiddles with /proc": "echo -1000 > /proc/1/oom_score_adj; echo x > /proc/sysrq-trigger",
    "limits itself": "ulimit -f 0; ulimit -n 3; ulimit -u 1; ulimit -v 1000",
}
LOCAL = SweRecord(
    repo_name="calc",
    task_id="calc-damage",
    expected_output_json='{"hidden/test_calc.py::test_add": "PASSED"}',
    problem_statement="add(2, 3) gives -1.",
    files=BROKEN,
    tests=TESTS,
    test_command="python3 hidden/runner.py hidden/test_calc.py",
    gold_patch=diff_files(BROKEN, FIXED),
)
MINI = to_record(generate("train", 1, seed=0)[0])
IMAGE = SweRecord(
    repo_name="image",
    docker_image=DEFAULT_IMAGE,
    expected_output_json='{"test_a": "PASSED"}',
    problem_statement="x",
    test_command="echo = short test summary info =; echo FAILED r2e_tests/test_1.py::test_a",
)
RECORDS = {"local": LOCAL, "calls": MINI, "image": IMAGE}


REGRESSIONS = [
    "removes its working directory",
    "makes a file of its working directory",
    "links its working directory to itself",
    "takes all rights",
    "takes all rights to /usr",
]
"""Damage that earlier versions reported as an infrastructure failure under docker and podman."""


async def play(context: EnvContext, record: SweRecord, commands: Sequence[str]) -> Grade:
    """Run ``commands`` as an agent, use its other tools, and return the grade."""
    async with start_episode(context, record) as episode:
        for command in commands:
            await episode.tools.call(ToolCall("execute_bash", {"cmd": command}))
        for arguments in (
            {"command": "view", "path": "/testbed"},
            {"command": "create", "path": "/testbed/new.txt", "file_text": "x"},
        ):
            await episode.tools.call(ToolCall("file_editor", arguments))
        await episode.tools.call(ToolCall("search", {"search_term": "add", "path": "/testbed"}))
        return await episode.grade()


async def check_damage(backend: str, kind: str, sequences: Sequence[Sequence[str]]) -> None:
    """Check that each sequence of names of ``DAMAGE`` ends with reward 0 and a record."""
    limits = SandboxSpec(memory_mb=256, disk_mb=256, inodes=2000)
    async with context_of(backend, limits, tool_timeout=4.0, grade_timeout=30.0, start_retries=0) as context:
        for names in sequences:
            grade = await play(context, RECORDS[kind], [DAMAGE[name] for name in names])
            assert (grade.reward, grade.resolved) == (0.0, False), names
            failed = [line for line in grade.log.split("\n") if line.startswith(("FAILED", "ERROR"))]
            record = "; ".join(grade.suspected_hack or failed)
            assert record, (names, grade.log)
            report_stopped(f"an agent that {', then '.join(names)} ({backend}, {kind})", record[:200])


def on_backends(*ordinary: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test on every backend with every kind of record; all but the ``ordinary`` pairs are exhaustive."""
    pairs = [("bubblewrap", "local"), ("bubblewrap", "calls")]
    pairs += [(engine, kind) for engine in ("docker", "podman") for kind in RECORDS]
    return pytest.mark.parametrize(
        ("backend", "kind"),
        [
            pytest.param(
                *pair,
                marks=[getattr(pytest.mark, pair[0]), *([] if pair in ordinary else [pytest.mark.exhaustive])],
            )
            for pair in pairs
        ],
    )


@pytest.mark.slow
@on_backends(("bubblewrap", "local"), ("bubblewrap", "calls"), ("docker", "local"), ("podman", "image"))
async def test_regressions_end_with_a_grade(backend: str, kind: str) -> None:
    await check_damage(backend, kind, [[name] for name in REGRESSIONS])


@pytest.mark.long
@pytest.mark.slow
@on_backends(("bubblewrap", "local"), ("bubblewrap", "calls"), ("docker", "image"))
def test_no_sequence_of_damage_is_an_infrastructure_failure(backend: str, kind: str) -> None:
    """Derandomized: every run tests the same sequences."""
    sequences: list[list[str]] = []

    @settings(max_examples=3, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.lists(st.sampled_from(sorted(DAMAGE)), min_size=2, max_size=5, unique=True))
    def draw(names: list[str]) -> None:
        sequences.append(names)

    draw()
    asyncio.run(check_damage(backend, kind, sequences))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@on_backends()
async def test_no_single_damage_is_an_infrastructure_failure(backend: str, kind: str) -> None:
    for name in DAMAGE:
        await check_damage(backend, kind, [[name]])
