"""Trajectories that wait for their batch hold no arrays and no texts, and get their own back, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trajectories import trajectory

from agent_rl.controller.journal import Journal
from agent_rl.controller.pipeline.shelf import Shelf
from agent_rl.rollout.turn_log import TurnLog
from agent_rl.types import Branch, BranchCause, Group, Trajectory, Turn
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
    turn = Turn("ls", "execute_bash", {"cmd": "ls"}, None, "a.py", 3, 2, 0, 0, "0", 0.25, 0.5)
    messages = ({"role": "user", "content": f"seed {seed}"}, {"role": "assistant", "content": "ls"})
    return replace(
        made, logprobs=logprobs, routing=routing, further=(further,), turns=(turn,), messages=messages,
        tests={"a": "passed"},
    )  # fmt: skip


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
    shelf = Shelf()
    ended = [await shelf.runner(journal.runner(4, run))(Task("t", "e", {})) for _ in given]
    if again:  # in the next start of the run, which has them from the journal
        journal.close()
        journal, shelf = await begun(), Shelf()
        ended = [await shelf.runner(journal.runner(4, run))(Task("t", "e", {})) for _ in given]
    for each in ended:
        assert each.tokens.size == each.loss_mask.size == each.logprobs.size == 1
        assert (each.routing, each.further, each.turns, each.messages) == (None, (), (), ())
    shelved = shelf.of(Group("t", tuple(replace(each, queue_seconds=3.0) for each in ended)))
    back = shelved.filled(reversed(list(journal.finished(4)))).trajectories
    journal.close()
    for found, original in zip(back, given, strict=True):
        assert (found.reward, found.queue_seconds, found.recovered) == (original.reward, 3.0, again)
        assert (found.turns, found.messages, found.tests) == (original.turns, original.messages, original.tests)
        for one, other in zip(found.branches, original.branches, strict=True):
            assert one.routing is not None
            assert other.routing is not None
            assert np.array_equal(one.tokens, other.tokens)
            assert np.array_equal(one.loss_mask, other.loss_mask)
            assert np.array_equal(one.logprobs, other.logprobs)
            assert np.array_equal(one.routing.experts, other.routing.experts)
