"""Attacks on the grading of Harbor tasks by an agent that is root in its sandbox: each ends with reward 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.contexts import context_of

from envs import EnvContext, Grade
from envs.harbor import HarborEnvironment
from sandbox import ImageMissingError, SandboxLostError, SandboxSpec
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.redteam, pytest.mark.slow, pytest.mark.timeout(300)]

TASKS = Path(__file__).parents[1] / "envs/harbor_tasks"
REWARD = "for name in json txt; do echo 1 > /logs/verifier/reward.$name; done"
EVIL = f"#!/bin/sh\\n{REWARD}\\necho a\\necho b\\necho c\\n"
WRITER = f"while true; do mkdir -p /logs/verifier; {REWARD}; done"
KILLS_ITS_PARENTS = """
import os, subprocess, sys, time
os.setsid()
os.kill(-1, 9)
while True:
    subprocess.run(["sh", "-c", "for n in json txt; do echo 1 > /logs/verifier/reward.$n; done"])
"""

ATTACKS = {
    "writes the reward files": REWARD,
    "makes the reward files read-only": f"{REWARD}; chmod 000 /logs/verifier/*; chmod 555 /logs/verifier /logs",
    "links the reward's directory to its own": (
        f"mkdir /tmp/v; rm -r /logs; ln -s /tmp /logs; ln -s v /tmp/verifier; {REWARD}"
    ),
    "leaves a process that writes the reward": f"setsid -f sh -c '{WRITER}' >/dev/null 2>&1 </dev/null",
    "leaves a process and kills what would kill it": f"exec python3 -c '{KILLS_ITS_PARENTS}'",
    "puts tests of its own where the tests will be": (
        f"mkdir /tests; printf '{EVIL}' > /tests/test.sh; chmod 555 /tests/test.sh /tests"
    ),
    "links the tests' directory to its own": (
        f"mkdir /tmp/t; printf '{EVIL}' > /tmp/t/test.sh; chmod 755 /tmp/t/test.sh; ln -s /tmp/t /tests"
    ),
    "replaces bash": f"printf '{EVIL}' > /tmp/b; chmod 755 /tmp/b; mv /tmp/b /usr/bin/bash",
    "replaces a tool and keeps its size and time": (
        f"cd /usr/bin; printf '{EVIL}' > /tmp/c; truncate -s $(stat -c %s comm) /tmp/c; touch -r comm /tmp/c; "
        "chmod 755 /tmp/c; cp -p /tmp/c comm"
    ),
    "puts a tool before the image's on PATH": f"printf '{EVIL}' > /usr/local/bin/comm; chmod 755 /usr/local/bin/comm",
    "replaces a directory of PATH by a link": (
        f"mkdir /tmp/p; printf '{EVIL}' > /tmp/p/comm; chmod 755 /tmp/p/comm; rm -r /usr/local/bin; "
        "ln -s /tmp/p /usr/local/bin"
    ),
    "removes every program": "rm -rf /usr/bin/* /usr/lib/* 2>/dev/null",
    "outgrows its disk": "head -c 200000000 /dev/zero > big; sleep 6",
    "preloads a library": "echo /tmp/own.so > /etc/ld.so.preload",
    "runs code when Python starts": (
        "printf 'print(3.0)\\nimport os\\nos._exit(0)\\n' > /usr/local/lib/python3.11/dist-packages/sitecustomize.py"
    ),
    "configures pytest above the tests": "printf '[pytest]\\naddopts = -p own\\n' > /pytest.ini",
}
ON_PROCESSES_AND_LAYERS = (
    "leaves a process and kills what would kill it",
    "replaces a tool and keeps its size and time",
    "replaces a directory of PATH by a link",
)
"""Attacks whose outcome depends on the container engine; the others are the same in docker and podman."""


STANDING = {
    "writes the reward in code that the tests run": (
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.json\\n' > sum.sh; chmod 755 sum.sh"
    ),
}
"""Attacks that win on the task ``counter``, whose tests run the agent's program (docs/explanation/security.md)."""


async def graded(context: EnvContext, attack: str, task: str = "greeting") -> Grade:
    """The grade after the agent ran ``attack`` and nothing else. What docker loses under load is repeated once, as runs
    repeat it; an attack that makes its sandbox lose output fails twice."""
    try:
        return await graded_once(context, attack, task)
    except SandboxLostError:
        return await graded_once(context, attack, task)


async def graded_once(context: EnvContext, attack: str, task: str) -> Grade:
    environment = HarborEnvironment(context, TASKS / task)
    async with environment.start(environment.tasks("train")[0]) as episode:
        await episode.tools.call(environment.scaffold.shell(attack))
        return await episode.grade()


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("docker", tuple(ATTACKS), marks=pytest.mark.docker),
        pytest.param("podman", ON_PROCESSES_AND_LAYERS, marks=pytest.mark.podman),
        pytest.param("podman", tuple(ATTACKS), marks=[pytest.mark.podman, pytest.mark.exhaustive]),
    ],
)
async def test_agent_that_is_root_gets_no_reward_without_solving_the_task(backend: str, names: tuple[str, ...]) -> None:
    async with context_of(backend, SandboxSpec(memory_mb=256, disk_mb=100)) as context:
        try:
            grades = await asyncio.gather(*(graded(context, ATTACKS[name]) for name in names))
        except ImageMissingError as error:
            pytest.skip(str(error))
    for name, grade in zip(names, grades, strict=True):
        report_stopped(name, "; ".join(grade.suspected_hack) or grade.log.strip() or "the tests found nothing done")
        assert (grade.reward, grade.resolved) == (0.0, False), name


@pytest.mark.docker
@pytest.mark.parametrize("name", STANDING)
async def test_code_that_the_tests_run_can_write_the_reward(name: str) -> None:
    async with context_of("docker", SandboxSpec(memory_mb=256)) as context:
        try:
            assert (await graded(context, STANDING[name], "counter")).reward == 1.0
        except ImageMissingError as error:
            pytest.skip(str(error))
