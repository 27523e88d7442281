"""``rollout.subagents``: the tool ``task``, its conversation, its limits, and what is trained of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support import memory_env
from support.episode_branches import ListLog, Recording, Replaying, check_branch, text, trained
from support.memory_env import FIX, SUBMIT, InterruptedEngine, MemoryEnvironment, TurnsEngine, call
from support.plain_values import CLOCKS, plain

from agent_rl.config import CompactionConfig, R3Config, RolloutConfig, SubagentsConfig
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import Rollout
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.rollout.subagents import SILENT
from agent_rl.types import BranchCause, Group, StopReason, Trajectory

TASK = call("task", prompt="look")
SUBAGENTS = SubagentsConfig(max_turns=3, max_tokens=600, prompt="Help.", max_per_episode=2)


async def drive(engine: Any, *, env: Any = None, log: Any = None, **limits: Any) -> Trajectory:
    rollout = RolloutConfig(
        **{"describe_tools": False, "max_tokens": 2000, "max_new_tokens": 800, "max_turns": 14, "subagents": SUBAGENTS}
        | limits
    )
    rules = EpisodeRules(rollout, routes=R3Config())
    trajectory = await memory_env.run_memory_episode(engine, env, rules=rules, log=log)
    for branch in trajectory.branches:
        check_branch(trajectory, branch)
    return trajectory


def observations(trajectory: Trajectory) -> Sequence[tuple[int, str]]:
    return [(turn.branch, turn.observation) for turn in trajectory.turns]


async def test_the_last_words_of_a_subagent_are_the_observation_of_the_call() -> None:
    engine, env = Recording(TurnsEngine([TASK, FIX, "It is fixed.", SUBMIT])), MemoryEnvironment()
    trajectory = await drive(engine, env=env)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0), "its calls are those of the episode"
    assert observations(trajectory) == [(0, "It is fixed."), (1, "fix"), (1, ""), (0, "submitted")]
    first, child = trajectory.branches
    assert text(first) == f"SU{TASK}It is fixed.{SUBMIT}"
    assert text(child) == f"SHelp.\n\nlook{FIX}fixIt is fixed."
    assert (child.cause, child.parent, child.shared) == (BranchCause.SUBAGENT, 0, 2)
    assert sorted(trained(trajectory)) == sorted(engine.sampled)
    assert [message["role"] for message in child.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert rollout_metrics(Rollout((Group("t", (trajectory,)),), (), 1.0))["rollout/subagents"] == 1
    assert [turn.parse_failure for turn in trajectory.turns] == [None] * 4


@pytest.mark.parametrize(
    ("turns", "last"),
    [
        ([FIX, FIX, FIX], SILENT),  # its turns are used up
        ([f"Done. {SUBMIT}"], "Done."),  # a submit ends only the sub-agent
        ([call("echo", text="x" * 500)], SILENT),  # its context is full
        ([TASK, "no further level"], "no further level"),
    ],
)
async def test_a_subagent_ends_at_its_own_limits(turns: list[str], last: str) -> None:
    trajectory = await drive(TurnsEngine([TASK, *turns, SUBMIT]))
    assert observations(trajectory)[0] == (0, last)
    assert (trajectory.stop, len(trajectory.branches)) == (StopReason.SUBMITTED, 2)
    assert len(trajectory.further[0].tokens) <= 600


async def test_calls_beyond_the_limits_and_without_a_prompt_are_answered_at_once() -> None:
    turns = [call("task"), TASK, "one", TASK, "two", TASK, call("task", prompt="y" * 700), SUBMIT]
    trajectory = await drive(TurnsEngine(turns))
    texts = [observed for _, observed in observations(trajectory)]
    assert texts[0] == "task: prompt must be a text"
    assert [texts[1], texts[3]] == ["one", "two"]
    assert texts[5] == "task: at most 2 sub-agents per episode"
    long = await drive(TurnsEngine([turns[6], SUBMIT]))
    assert observations(long)[0] == (0, "task: the prompt does not fit into 600 tokens")


async def test_an_episode_that_ends_within_a_subagent_keeps_its_tokens() -> None:
    engine = Recording(TurnsEngine([FIX, TASK, FIX]))
    trajectory = await drive(engine, max_turns=3)
    assert (trajectory.stop, trajectory.reward, len(trajectory.branches)) == (StopReason.MAX_TURNS, 1.0, 2)
    assert sorted(trained(trajectory)) == sorted(engine.sampled)
    opened = await drive(TurnsEngine([FIX, TASK, FIX]), max_turns=2)
    assert len(opened.branches) == 1, "a branch in which nothing was sampled is left out"


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(
        st.sampled_from([FIX, TASK, "no call", "", call("echo", text="z" * 200), call("task", prompt="p" * 90)]),
        min_size=1,
        max_size=13,
    ),
    cuts=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=8),
    resumed=st.integers(0, 12),
)
async def test_with_compactions_every_sampled_token_is_trained_once(turns: Any, cuts: Any, resumed: int) -> None:
    engine, log = Recording(InterruptedEngine([*turns, SUBMIT], cuts, published=True)), ListLog()
    limits = {"compaction": CompactionConfig(at_tokens=390, prompt="shorten", keep_turns=2)}
    trajectory = await drive(engine, log=log, **limits)
    assert sorted(trained(trajectory)) == sorted(engine.sampled)
    by_branch = [sum(t.completion_tokens for t in trajectory.turns if t.branch == n) for n in range(9)]
    assert by_branch[: len(trajectory.branches)] == [branch.sampled_tokens for branch in trajectory.branches]
    assert plain(decode_trajectory(encode_trajectory(trajectory), "a test")) == plain(trajectory)
    kept = log.turns[: min(resumed, len(log.turns) - 1)]
    left = [completion for turn in log.turns[len(kept) :] for completion in turn.completions]
    again = await drive(Replaying(left), log=ListLog(list(kept)), **limits)
    ignored = (*CLOCKS, "recovered", "replayed_turns")
    assert plain(again, *ignored) == plain(trajectory, *ignored)


def test_a_subagent_with_a_larger_context_than_the_episode_is_refused() -> None:
    assert RolloutConfig(max_tokens=2000, max_new_tokens=9, subagents=SUBAGENTS).tokens_per_trajectory == 3200
    with pytest.raises(ValidationError, match=r"subagents\.max_tokens is 600; it must be at most rollout\.max_tokens"):
        RolloutConfig(max_tokens=500, max_new_tokens=9, subagents=SUBAGENTS)
