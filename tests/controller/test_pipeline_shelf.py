"""Trajectories that wait for their batch hold no arrays and no texts, and get their own back, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.plain_values import plain
from support.routed_trajectories import routed

from agent_rl.controller.async_rollout.producer import restore, spill
from agent_rl.controller.journal import Journal
from agent_rl.rollout.episode_recovery import TurnLog
from agent_rl.rollout.group import DroppedGroup, GroupCollector, GroupSettings, Limiter
from agent_rl.types import Branch, BranchCause, Group, Trajectory, Turn
from envs import Task

NEW = ("recovered", "seconds", "queue_seconds")


def branched(seed: int) -> Trajectory:
    """An episode with two branches, a turn and messages."""
    made = replace(routed(seed), reward=float(seed % 2), tests={"a": "passed"}, seconds=float(seed))
    arrays = made.tokens + 7, made.loss_mask, made.logprobs, made.routing
    further = Branch(*arrays, made.versions, 0, 3, BranchCause.REWRITE)
    turn = Turn("ls", "execute_bash", {"cmd": "ls"}, None, "a.py", 3, 2, 0, 0, "0", 0.25, 0.5)
    messages = ({"role": "user", "content": f"seed {seed}"}, {"role": "assistant", "content": "ls"})
    return replace(made, further=(further,), turns=(turn,), messages=messages)


@pytest.mark.parametrize("again", [False, True])
async def test_a_spilled_group_is_restored_whole(tmp_path: Path, again: bool) -> None:
    """Its episodes end in another order than they began; a later start of the run has them from the journal."""
    given, begun = [branched(seed) for seed in range(3)], [asyncio.Event() for _ in range(4)]
    begun[0].set()
    left = list(enumerate(given))

    async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
        number, made = left.pop()
        await begun[number].wait()
        begun[number + 1].set()
        return made

    async def formed() -> tuple[Journal, Group | DroppedGroup]:
        journal = Journal(tmp_path, "run")
        journal.recover(0, {0: "start"}, lambda position: True)
        await journal.begin(1, "start")
        collector = GroupCollector(GroupSettings(3), Limiter(3), lambda event: None)
        return journal, await collector.collect(Task("t", "e", {}), spill(journal.runner(4, run)))

    journal, group = await formed()
    if again:
        journal.close()
        journal, group = await formed()
    assert isinstance(group, Group)
    for each in group.trajectories:
        assert each.tokens.size == each.loss_mask.size == each.logprobs.size == 1
        assert (each.routing, each.further, each.turns, each.messages) == (None, (), (), ())
    back = restore(group, journal.finished(4)).trajectories
    journal.close()
    for found, kept, original in zip(back, group.trajectories, given, strict=True):
        assert found.recovered is again
        assert (found.seconds, found.queue_seconds) == (kept.seconds, kept.queue_seconds)
        assert plain(found, *NEW) == plain(original, *NEW)
