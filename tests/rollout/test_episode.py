"""Every ending of the episode loop, what is kept of it, and which errors stop the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import memory_env
from support.loop_clock import LoopClock
from support.memory_env import FIX, SUBMIT, InterruptedEngine, MemoryEnvironment, TurnsEngine, call, hanging

from agent_rl.config import EnvConfig, R3Config, RolloutConfig
from agent_rl.errors import ConfigError, EngineUnreachable, GuardStop, RoutesMissingError, WeightSyncError
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import SampledCall, StopReason, Trajectory
from envs import Grade, GradingError, TaskRecordError, UndecidableError
from sandbox import ImageMissingError, SandboxLostError, SandboxUnavailableError
from tools import Reasoning, ToolDefinitionError, ToolResult

ROUTES = R3Config()
HOOKS = ["on_start", "on_call", "on_grade"]
ROLES = ["system", "user", "assistant", "tool", "assistant"]


async def drive(
    engine: Any, env: Any = None, *, timeouts: Any = None, routes: Any = ROUTES, renderer: Any = None, **limits: Any
) -> Trajectory:
    """An episode, which leaves no sandbox open; with routes, its trajectory is aligned."""
    env = env or MemoryEnvironment()
    rules = EpisodeRules(RolloutConfig(**{"describe_tools": False, **limits}), timeouts or EnvConfig(), routes)
    try:
        trajectory = await memory_env.run_memory_episode(engine, env, rules=rules, renderer=renderer)
    finally:
        assert env.open == 0
    if routes:
        check_aligned(trajectory)
    return trajectory


def check_aligned(trajectory: Trajectory) -> None:
    """What every trajectory holds, whatever its ending."""
    tokens, routing = trajectory.tokens, trajectory.routing
    assert len(tokens) == len(trajectory.loss_mask) == len(trajectory.logprobs)
    assert int(trajectory.loss_mask.sum()) == sum(turn.completion_tokens for turn in trajectory.turns)
    # The engine's log-prob of the token at position i is -(i + 1) / 1000: it names its position.
    positions = np.where(trajectory.loss_mask, -0.001 * (np.arange(len(tokens)) + 1), 0).astype(np.float32)
    assert np.array_equal(trajectory.logprobs, positions)
    assert (trajectory.reward is None) == trajectory.stop.infrastructure
    if not trajectory.turns:
        assert routing is None
        return
    assert bool(trajectory.loss_mask[-1])
    assert routing.tokens == len(tokens)
    assert routing.present.tolist() == [True] * (len(tokens) - 1) + [False]
    expected = [memory_env.row_of(position, int(token)) for position, token in enumerate(tokens[:-1])]
    assert routing.experts[:-1].tolist() == expected
    assert routing.spans[-1].stop == len(tokens)


def raising(error: Exception) -> Callable[..., Awaitable[Any]]:
    async def raises(*args: Any) -> Any:
        raise error

    return raises


def returning(value: Any) -> Callable[..., Awaitable[Any]]:
    async def returns(*args: Any) -> Any:
        return value

    return returns


async def hang() -> None:
    await asyncio.Event().wait()


async def test_a_submitted_episode_has_its_reward_patch_turns_and_weight_versions() -> None:
    trajectory = await drive(TurnsEngine([FIX, SUBMIT], versions=["3", "4"]))
    assert (trajectory.stop, trajectory.reward, trajectory.resolved) == (StopReason.SUBMITTED, 1.0, True)
    assert (trajectory.patch, trajectory.weight_versions) == ("diff", ("3", "4"))
    assert [(turn.tool, turn.observation) for turn in trajectory.turns] == [("echo", "fix"), ("submit", "submitted")]
    assert [message["role"] for message in trajectory.messages] == ROLES


async def test_sampled_tokens_are_kept_prompts_only_grow_and_each_row_of_routes_is_requested_once() -> None:
    engine = TurnsEngine([call("echo", text="é"), FIX, SUBMIT])
    trajectory = await drive(engine)
    for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert trajectory.tokens[: len(engine.prompts[-1])].tolist() == engine.prompts[-1]
    assert [len(prompt) for prompt in engine.prompts] == [turn.prompt_tokens for turn in trajectory.turns]
    ends = [turn.prompt_tokens + turn.completion_tokens - 1 for turn in trajectory.turns]
    assert engine.routes_from == [0, *ends[:-1]]


async def test_each_token_is_rendered_and_decoded_once() -> None:
    """The cost of an episode grows with its tokens, not their square; no prompt is copied."""
    handled: list[int] = []

    class Counting(ByteRenderer):
        def decode(self, tokens: Any) -> str:
            handled.append(len(tokens))
            return super().decode(tokens)

        def observation(self, text: str, *args: Any, **options: Any) -> list[int]:
            handled.append(len(text))
            return super().observation(text, *args, **options)

    class SameList(TurnsEngine):
        prompt: Any = None

        async def generate(self, tokens: Any, *args: Any, **options: Any) -> Any:
            assert self.prompt is None or self.prompt is tokens
            self.prompt = tokens
            return await super().generate(tokens, *args, **options)

    trajectory = await drive(SameList([FIX]), renderer=Counting(), routes=None, max_turns=50)
    assert len(trajectory.turns) == 50
    assert sum(handled) == sum(turn.completion_tokens + turn.observation_tokens for turn in trajectory.turns)


async def test_without_replay_no_routes_are_requested() -> None:
    engine = TurnsEngine([SUBMIT])
    trajectory = await drive(engine, routes=None)
    assert (engine.routes_from, trajectory.routing) == ([None], None)


async def test_an_episode_that_reaches_max_turns_is_graded() -> None:
    trajectory = await drive(TurnsEngine([FIX]), max_turns=3)
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.MAX_TURNS, 1.0, 3)


async def test_a_parse_failure_is_an_observation_and_too_many_in_a_row_end_the_episode() -> None:
    engine = TurnsEngine(["hm", "hm", FIX, "a", "b", "c", SUBMIT])
    trajectory = await drive(engine, max_parse_failures=3)
    assert trajectory.stop is StopReason.PARSE_FAILURES
    assert [turn.parse_failure is not None for turn in trajectory.turns] == [True, True, False, True, True, True]
    shown = trajectory.turns[0].observation
    assert shown == trajectory.turns[0].parse_failure
    assert ByteRenderer().decode(engine.prompts[1]).endswith(shown)


async def test_a_call_in_thoughts_that_the_prompt_opened_is_not_executed() -> None:
    class Opened(ByteRenderer):
        reasoning = Reasoning("<think>", "</think>", prompt_opens=True)

    thought = f"I could run {call('fix')} but no."
    turns = [ByteRenderer().encode(text) for text in (thought, f"{thought}\n</think>\n\nDone.")]
    trajectory = await drive(TurnsEngine([*turns, SUBMIT]), renderer=Opened(), max_turns=2)
    assert [turn.tool for turn in trajectory.turns] == [None, None]
    assert trajectory.turns[0].parse_failure == "no tool call found; <think> is not closed"
    closed = len(f"{thought}\n</think>")
    assert [turn.thinking_tokens for turn in trajectory.turns] == [len(turns[0]), closed]
    assert [turn.thinking_chars for turn in trajectory.turns] == [len(thought), closed]


async def test_the_renderer_is_given_the_sampled_call_and_the_stop_token() -> None:
    given: list[Any] = []

    class Recording(ByteRenderer):
        def observation(self, text: str, *args: Any, **options: Any) -> list[int]:
            given.append((options["stop"], options["call"]))
            return super().observation(text, *args, **options)

    await drive(TurnsEngine(["hm", FIX]), renderer=Recording(), max_turns=2)
    assert given == [(ByteRenderer.STOP, None), (ByteRenderer.STOP, SampledCall("echo", FIX))]


async def test_a_wrong_tool_is_an_observation_not_a_parse_failure() -> None:
    trajectory = await drive(TurnsEngine([call("ecko"), SUBMIT]), max_parse_failures=1)
    assert (trajectory.stop, trajectory.turns[0].observation) == (StopReason.SUBMITTED, "no tool 'ecko'")


async def test_an_observation_beyond_max_tokens_ends_the_episode() -> None:
    trajectory = await drive(TurnsEngine([FIX, call("echo", text="x" * 500)]), max_tokens=900)
    assert (trajectory.stop, trajectory.reward) == (StopReason.CONTEXT_FULL, 1.0)
    assert len(trajectory.tokens) <= 900
    assert trajectory.turns[-1].observation_tokens == 500


async def test_a_turn_is_limited_by_the_tokens_left() -> None:
    engine = TurnsEngine([call("echo", text="y" * 100), "z" * 500])
    trajectory = await drive(engine, max_tokens=400, max_new_tokens=300)
    assert (trajectory.stop, len(trajectory.tokens)) == (StopReason.CONTEXT_FULL, 400)
    assert [s.max_new_tokens for s in engine.sampling] == [300, 400 - len(engine.prompts[1])]
    assert engine.sampling[0].stop_token_ids == (ByteRenderer.STOP,)


async def test_an_initial_prompt_over_the_limit_is_a_full_context_without_a_turn() -> None:
    trajectory = await drive(TurnsEngine([FIX]), max_tokens=2)
    assert (trajectory.stop, trajectory.reward, trajectory.turns) == (StopReason.CONTEXT_FULL, 0.0, ())


@pytest.mark.parametrize(("where", "turns"), [("engine", 1), ("tool", 2)])
async def test_the_time_limit_keeps_what_was_sampled(where: str, turns: int) -> None:
    calls = 0

    async def stall_on_the_second() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await hang()

    env = MemoryEnvironment(on_call=stall_on_the_second if where == "tool" else None)
    engine = TurnsEngine([FIX], before=stall_on_the_second if where == "engine" else None)
    trajectory = await drive(engine, env, time_limit=0.1)
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.TIME_LIMIT, 1.0, turns)


@pytest.mark.parametrize(
    ("error", "where", "stop"),
    [
        *((error, hook, "sandbox_failure") for hook in HOOKS for error in (SandboxLostError("a"), GradingError("b"))),
        (UndecidableError("no summary"), "on_grade", "undecidable"),
    ],
)
async def test_a_broken_sandbox_or_grading_is_no_reward(error: Exception, where: str, stop: str) -> None:
    trajectory = await drive(TurnsEngine([FIX, SUBMIT]), MemoryEnvironment(**{where: raising(error)}))
    assert (trajectory.stop, trajectory.reward) == (stop, None)
    assert trajectory.error == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [SandboxLostError("gone"), OSError(28, "no room"), KeyError("status")])
async def test_a_grade_is_final_before_the_clean_up(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    trajectory = await drive(TurnsEngine([FIX, SUBMIT]), MemoryEnvironment(on_close=raising(error)))
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    assert repr(error) in caplog.text


async def test_a_broken_engine_is_no_reward() -> None:
    trajectory = await drive(TurnsEngine([FIX, EngineUnreachable("refused")]))
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.ENGINE_FAILURE, None, 1)
    assert trajectory.error == "EngineUnreachable: refused"


async def test_an_aborted_turn_continues_after_its_sampled_tokens() -> None:
    engine = InterruptedEngine([FIX, SUBMIT], [5, 0, 7])
    trajectory = await drive(engine)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    assert [turn.text for turn in trajectory.turns] == [FIX, SUBMIT]
    assert [message["role"] for message in trajectory.messages] == ROLES
    assert trajectory.messages[2]["content"] == FIX
    start, parts = engine.inner.prompts[0], engine.inner.prompts[1:4]
    encoded = ByteRenderer().encode(FIX)
    assert [prompt[len(start) :] for prompt in parts] == [encoded[:5], encoded[:5], encoded[:12]]
    assert engine.inner.routes_from[:4] == [0, len(start) + 4, len(start) + 4, len(start) + 11]
    limits = [sampling.max_new_tokens for sampling in engine.inner.sampling[:4]]
    assert limits == [4096, 4091, 4091, 4084], "the parts of a turn have one limit together"
    assert trajectory.weight_versions == ("0", "2", "3", "4")
    assert [span.weight_version for span in trajectory.routing.spans] == ["0", "2", "3", "4", ""]
    assert trajectory.turns[0].weight_version == "3"


async def test_a_turn_continues_after_twenty_interruptions_by_new_weights() -> None:
    engine = InterruptedEngine([FIX, SUBMIT], [1, 0] * 10, published=True)
    trajectory = await drive(engine)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    assert [turn.text for turn in trajectory.turns] == [FIX, SUBMIT]
    first = len(engine.inner.prompts[0])
    cuts = [(first + at, first + at + 1, str(2 * at)) for at in range(10)]
    assert [(span.start, span.stop, span.version) for span in trajectory.versions[:10]] == cuts
    assert len(trajectory.versions) == 12


@pytest.mark.parametrize("cut", [0, 2])
async def test_a_turn_that_is_aborted_too_often_is_an_engine_failure(cut: int) -> None:
    engine = InterruptedEngine([FIX], [None, *[cut] * 4])
    trajectory = await drive(engine)
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENGINE_FAILURE, None)
    assert trajectory.error.startswith("EngineAborted: engine memory aborted a turn")
    assert trajectory.error.endswith(f"4 times after {4 * cut} tokens")
    assert len(engine.inner.prompts) == 5


async def test_a_turn_aborted_at_its_limit_is_over() -> None:
    engine = InterruptedEngine(["abcdef", SUBMIT], [3, 3])
    trajectory = await drive(engine, max_new_tokens=6, max_turns=1)
    assert trajectory.turns[0].text == "abcdef"
    assert len(engine.inner.prompts) == 2


async def test_the_time_limit_within_an_aborted_turn_keeps_its_sampled_tokens() -> None:
    engine = InterruptedEngine([FIX], [None, 4])

    async def stall_on_the_third() -> None:
        if len(engine.inner.prompts) == 3:
            await hang()

    engine.inner.before = stall_on_the_third
    trajectory = await drive(engine, time_limit=0.1)
    assert (trajectory.stop, trajectory.turns[-1].completion_tokens) == (StopReason.TIME_LIMIT, 4)


async def test_a_completion_without_tokens_is_a_turn_with_a_parse_failure() -> None:
    trajectory = await drive(TurnsEngine([FIX, [], FIX, []]), max_turns=4)
    assert [turn.completion_tokens > 0 for turn in trajectory.turns] == [True, False, True, False]
    assert trajectory.turns[1].parse_failure


TURN = st.one_of(
    st.text(max_size=30),
    st.text(max_size=30).map(lambda text: call("echo", text=text)),
    st.sampled_from([FIX, SUBMIT]),
    st.lists(st.integers(0, 256), min_size=1, max_size=40),
)


@settings(max_examples=100)
@given(
    turns=st.lists(TURN, min_size=1, max_size=6),
    cuts=st.lists(st.none() | st.integers(0, 30), max_size=8).filter(lambda cuts: len(cuts) - cuts.count(None) < 4),
    max_new_tokens=st.integers(1, 120),
    max_tokens=st.integers(1, 400),
    max_turns=st.integers(1, 8),
)
def test_limits_hold_and_interruptions_change_nothing(turns: list[Any], cuts: list[int | None], **limits: int) -> None:
    whole = asyncio.run(drive(TurnsEngine(turns), **limits))
    assert not whole.stop.infrastructure
    assert len(whole.tokens) <= max(limits["max_tokens"], 4)  # the initial prompt has 4
    assert len(whole.turns) <= limits["max_turns"]
    parts = asyncio.run(drive(InterruptedEngine(turns, cuts), **limits))
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert parts.loss_mask.tolist() == whole.loss_mask.tolist()
    assert (parts.stop, parts.reward, parts.messages) == (whole.stop, whole.reward, whole.messages)
    assert [turn.text for turn in parts.turns] == [turn.text for turn in whole.turns]


@pytest.mark.parametrize(("hook", "limit"), [("on_start", 0.05), ("on_grade", 0.8)])
async def test_infrastructure_that_hangs_is_a_failure_with_a_reason(hook: str, limit: float) -> None:
    timeouts = EnvConfig(start_timeout=0.05, grade_timeout=0.05)
    trajectory = await drive(TurnsEngine([SUBMIT]), MemoryEnvironment(**{hook: hang}), timeouts=timeouts)
    assert trajectory.stop is StopReason.SANDBOX_FAILURE
    assert f"took longer than {limit} s" in trajectory.error


@pytest.mark.parametrize(("seconds", "stop"), [(1200, StopReason.SUBMITTED), (19201, StopReason.SANDBOX_FAILURE)])
async def test_grading_may_take_eight_test_runs_and_sandbox_starts(seconds: float, stop: StopReason) -> None:
    env = MemoryEnvironment(on_grade=partial(LoopClock().put_forward, seconds))
    timeouts = EnvConfig(grade_timeout=1800, start_timeout=600)
    trajectory = await drive(TurnsEngine([FIX, SUBMIT]), env, timeouts=timeouts)
    assert trajectory.stop is stop, trajectory.error
    assert trajectory.resolved == (stop is StopReason.SUBMITTED)


@pytest.mark.parametrize(
    "error",
    [
        ImageMissingError("no image"),
        SandboxUnavailableError("no backend"),
        TaskRecordError("row 3: no problem_statement"),
        ToolDefinitionError("tool f: needs a docstring"),
        ConfigError("a wrong key"),
        WeightSyncError("not taken"),
        GuardStop("stopped"),
    ],
)
async def test_an_error_that_every_episode_would_meet_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        await drive(TurnsEngine([FIX]), MemoryEnvironment(on_start=raising(error)))


async def test_missing_routes_are_raised() -> None:
    with pytest.raises(RoutesMissingError, match="absent"):
        await drive(TurnsEngine([RoutesMissingError("routed_experts absent")]))


@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize(
    "error", [KeyError("status"), MemoryError(), RecursionError(), OSError(28, "no room"), EOFError()]
)
async def test_an_unexpected_error_is_a_failure_of_its_episode(where: str, error: Exception, caplog: Any) -> None:
    trajectory = await drive(TurnsEngine([FIX, SUBMIT]), MemoryEnvironment(**{where: raising(error)}))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    first, *further = trajectory.error.splitlines()
    assert first.startswith(f"{type(error).__name__}: ")
    assert f"{__file__}:" in first, "the place is in the line that a report shows"
    assert "Traceback (most recent call last):" in further
    assert "    raise error" in further
    assert trajectory.error in caplog.text


async def test_a_turn_that_cannot_be_decoded_is_a_failure_of_its_episode() -> None:
    class Broken(ByteRenderer):
        def decode(self, tokens: Any) -> str:
            raise ValueError("no such token")

    trajectory = await drive(TurnsEngine([FIX]), renderer=Broken(), routes=None)
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert [turn.text for turn in trajectory.turns] == [""]
    decode_trajectory(encode_trajectory(trajectory), "here")


@pytest.mark.parametrize(
    "grade",
    [
        None, 0.0, 1.0, Grade(float("nan"), True), Grade(float("inf"), True), Grade(None, True),
        Grade(1.0, True, patch=b"diff"), Grade(1.0, True, log=None), Grade(1.0, True, tests={"a": 1}),
        Grade(1.0, True, suspected_hack=[3]),
    ],
)  # fmt: skip
async def test_a_malformed_grade_is_a_failure_of_its_episode(grade: Any) -> None:
    trajectory = await drive(TurnsEngine([SUBMIT]), MemoryEnvironment(grade=returning(grade)))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    assert "grade" in trajectory.error.splitlines()[0] or "float" in trajectory.error.splitlines()[0]


async def test_a_grade_of_numpy_values_is_accepted() -> None:
    grade = Grade(np.float32(0.5), np.bool_(True), patch="half a pair: \ud800")
    trajectory = await drive(TurnsEngine([SUBMIT]), MemoryEnvironment(grade=returning(grade)))
    assert (trajectory.stop, trajectory.reward, trajectory.resolved) == (StopReason.SUBMITTED, 0.5, True)
    decode_trajectory(encode_trajectory(trajectory), "here")


@pytest.mark.parametrize("result", [None, "text", ToolResult(None), ToolResult(3, submitted=True)])
async def test_a_tool_that_returns_no_text_is_a_failure_of_its_episode(result: Any) -> None:
    trajectory = await drive(TurnsEngine([SUBMIT]), MemoryEnvironment(call=returning(result)))
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert trajectory.error.startswith("TypeError: a tool returned a ")


async def test_half_a_surrogate_pair_is_shown_as_a_question_mark() -> None:
    result = ToolResult("a file named \udcff", submitted=True)
    trajectory = await drive(TurnsEngine([SUBMIT]), MemoryEnvironment(call=returning(result)))
    assert (trajectory.stop, trajectory.turns[0].observation) == (StopReason.SUBMITTED, "a file named ?")


async def test_cancellation_closes_the_sandbox_and_propagates() -> None:
    env, reached = hanging()
    running = asyncio.create_task(drive(TurnsEngine([FIX]), env))
    await reached.wait()
    assert env.open == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@dataclass
class Talk:
    """A dialogue. It returns how many turns it received, and ends at ``bye``."""

    received: list[str] = field(default_factory=list)
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": "Talk."},)

    async def respond(self, text: str) -> ToolResult:
        self.received.append(text)
        return ToolResult(str(len(self.received)), submitted=text == "bye")

    async def grade(self) -> Grade:
        return Grade(float(len(self.received)), True)


async def test_a_dialogue_receives_whole_turns_and_no_call_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, env, turns = Talk(), MemoryEnvironment(), [FIX, "<tool_call>{", "more", "bye"]
    monkeypatch.setattr(env, "start", lambda task: nullcontext(talk), raising=False)
    trajectory = await drive(TurnsEngine(turns), env, describe_tools=True, max_parse_failures=1)
    assert talk.received == turns
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 4.0)
    shown = [(turn.tool, turn.parse_failure, turn.observation) for turn in trajectory.turns]
    assert shown == [(None, None, str(count)) for count in (1, 2, 3, 4)]
    assert trajectory.messages[0] == talk.messages[0], "there are no tools to describe"
    assert {message["role"] for message in trajectory.messages} == {"user", "assistant"}
