"""``rollout.max_thinking_tokens``: thoughts that are closed by the loop, with their mask, log-probs and routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support import memory_env
from support.episode_branches import ListLog
from support.memory_env import SUBMIT, TurnsEngine, call
from support.plain_values import CLOCKS, plain

from agent_rl.config import RolloutConfig
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import Rollout
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import Completion, FinishReason, Group, StopReason, Trajectory, Turn
from tools import Reasoning

CLOSE = list(ByteRenderer.end_of_thoughts)
SAID = call("echo", text="fix")


class Opened(ByteRenderer):
    reasoning = Reasoning("<think>", "</think>", prompt_opens=True)


@dataclass
class Thinker:
    """An engine whose turns are ``thoughts + said``. Once its thoughts are closed for it, it goes on with ``said``. Its
    n-th request is interrupted after ``cuts[n]`` tokens, where that is not None."""

    turns: Sequence[tuple[str, str]]
    cuts: Sequence[int | None] = ()
    inner: TurnsEngine = field(default_factory=lambda: TurnsEngine([]))
    left: list[int] = field(default_factory=list)
    taken: int = -1
    seen: list[int] = field(default_factory=list)

    async def generate(self, tokens: Any, sampling: Any, **options: Any) -> Completion:
        encode, number, closed = ByteRenderer().encode, len(self.inner.prompts), list(tokens[-len(CLOSE) :]) == CLOSE
        if list(tokens) not in (self.seen, self.seen + CLOSE):  # a new turn
            self.taken = (self.taken + 1) % len(self.turns)
            self.left = encode("".join(self.turns[self.taken]))
        if closed and list(tokens) != self.seen:
            self.left = encode(self.turns[self.taken][1])
        cut = self.cuts[number] if number < len(self.cuts) else None
        self.inner.turns = [self.left if cut is None else self.left[:cut]]
        self.inner.versions = [str(n) for n in range(number + 1)]
        got = await self.inner.generate(tokens, sampling, **options)
        self.left, self.seen = self.left[len(got.tokens) :], [*tokens, *got.tokens]
        if got.finish is FinishReason.LENGTH or not self.left:
            return got
        return replace(got, finish=FinishReason.ABORT, interrupted=True, routing=got.routing if got.tokens else None)


async def drive(engine: Any, limit: int | None, *, opened: bool = True, log: Any = None, **limits: Any) -> Trajectory:
    config = {"describe_tools": False, "max_turns": 2, "max_new_tokens": 400, **limits, "max_thinking_tokens": limit}
    renderer = Opened() if opened else ByteRenderer()
    rules = EpisodeRules(RolloutConfig(**config))
    trajectory = await memory_env.run_memory_episode(engine, rules=rules, renderer=renderer, log=log)
    check_aligned(trajectory)
    return trajectory


def check_aligned(trajectory: Trajectory) -> None:
    """The log-probs and rows of :class:`TurnsEngine` name their positions: none is in another's place."""
    tokens, mask, routing = trajectory.tokens, trajectory.loss_mask, trajectory.routing
    positions = np.where(mask, -0.001 * (np.arange(len(tokens)) + 1), 0).astype(np.float32)
    assert np.array_equal(trajectory.logprobs, positions)
    assert int(mask.sum()) == sum(turn.completion_tokens for turn in trajectory.turns)
    assert routing.present.tolist() == [True] * (len(tokens) - 1) + [False]
    rows = [memory_env.row_of(position, int(token)) for position, token in enumerate(tokens[:-1])]
    assert routing.experts[:-1].tolist() == rows


def spans(trajectory: Trajectory, turn: Turn) -> list[tuple[bool, str]]:
    """The turn's tokens as text, split where they begin or cease to be sampled."""
    stop = turn.prompt_tokens + turn.completion_tokens + turn.inserted_tokens
    tokens, mask = trajectory.tokens[turn.prompt_tokens : stop], trajectory.loss_mask[turn.prompt_tokens : stop]
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    decode = ByteRenderer().decode
    return [(bool(mask[a]), decode(tokens[a:b].tolist())) for a, b in pairwise(edges)]


