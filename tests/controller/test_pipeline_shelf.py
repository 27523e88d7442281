"""Groups that wait for their batch hold no arrays, and get their own back, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trajectories import trajectory

from agent_rl.controller.journal import Journal
from agent_rl.controller.pipeline.shelf import Shelved
from agent_rl.rollout.turn_log import TurnLog
from agent_rl.types import Branch, BranchCause, Group, Trajectory
from envs import Task
from r3.routing import Routing, Span, SpanKind


def routed(seed: int) -> Trajectory:
    """Five tokens with routes in no order within a row, and a second branch."""
    generator, made = np.random.default_rng(seed), trajectory(float(seed % 2))
    experts = generator.random((5, 2, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
    experts[-1] = 0
    spans = (Span(0, 4, "0", "e", SpanKind.SAMPLED), Span(4, 5, "0", "e", SpanKind.MISSING))
    routing = Routing(experts, np.arange(5) < 4, spans, 4)
    further = Branch(made.tokens + 7, made.loss_mask, made.logprobs, routing, made.versions, 0, 3, BranchCause.REWRITE)
    logprobs = np.where(made.loss_mask, -generator.random(5), 0).astype(np.float32)
    return replace(made, logprobs=logprobs, routing=routing, further=(further,))


@pytest.mark.parametrize("again", [False, True])
async def test_a_shelved_group_gets_its_arrays_back(tmp_path: Path, again: bool) -> None:
    given = [routed(seed) for seed in range(3)]

    async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
        return left.pop(0)

    async def begun() -> Journal:
        journal = Journal(tmp_path, "run")
        journal.recover(0, {0: "start"}, lambda position: True)
        await journal.begin(1, "start")
        return journal

    journal, left = await begun(), list(given)
    ended = [await journal.runner(4, run)(Task("t", "e", {})) for _ in given]
    if again:  # in the next start of the run, which has them from the journal
        journal.close()
        journal = await begun()
        ended = [await journal.runner(4, run)(Task("t", "e", {})) for _ in given]
    shelved = Shelved.of(Group("t", tuple(replace(each, queue_seconds=3.0) for each in reversed(ended))))
    for bare in shelved.group.trajectories:
        assert bare.tokens.size == bare.loss_mask.size == bare.logprobs.size == len(bare.further) == 0
        assert bare.routing is None
    back = shelved.filled(journal.finished(4)).trajectories
    journal.close()
    for found, original in zip(back, reversed(given), strict=True):
        assert (found.reward, found.queue_seconds, found.recovered) == (original.reward, 3.0, again)
        for one, other in zip(found.branches, original.branches, strict=True):
            assert one.routing is not None
            assert other.routing is not None
            assert np.array_equal(one.tokens, other.tokens)
            assert np.array_equal(one.loss_mask, other.loss_mask)
            assert np.array_equal(one.logprobs, other.logprobs)
            assert np.array_equal(one.routing.experts, other.routing.experts)
