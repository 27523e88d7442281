"""``rollout.compaction``: branches of an episode, what is trained in each, their routes, limits and records."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console
from support import memory_env
from support.episode_branches import ListLog, Recording, Replaying, check_branch, text, trained
from support.family_templates import FORMS
from support.memory_env import FIX, SUBMIT, InterruptedEngine, MemoryEnvironment, TurnsEngine, call
from support.plain_values import CLOCKS, plain

from agent_rl.commands.rows import RowChoice, write_rows
from agent_rl.commands.show import show
from agent_rl.config import CompactionConfig, HarnessConfig, R3Config, RolloutConfig
from agent_rl.controller.turn_credit import Credit
from agent_rl.errors import ConfigError
from agent_rl.render import ChatRenderer
from agent_rl.render.chat import Encoder
from agent_rl.rollout.compaction import SUMMARY, check_compaction
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import Rollout
from agent_rl.rollout.metrics import rollout_metrics
from agent_rl.rollout.records import decode_trajectory, encode_trajectory, read_trajectories, write_trajectories
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import BranchCause, Group, SampledCall, StopReason, Trajectory
from agent_rl.viewer.api import Resources
from tools import Reasoning, ToolCall
from tools.formats import tool_format

ASK = "shorten"
ORDINARY, EXHAUSTIVE = ("gpt_oss", "kimi_k2", "glm4_moe", "qwen3_moe"), pytest.mark.exhaustive
LONG = call("echo", text="x" * 150)
"""A turn of about 220 bytes, whose observation has 150."""


async def drive(
    engine: Any, at_tokens: int = 399, *, env: Any = None, log: Any = None, renderer: Any = None, **settings: Any
) -> Trajectory:
    """An aligned episode under a context of 2,000 tokens."""
    compaction = CompactionConfig(at_tokens=at_tokens, prompt=ASK, **settings)
    limits = RolloutConfig(
        describe_tools=False, max_tokens=2000, max_new_tokens=800, max_turns=12, compaction=compaction
    )
    rules = EpisodeRules(limits, routes=R3Config())
    trajectory = await memory_env.run_memory_episode(engine, env, rules=rules, log=log, renderer=renderer)
    for branch in trajectory.branches:
        check_branch(trajectory, branch)
        assert len(branch.tokens) <= limits.max_tokens
    return trajectory


async def test_a_long_conversation_goes_on_with_the_summary_and_the_last_turn() -> None:
    engine = Recording(TurnsEngine([LONG, FIX, "Fixed it.", SUBMIT]))
    trajectory = await drive(engine, keep_turns=1)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    first, second = trajectory.branches
    assert text(first) == f"SU{LONG}{'x' * 150}{FIX}{ASK}Fixed it."
    assert text(second) == f"SU\n\n{SUMMARY}\nFixed it.{FIX}fix{SUBMIT}"
    assert (second.cause, second.parent, second.shared) == (BranchCause.COMPACTION, 0, 3)
    assert [turn.summary for turn in trajectory.turns] == [False, False, True, False]
    assert trained(trajectory) == engine.sampled, "each sampled token once, in order"
    assert engine.rows == sum(len(branch.tokens) - 1 for branch in trajectory.branches), "each row of a branch once"
    roles = [[message["role"] for message in branch.messages] for branch in trajectory.branches]
    start, acted = ["system", "user"], ["assistant", "tool"]
    assert roles == [[*start, *acted, "assistant", "user", "assistant"], [*start, *acted, "assistant"]]


TURNS = st.lists(
    st.one_of(
        st.integers(0, 260).map(lambda size: call("echo", text="y" * size)),
        st.sampled_from([FIX, "no call", "", "a summary", "<tool_call>"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(
    turns=TURNS,
    at_tokens=st.integers(1, 399),
    keep=st.integers(1, 4),
    most=st.integers(1, 4),
    cuts=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=8),
    resumed=st.integers(0, 12),
)
async def test_over_any_branch_points_every_sampled_token_is_trained_once(
    turns: Any, at_tokens: int, keep: int, most: int, cuts: Any, resumed: int
) -> None:
    engine, log = Recording(InterruptedEngine([*turns, SUBMIT], cuts, published=True)), ListLog()
    limits = {"keep_turns": keep, "max_per_episode": most}
    trajectory = await drive(engine, at_tokens, log=log, **limits)
    assert trained(trajectory) == engine.sampled
    assert sum(turn.completion_tokens for turn in trajectory.turns) == len(engine.sampled)
    assert Credit.by_turn(trajectory, 0.0, 1.0).tokens == [turn.completion_tokens for turn in trajectory.turns]
    compactions = sum(turn.summary for turn in trajectory.turns)
    assert len(trajectory.further) in (compactions, compactions - 1)
    assert compactions <= most
    assert [branch.parent for branch in trajectory.branches] == [None, *range(len(trajectory.further))]
    assert plain(decode_trajectory(encode_trajectory(trajectory), "a test")) == plain(trajectory)
    kept = log.turns[: min(resumed, len(log.turns) - 1)]
    left = log.turns[len(kept) :]
    rest = Replaying([completion for turn in left for completion in turn.completions])
    again = await drive(rest, at_tokens, log=ListLog(list(kept)), **limits)
    ignored = (*CLOCKS, "recovered", "replayed_turns")
    assert plain(again, *ignored) == plain(trajectory, *ignored)
    assert again.replayed_turns == len(kept)


async def test_calls_in_a_summary_are_not_executed_and_not_part_of_it() -> None:
    env = MemoryEnvironment()
    trajectory = await drive(TurnsEngine([LONG, FIX, f"Half done. {SUBMIT}", FIX, SUBMIT]), env=env, keep_turns=1)
    assert [turn.tool for turn in trajectory.turns] == ["echo", "echo", None, "echo", "submit"]
    assert text(trajectory.further[0]).startswith(f"SU\n\n{SUMMARY}\nHalf done.{FIX}")


async def test_thoughts_are_no_part_of_the_summary() -> None:
    class Thinking(ByteRenderer):
        reasoning = Reasoning("<think>", "</think>", prompt_opens=True)

    acting = [f"hm</think>{turn}" for turn in (LONG, FIX, "Half done.", SUBMIT)]
    trajectory = await drive(TurnsEngine(acting), renderer=Thinking(), keep_turns=1)
    assert text(trajectory.further[0]).startswith(f"SU\n\n{SUMMARY}\nHalf done.hm</think>{FIX}")
    cut = await drive(TurnsEngine([*acting[:2], "only thoughts", acting[3]]), renderer=Thinking(), keep_turns=1)
    assert text(cut.further[0]).startswith(f"SU\n\n{SUMMARY}\nhm</think>{FIX}"), "thoughts without an end say nothing"


@pytest.mark.parametrize(("most", "compactions"), [(1, 1), (3, 3)])
async def test_a_policy_that_repeats_itself_is_compacted_a_limited_number_of_times(most: int, compactions: int) -> None:
    trajectory = await drive(TurnsEngine([call("echo", text="r" * 60)]), keep_turns=1, max_per_episode=most)
    assert sum(turn.summary for turn in trajectory.turns) == compactions
    assert trajectory.stop in (StopReason.CONTEXT_FULL, StopReason.MAX_TURNS)


async def test_an_episode_ends_where_not_even_the_last_turn_fits_after_the_summary() -> None:
    trajectory = await drive(TurnsEngine([call("echo", text="z" * 300), "done"]), 399)
    assert (trajectory.stop, len(trajectory.branches)) == (StopReason.CONTEXT_FULL, 1)
    assert [turn.summary for turn in trajectory.turns] == [False, True]
    assert trained(trajectory), "what was sampled is trained"


async def test_fewer_turns_are_kept_where_all_do_not_fit() -> None:
    trajectory = await drive(TurnsEngine([call("echo", text="b" * 150), FIX, "s", SUBMIT]), keep_turns=4)
    assert text(trajectory.further[0]) == f"SU\n\n{SUMMARY}\ns{FIX}fix{SUBMIT}"


async def test_turns_kept_once_can_be_kept_again() -> None:
    short = call("echo", text="a")
    middle = call("echo", text="m" * 90)
    trajectory = await drive(TurnsEngine([LONG, short, "one" * 20, middle, "two", SUBMIT]), keep_turns=2)
    branches = [text(branch) for branch in trajectory.branches]
    assert branches[1].endswith(f"{'one' * 20}{short}a{middle}{ASK}two")
    assert branches[2] == f"SU\n\n{SUMMARY}\ntwo{short}a{middle}{'m' * 90}{SUBMIT}"
    assert [branch.parent for branch in trajectory.further] == [0, 1]


async def test_no_summary_is_written_where_no_turn_could_follow() -> None:
    trajectory = await drive(TurnsEngine([call("echo", text="a")] * 10 + [LONG, FIX]), 399, max_per_episode=1)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.MAX_TURNS, 12)


async def test_without_training_of_summaries_their_tokens_are_context() -> None:
    engine = Recording(TurnsEngine([LONG, FIX, "Fixed it.", SUBMIT]))
    trajectory = await drive(engine, keep_turns=1, train_summary=False)
    assert ByteRenderer().decode(trained(trajectory)) == f"{LONG}{FIX}{SUBMIT}"
    assert text(trajectory.branches[0]).endswith("Fixed it.")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ORDINARY else EXHAUSTIVE) for kind in FORMS])
async def test_every_conversation_format_goes_on_after_a_summary(kind: str) -> None:
    model = FORMS[kind].chat_model(kind)
    renderer, encoder = ChatRenderer(model), Encoder(model.tokenizer)
    fmt, marks = tool_format(renderer.tool_format), renderer.reasoning

    def turn(said: ToolCall | str, thought: str) -> list[int]:
        written = said if isinstance(said, str) else fmt.render(said)
        between = "<|start|>assistant" if fmt.name == "harmony" else "\n\n"
        if fmt.name == "harmony" and isinstance(said, str):
            written = f"<|channel|>final<|message|>{said}"
        text = f"{'' if marks.prompt_opens else marks.open}{thought}\n{marks.close}{between}{written}"
        tokens = encoder.encode(text)
        return tokens if tokens[-1] in renderer.stop_token_ids else [*tokens, renderer.end_of_turn_id]

    look, fix = ToolCall("echo", {"text": "look " * 60}), ToolCall("echo", {"text": "fix"})
    turns = [turn(look, "a"), turn(fix, "b"), turn("Half done.", "c"), turn(ToolCall("submit", {}), "d")]
    seen = renderer.observation(look.arguments["text"], stop=turns[0][-1], call=SampledCall("echo", fmt.render(look)))
    at_tokens = len(renderer.initial_prompt(memory_env.MemoryEpisode.messages)) + len(turns[0]) + len(seen)
    limits = RolloutConfig(
        describe_tools=False,
        max_tokens=9000,
        compaction=CompactionConfig(at_tokens=at_tokens, prompt="Please shorten.", keep_turns=1),
    )
    engine = Recording(TurnsEngine(turns))
    parts = MemoryEnvironment(), memory_env.TASK, engine, renderer, fmt, EpisodeRules(limits, routes=R3Config())
    trajectory = await run_episode(*parts)
    assert trajectory.stop is StopReason.SUBMITTED
    assert [turn.tool for turn in trajectory.turns] == ["echo", "echo", None, "submit"]
    assert trained(trajectory) == engine.sampled
    first, second = trajectory.branches
    system, user = memory_env.MemoryEpisode.messages
    prompt = renderer.initial_prompt([system, {**user, "content": f"U\n\n{SUMMARY}\nHalf done."}])
    assert second.tokens[: len(prompt) + len(turns[1])].tolist() == [*prompt, *turns[1]]
    asked = encoder.decode(first.tokens[: -len(turns[2])].tolist())
    assert "Please shorten." in asked.rpartition("fix")[2], "after the turn's own call"
    for branch in trajectory.branches:
        check_branch(trajectory, branch)


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(max_tokens=2000, max_new_tokens=800, **changes)


def test_a_config_without_space_for_a_turn_and_a_summary_is_refused() -> None:
    assert config(compaction=CompactionConfig(at_tokens=399)).tokens_per_trajectory == 9 * 2000
    with pytest.raises(
        ValidationError, match=r"at_tokens is 400; it must be at most 399, so that a turn and a summary"
    ):
        config(compaction=CompactionConfig(at_tokens=400))
    with pytest.raises(ValidationError, match=r"rollout\.compaction is for the built-in loop"):
        config(compaction=CompactionConfig(at_tokens=9), harness=HarnessConfig(command="x"))
    tight = CompactionConfig(at_tokens=395, prompt=ASK)
    with pytest.raises(ConfigError, match="its prompt has 8 tokens: lower at_tokens to 391, or raise"):
        check_compaction(config(), tight, ByteRenderer())  # type: ignore[arg-type]
    check_compaction(config(), replace_at(tight, 391), ByteRenderer())  # type: ignore[arg-type]


def replace_at(compaction: CompactionConfig, at_tokens: int) -> CompactionConfig:
    return compaction.model_copy(update={"at_tokens": at_tokens})


async def test_metrics_rows_and_show_know_the_branches(tmp_path: Path) -> None:
    trajectory = await drive(TurnsEngine([LONG, FIX, "Fixed it.", SUBMIT]), keep_turns=1)
    group = Group("train-0", (trajectory,))
    metrics = rollout_metrics(Rollout((group,), (), 1.0))
    assert (metrics["rollout/compactions"], metrics["rollout/summary_tokens_mean"]) == (1, len("Fixed it.") + 1)
    assert metrics["rollout/branch_tokens_mean"] == trajectory.total_tokens / 2
    write_trajectories(tmp_path, 1, [group])
    ((again,),) = [each.trajectories for each in read_trajectories(tmp_path, 1)]
    assert plain(again.further, *CLOCKS) == plain(trajectory.further, *CLOCKS)
    write_rows(tmp_path, tmp_path / "rows.jsonl", RowChoice())
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [branch.tokens.tolist() for branch in trajectory.branches]
    assert [sum(row["loss_mask"]) for row in rows] == [branch.sampled_tokens for branch in trajectory.branches]
    calls = [["tool_calls" in message for message in row["messages"]] for row in rows]
    assert calls == [[False, False, True, False, True, False, False], [False, False, True, False, True]]
    assert rows[0]["messages"][-1]["content"] == "Fixed it."
    out = io.StringIO()
    show(tmp_path, step=None, task=None, sample=None, as_list=False, console=Console(file=out, width=120))
    assert "turn 3 is a summary, with which a new branch begins" in out.getvalue()
    viewed = Resources([tmp_path]).read("0/t/1-0")
    assert [turn["branch"] for turn in viewed["turns"]] == [0, 0, 0, 1]
    assert [branch["cause"] for branch in viewed["branches"]] == ["start", "compaction"]