async def test_open_thoughts_are_closed_at_the_limit_with_tokens_that_are_not_trained() -> None:
    engine = Thinker([("I wonder and wonder</think>", SAID)])
    trajectory = await drive(engine, 8, max_turns=1)
    (turn,) = trajectory.turns
    assert spans(trajectory, turn) == [(True, "I wonder"), (False, "\n</think>\n\n"), (True, SAID)]
    assert (turn.tool, turn.observation, trajectory.reward) == ("echo", "fix", 1.0)
    assert (turn.inserted_tokens, turn.thinking_tokens) == (len(CLOSE), 8 + len(CLOSE))
    assert turn.text[: turn.thinking_chars] == "I wonder\n</think>\n\n"
    assert trajectory.messages[-2]["content"] == turn.text
    first, second = engine.inner.prompts
    assert second[len(first) :] == [*b"I wonder", *CLOSE]
    assert [sampling.max_new_tokens for sampling in engine.inner.sampling] == [8, 392]
    assert engine.inner.routes_from == [0, len(first) + 7], "the closing tokens get rows of the second request"
    assert [span.version for span in trajectory.versions] == ["0", "1"]
    assert plain(decode_trajectory(encode_trajectory(trajectory), "here"), *CLOCKS) == plain(trajectory, *CLOCKS)


async def test_sampled_markers_of_many_tokens_do_not_count() -> None:
    trajectory = await drive(Thinker([("<think>I wonder and wonder</think>", SAID)]), 8, opened=False)
    for turn in trajectory.turns:
        assert spans(trajectory, turn) == [(True, "<think>I wonder"), (False, "\n</think>\n\n"), (True, SAID)]


@pytest.mark.parametrize("opened", [True, False])
async def test_a_limit_of_zero_closes_thoughts_before_their_first_token(opened: bool) -> None:
    thoughts = "" if opened else "<think>"
    trajectory = await drive(Thinker([(f"{thoughts}I wonder</think>", SAID)]), 0, opened=opened)
    before = [] if opened else [(True, "<think>")]
    for turn in trajectory.turns:
        assert spans(trajectory, turn) == [*before, (False, "\n</think>\n\n"), (True, SAID)]
    assert [turn.tool for turn in trajectory.turns] == ["echo", "echo"]


@pytest.mark.parametrize(
    ("opened", "thoughts"),
    [(True, "I know.</think>"), (False, "<think>I know.</think>"), (False, ""), (False, "<tool")],
)
@pytest.mark.parametrize("limit", [15, 16, 200])
async def test_thoughts_that_end_in_time_and_turns_without_thoughts_are_unchanged(
    opened: bool, thoughts: str, limit: int
) -> None:
    turns = [(thoughts, "and more " * 20), (thoughts, SUBMIT)]
    limited = await drive(Thinker(turns), limit, opened=opened)
    unlimited = await drive(Thinker(turns), None, opened=opened)
    for name in ("tokens", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(limited, name), getattr(unlimited, name))
    assert [turn.inserted_tokens for turn in limited.turns] == [0, 0]


async def test_thoughts_stay_open_where_no_token_could_follow_them() -> None:
    prompt = len(ByteRenderer().initial_prompt(memory_env.MemoryEpisode(memory_env.MemoryTools()).messages, None))
    for space in range(9, 9 + len(CLOSE) + 3):
        engine = Thinker([("I wonder and wonder about it", SAID)])
        trajectory = await drive(engine, 8, max_tokens=prompt + space)
        assert len(trajectory.tokens) == prompt + space
        assert trajectory.turns[0].inserted_tokens == (len(CLOSE) if space > 8 + len(CLOSE) else 0)
        assert bool(trajectory.loss_mask[-1])


async def test_a_turn_that_an_engine_stops_before_the_limit_ends() -> None:
    class Short(TurnsEngine):
        async def generate(self, tokens: Any, sampling: Any, **options: Any) -> Completion:
            return await super().generate(tokens, replace(sampling, max_new_tokens=3), **options)

    engine = Short(["I wonder"])
    await drive(engine, 8, max_turns=1)
    assert len(engine.prompts) == 1


async def test_a_run_continues_after_a_turn_whose_thoughts_were_closed() -> None:
    turns = [("I wonder and wonder</think>", SAID), ("so</think>", SAID), ("I wonder again", SUBMIT)]
    log = ListLog()
    whole = await drive(Thinker(turns, cuts=[2, None, 3]), 10, max_turns=3, log=log)
    assert (whole.stop, [turn.inserted_tokens for turn in whole.turns]) == (StopReason.SUBMITTED, [11, 0, 11])
    assert [len(turn.completions) for turn in log.turns] == [4, 2, 2]
    for kept in range(4):
        again = await drive(Thinker(turns[kept:] or turns), 10, max_turns=3, log=ListLog(log.turns[:kept]))
        assert again.replayed_turns == min(kept, 3)
        for name in ("tokens", "loss_mask", "logprobs"):
            assert np.array_equal(getattr(again, name), getattr(whole, name))


async def test_the_metrics_count_sampled_thoughts_and_closed_turns() -> None:
    trajectory = await drive(Thinker([("I wonder and wonder</think>", SAID), ("so</think>", SUBMIT)]), 10)
    metrics = rollout_metrics(Rollout((Group("a", (trajectory,)),), (), seconds=1.0))
    assert metrics["rollout/thinking_truncated"] == 0.5
    assert metrics["rollout/thinking_tokens"] == 10 + len("so</think>")
    assert metrics["rollout/sampled_tokens_mean"] == int(trajectory.loss_mask.sum())


def test_a_limit_that_leaves_no_token_for_the_rest_of_a_turn_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"max_thinking_tokens is 96; it must be below rollout.max_new_tokens \(96"
    ):
        RolloutConfig(max_new_tokens=96, max_thinking_tokens=96)
    assert RolloutConfig(max_new_tokens=96, max_thinking_tokens=95).max_thinking_tokens == 95


words = st.text(alphabet="ab<> é", max_size=30)
turns_of_thoughts = st.lists(st.tuples(words, st.booleans(), words), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    turns=turns_of_thoughts,
    limit=st.integers(0, 40),
    new_tokens=st.integers(1, 60),
    opened=st.booleans(),
    cuts=st.lists(st.none() | st.integers(0, 8), max_size=8),
)
async def test_any_turn_has_its_sampled_tokens_and_at_most_one_insertion(
    turns: Any, limit: int, new_tokens: int, opened: bool, cuts: Any
) -> None:
    """Reference: each turn is cut at the limit of its thoughts, then at the limit of its sampled tokens."""
    marker = "" if opened else "<think>"
    written = [(f"{marker}{thoughts}{'</think>' * ends}", said) for thoughts, ends, said in turns]
    new_tokens += limit
    trajectory = await drive(
        Thinker(written, cuts), limit, opened=opened, max_turns=len(turns), max_new_tokens=new_tokens,
        max_parse_failures=None,
    )  # fmt: skip
    assert len(trajectory.turns) == len(turns)
    for turn, (thoughts, said) in zip(trajectory.turns, written, strict=True):
        assert spans(trajectory, turn) == expected(thoughts, said, len(marker) + limit, new_tokens)


def expected(thoughts: str, said: str, limit: int, new_tokens: int) -> list[tuple[bool, str]]:
    encode, decode = ByteRenderer().encode, ByteRenderer().decode
    whole = encode(thoughts + said)
    end_in_time = thoughts.endswith("</think>") and len(thoughts.encode()) <= limit
    if end_in_time or limit >= min(len(whole), new_tokens):
        return [(True, decode(whole[:new_tokens]))]
    kept = [(True, decode(whole[:limit]))] if limit else []
    return [*kept, (False, decode(CLOSE)), (True, decode(encode(said)[: new_tokens - limit]))]
