"""Every ending of the episode loop, what is kept of it, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loop_clock import LoopClock

from agent_rl.config import EnvConfig, R3Config, RolloutConfig
from agent_rl.errors import ConfigError, EngineUnreachable, GuardStop, RoutesMissingError, WeightSyncError
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import Completion, FinishReason, StopReason, Trajectory
from envs import Grade, GradingError, Task, TaskRecordError, UndecidableError
from sandbox import ImageMissingError, SandboxLostError, SandboxUnavailableError
from tools import FunctionToolSet, ToolDefinitionError, ToolResult
from tools.formats import tool_format

ROUTES = R3Config()


async def drive(
    env: Any, task: Task, engine: Any, bounds: EnvConfig | None = None, routes: R3Config | None = ROUTES, **limits: Any
) -> Trajectory:
    rules = EpisodeRules(RolloutConfig(**{"describe_tools": False, **limits}), bounds or EnvConfig(), routes)
    return await run_episode(env, task, engine, ByteRenderer(), tool_format("hermes"), rules)


def check_aligned(trajectory: Trajectory, row_of: Any) -> None:
    """What every trajectory holds, whatever its ending."""
    tokens, routing = trajectory.tokens, trajectory.routing
    assert len(tokens) == len(trajectory.loss_mask) == len(trajectory.logprobs)
    assert int(trajectory.loss_mask.sum()) == sum(turn.completion_tokens for turn in trajectory.turns)
    # The engine's log-prob of the token at position i is -(i + 1) / 1000: it names its place.
    places = np.where(trajectory.loss_mask, -0.001 * (np.arange(len(tokens)) + 1), 0).astype(np.float32)
    assert np.array_equal(trajectory.logprobs, places)
    assert (trajectory.reward is None) == trajectory.stop.infrastructure
    if not trajectory.turns:
        assert routing is None
        return
    assert bool(trajectory.loss_mask[-1])
    assert routing is not None
    assert routing.tokens == len(tokens)
    assert routing.present.tolist() == [True] * (len(tokens) - 1) + [False]
    expected = [row_of(position, int(token)) for position, token in enumerate(tokens[:-1])]
    assert routing.experts[:-1].tolist() == expected
    assert routing.spans[-1].stop == len(tokens)


async def test_submitted(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = kit.ToldEngine([kit.FIX, kit.SUBMIT], versions=["3", "4"])
    trajectory = await drive(env, task, engine)
    assert (trajectory.stop, trajectory.reward, trajectory.resolved) == (StopReason.SUBMITTED, 1.0, True)
    assert trajectory.patch == "diff"
    assert trajectory.weight_versions == ("3", "4")
    assert [(turn.tool, turn.observation) for turn in trajectory.turns] == [("echo", "fix"), ("submit", "submitted")]
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert env.open == 0
    check_aligned(trajectory, kit.row_of)


async def test_sampled_tokens_are_kept_as_sampled_and_prompts_only_grow(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    engine = kit.ToldEngine([kit.call("echo", text="é"), kit.FIX, kit.SUBMIT])
    trajectory = await drive(env, task, engine)
    for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert trajectory.tokens[: len(engine.prompts[-1])].tolist() == engine.prompts[-1]
    assert [len(prompt) for prompt in engine.prompts] == [turn.prompt_tokens for turn in trajectory.turns]


async def test_a_turn_costs_its_own_tokens_only(env: Any, task: Task, kit: SimpleNamespace) -> None:
    """Nothing is rendered, decoded or copied twice: what the loop handles grows with the tokens, not their square."""
    handled: list[int] = []

    class Counting(ByteRenderer):
        def decode(self, tokens: Any) -> str:
            handled.append(len(tokens))
            return super().decode(tokens)

        def observation(self, text: str, *, stop_included: bool) -> list[int]:
            handled.append(len(text))
            return super().observation(text, stop_included=stop_included)

    class SameList(kit.ToldEngine):
        prompt: Any = None

        async def generate(self, tokens: Any, *args: Any, **options: Any) -> Any:
            assert self.prompt is None or self.prompt is tokens
            self.prompt = tokens
            return await super().generate(tokens, *args, **options)

    limits = EpisodeRules(RolloutConfig(describe_tools=False, max_turns=50))
    trajectory = await run_episode(env, task, SameList([kit.FIX]), Counting(), tool_format("hermes"), limits)
    assert len(trajectory.turns) == 50
    assert sum(handled) == sum(turn.completion_tokens + turn.observation_tokens for turn in trajectory.turns)


async def test_every_row_of_routes_is_asked_for_once(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = kit.ToldEngine([kit.FIX, kit.FIX, kit.SUBMIT])
    trajectory = await drive(env, task, engine)
    ends = [turn.prompt_tokens + turn.completion_tokens - 1 for turn in trajectory.turns]
    assert engine.routes_from == [0, *ends[:-1]]


async def test_without_routes_none_are_asked_for(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = kit.ToldEngine([kit.SUBMIT])
    trajectory = await drive(env, task, engine, routes=None)
    assert (engine.routes_from, trajectory.routing) == ([None], None)


async def test_max_turns_is_graded_on_what_was_left_behind(env: Any, task: Task, kit: SimpleNamespace) -> None:
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX]), max_turns=3)
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.MAX_TURNS, 1.0, 3)
    check_aligned(trajectory, kit.row_of)


async def test_parse_failures_are_answered_and_counted_in_a_row(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = kit.ToldEngine(["hm", "hm", kit.FIX, "a", "b", "c", kit.SUBMIT])
    trajectory = await drive(env, task, engine, max_parse_failures=3)
    assert trajectory.stop is StopReason.PARSE_FAILURES
    assert [turn.parse_failure is not None for turn in trajectory.turns] == [True, True, False, True, True, True]
    shown = trajectory.turns[0].observation
    assert shown == trajectory.turns[0].parse_failure
    assert ByteRenderer().decode(engine.prompts[1]).endswith(shown)
    check_aligned(trajectory, kit.row_of)


async def test_a_wrong_tool_is_an_observation_not_a_parse_failure(env: Any, task: Task, kit: SimpleNamespace) -> None:
    trajectory = await drive(env, task, kit.ToldEngine([kit.call("ecko"), kit.SUBMIT]), max_parse_failures=1)
    assert trajectory.stop is StopReason.SUBMITTED
    assert trajectory.turns[0].observation == "no tool 'ecko'"


async def test_an_observation_that_leaves_no_room_ends_the_episode(env: Any, task: Task, kit: SimpleNamespace) -> None:
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX, kit.call("echo", text="x" * 500)]), max_tokens=900)
    assert trajectory.stop is StopReason.CONTEXT_FULL
    assert len(trajectory.tokens) <= 900
    assert trajectory.turns[-1].observation_tokens == 500
    assert trajectory.reward == 1.0
    check_aligned(trajectory, kit.row_of)


async def test_a_turn_is_cut_to_the_room_left(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = kit.ToldEngine([kit.call("echo", text="y" * 100), "z" * 500])
    trajectory = await drive(env, task, engine, max_tokens=400, max_new_tokens=300)
    assert trajectory.stop is StopReason.CONTEXT_FULL
    assert len(trajectory.tokens) == 400
    assert [s.max_new_tokens for s in engine.sampling] == [300, 400 - len(engine.prompts[1])]
    assert engine.sampling[0].stop_token_ids == (ByteRenderer.STOP,)
    check_aligned(trajectory, kit.row_of)


async def test_an_opening_over_the_limit_is_a_full_context_without_a_turn(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX]), max_tokens=2)
    assert (trajectory.stop, trajectory.reward, trajectory.turns) == (StopReason.CONTEXT_FULL, 0.0, ())
    check_aligned(trajectory, kit.row_of)


@pytest.mark.parametrize("where", ["engine", "tool"])
async def test_the_time_limit_ends_it_with_what_was_sampled(task: Task, kit: SimpleNamespace, where: str) -> None:
    calls = 0

    async def stall_on_the_second() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await asyncio.Event().wait()

    env = kit.MemoryEnvironment(on_call=stall_on_the_second if where == "tool" else None)
    engine = kit.ToldEngine([kit.FIX], before=stall_on_the_second if where == "engine" else None)
    trajectory = await drive(env, task, engine, time_limit=0.1)
    assert (trajectory.stop, trajectory.reward) == (StopReason.TIME_LIMIT, 1.0)
    assert len(trajectory.turns) == (2 if where == "tool" else 1)
    assert env.open == 0
    check_aligned(trajectory, kit.row_of)


@pytest.mark.parametrize("where", ["on_start", "on_call", "on_grade"])
@pytest.mark.parametrize("error", [SandboxLostError("gone"), GradingError("no log")])
async def test_a_broken_sandbox_is_no_reward(task: Task, kit: SimpleNamespace, where: str, error: Exception) -> None:
    async def breaks() -> None:
        raise error

    env = kit.MemoryEnvironment(**{where: breaks})
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX, kit.SUBMIT]))
    assert (trajectory.stop, trajectory.reward) == (StopReason.SANDBOX_FAILURE, None)
    assert trajectory.error == f"{type(error).__name__}: {error}"
    assert env.open == 0
    check_aligned(trajectory, kit.row_of)


@pytest.mark.parametrize("error", [SandboxLostError("gone"), OSError(28, "no room"), KeyError("status")])
async def test_a_grade_is_final_before_the_clean_up(
    task: Task, kit: SimpleNamespace, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks() -> None:
        raise error

    trajectory = await drive(kit.MemoryEnvironment(on_close=breaks), task, kit.ToldEngine([kit.FIX, kit.SUBMIT]))
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    assert repr(error) in caplog.text


async def test_a_task_that_can_never_be_graded_is_no_reward(task: Task, kit: SimpleNamespace) -> None:
    async def breaks() -> None:
        raise UndecidableError("no summary")

    trajectory = await drive(kit.MemoryEnvironment(on_grade=breaks), task, kit.ToldEngine([kit.FIX, kit.SUBMIT]))
    assert (trajectory.stop, trajectory.reward) == (StopReason.UNDECIDABLE, None)
    assert trajectory.error == "UndecidableError: no summary"


async def test_a_broken_engine_is_no_reward(env: Any, task: Task, kit: SimpleNamespace) -> None:
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX, EngineUnreachable("refused")]))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENGINE_FAILURE, None)
    assert trajectory.error == "EngineUnreachable: refused"
    assert len(trajectory.turns) == 1
    check_aligned(trajectory, kit.row_of)


class Interrupted:
    """Says what it is told; its n-th request is given up after ``cuts[n]`` tokens where that is not None, ``published``
    for new weights."""

    def __init__(
        self, kit: SimpleNamespace, turns: Sequence[Any], cuts: Sequence[int | None], *, published: bool = False
    ) -> None:
        self.published = published
        self.told, self.turns, self.cuts = kit.ToldEngine([]), list(turns), list(cuts)
        self.left: list[int] | None = None
        self.taken = 0

    async def generate(self, tokens: Any, sampling: Any, **options: Any) -> Completion:
        if self.left is None:
            told = self.turns[self.taken % len(self.turns)]
            self.left = ByteRenderer().encode(told) if isinstance(told, str) else list(told)
            self.taken += 1
        number = len(self.told.prompts)
        cut = self.cuts[number] if number < len(self.cuts) else None
        part = self.left[:cut]
        self.told.turns, self.told.versions = [part], [str(n) for n in range(number + 1)]
        got = await self.told.generate(tokens, sampling, **options)
        self.left = None if cut is None or len(part) >= sampling.max_new_tokens else self.left[len(part) :]
        if cut is None or got.finish is FinishReason.LENGTH:
            return got
        routing = got.routing if part else None
        return replace(got, finish=FinishReason.ABORT, routing=routing, interrupted=self.published)


async def test_an_aborted_turn_goes_on_from_what_came(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = Interrupted(kit, [kit.FIX, kit.SUBMIT], [5, 0, 7])
    trajectory = await drive(env, task, engine)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    assert [turn.text for turn in trajectory.turns] == [kit.FIX, kit.SUBMIT]
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["content"] == kit.FIX
    opening, parts = engine.told.prompts[0], engine.told.prompts[1:4]
    said = ByteRenderer().encode(kit.FIX)
    assert [prompt[len(opening) :] for prompt in parts] == [said[:5], said[:5], said[:12]]
    assert engine.told.routes_from[:4] == [0, len(opening) + 4, len(opening) + 4, len(opening) + 11]
    limits = [sampling.max_new_tokens for sampling in engine.told.sampling[:4]]
    assert limits == [4096, 4091, 4091, 4084], "the parts of a turn have one limit together"
    assert trajectory.weight_versions == ("0", "2", "3", "4")
    assert trajectory.routing is not None
    assert [span.weight_version for span in trajectory.routing.spans] == ["0", "2", "3", "4", ""]
    assert trajectory.turns[0].weight_version == "3"
    check_aligned(trajectory, kit.row_of)


async def test_a_turn_that_is_cut_for_new_weights_twenty_times_ends_well(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    engine = Interrupted(kit, [kit.FIX, kit.SUBMIT], [1, 0] * 10, published=True)
    trajectory = await drive(env, task, engine)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 1.0)
    assert [turn.text for turn in trajectory.turns] == [kit.FIX, kit.SUBMIT]
    first = len(engine.told.prompts[0])
    cuts = [(first + at, first + at + 1, str(2 * at)) for at in range(10)]
    assert [(span.start, span.stop, span.version) for span in trajectory.versions[:10]] == cuts
    assert len(trajectory.versions) == 12
    check_aligned(trajectory, kit.row_of)


@pytest.mark.parametrize("cut", [0, 2])
async def test_a_turn_that_is_aborted_over_and_over_is_an_engine_failure(
    env: Any, task: Task, kit: SimpleNamespace, cut: int
) -> None:
    engine = Interrupted(kit, [kit.FIX], [None, *[cut] * 4])
    trajectory = await drive(env, task, engine)
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENGINE_FAILURE, None)
    assert trajectory.error.startswith("EngineAborted: engine told aborted a turn")
    assert trajectory.error.endswith(f"4 times after {4 * cut} tokens")
    assert len(engine.told.prompts) == 5
    check_aligned(trajectory, kit.row_of)


async def test_a_turn_aborted_at_its_limit_is_over(env: Any, task: Task, kit: SimpleNamespace) -> None:
    engine = Interrupted(kit, ["abcdef", kit.SUBMIT], [3, 3])
    trajectory = await drive(env, task, engine, max_new_tokens=6, max_turns=1)
    assert trajectory.turns[0].text == "abcdef"
    assert len(engine.told.prompts) == 2
    check_aligned(trajectory, kit.row_of)


async def test_the_time_limit_within_an_aborted_turn_keeps_what_came(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    engine = Interrupted(kit, [kit.FIX], [None, 4])

    async def stall_on_the_third() -> None:
        if len(engine.told.prompts) == 3:
            await asyncio.Event().wait()

    engine.told.before = stall_on_the_third
    trajectory = await drive(env, task, engine, time_limit=0.1)
    assert (trajectory.stop, trajectory.turns[-1].completion_tokens) == (StopReason.TIME_LIMIT, 4)
    check_aligned(trajectory, kit.row_of)


async def test_a_completion_without_tokens_is_a_turn_that_said_nothing(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX, [], kit.FIX, []]), max_turns=4)
    assert [turn.completion_tokens > 0 for turn in trajectory.turns] == [True, False, True, False]
    assert trajectory.turns[1].parse_failure
    check_aligned(trajectory, kit.row_of)


def test_an_interrupted_episode_is_the_uninterrupted_one(kit: SimpleNamespace) -> None:
    turn = st.one_of(st.just(kit.FIX), st.just(kit.SUBMIT), st.lists(st.integers(0, 256), min_size=1, max_size=20))

    @settings(max_examples=60)
    @given(
        turns=st.lists(turn, min_size=1, max_size=4),
        cuts=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=8).filter(
            lambda c: len(c) - c.count(None) < 4
        ),
        max_new_tokens=st.integers(1, 120),
        max_tokens=st.integers(10, 400),
    )
    def holds(turns: list[Any], cuts: list[int | None], max_new_tokens: int, max_tokens: int) -> None:
        limits = {"max_turns": 4, "max_new_tokens": max_new_tokens, "max_tokens": max_tokens}
        env = kit.MemoryEnvironment()
        whole = asyncio.run(drive(env, env.tasks("train")[0], kit.ToldEngine(turns), **limits))
        parts = asyncio.run(drive(env, env.tasks("train")[0], Interrupted(kit, turns, cuts), **limits))
        check_aligned(parts, kit.row_of)
        assert parts.tokens.tolist() == whole.tokens.tolist()
        assert parts.loss_mask.tolist() == whole.loss_mask.tolist()
        assert parts.messages == whole.messages
        assert (parts.stop, parts.reward) == (whole.stop, whole.reward)
        assert [turn.text for turn in parts.turns] == [turn.text for turn in whole.turns]

    holds()


@pytest.mark.parametrize("hung", ["on_start", "on_grade"])
async def test_infrastructure_that_hangs_is_a_failure_with_a_reason(
    task: Task, kit: SimpleNamespace, hung: str
) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    env = kit.MemoryEnvironment(**{hung: hang})
    trajectory = await drive(env, task, kit.ToldEngine([kit.SUBMIT]), EnvConfig(start_timeout=0.05, grade_timeout=0.05))
    assert trajectory.stop is StopReason.SANDBOX_FAILURE
    assert f"took longer than {0.05 if hung == 'on_start' else 0.2} s" in trajectory.error
    assert env.open == 0


@pytest.mark.parametrize(("seconds", "ends_as"), [(1200, StopReason.SUBMITTED), (4801, StopReason.SANDBOX_FAILURE)])
async def test_grade_timeout_bounds_a_run_of_the_tests_and_nothing_cuts_it(
    task: Task, kit: SimpleNamespace, seconds: float, ends_as: StopReason
) -> None:
    """A grading may run the tests twice, each time in a sandbox that may take ``start_timeout`` to start."""
    clock = LoopClock()

    async def tests_run() -> None:
        await clock.put_forward(seconds)

    env = kit.MemoryEnvironment(on_grade=tests_run)
    bounds = EnvConfig(grade_timeout=1800, start_timeout=600)
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX, kit.SUBMIT]), bounds)
    assert trajectory.stop is ends_as, trajectory.error
    assert trajectory.resolved == (ends_as is StopReason.SUBMITTED)


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
async def test_what_no_other_episode_would_escape_is_raised(task: Task, kit: SimpleNamespace, error: Exception) -> None:
    async def breaks() -> None:
        raise error

    with pytest.raises(type(error)):
        await drive(kit.MemoryEnvironment(on_start=breaks), task, kit.ToldEngine([kit.FIX]))


@pytest.mark.parametrize("where", ["on_start", "on_call", "on_grade"])
@pytest.mark.parametrize(
    "error", [KeyError("status"), MemoryError(), RecursionError(), OSError(28, "no room"), EOFError()]
)
async def test_an_unexpected_error_is_a_failure_of_its_episode(
    task: Task, kit: SimpleNamespace, where: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks() -> None:
        raise error

    env = kit.MemoryEnvironment(**{where: breaks})
    trajectory = await drive(env, task, kit.ToldEngine([kit.FIX, kit.SUBMIT]))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    assert trajectory.stop.infrastructure
    first, *further = trajectory.error.splitlines()
    assert first.startswith(f"{type(error).__name__}: ")
    assert f"{__file__}:" in first, "the place is in the line that a report shows"
    assert "Traceback (most recent call last):" in further
    assert "    raise error" in further
    assert trajectory.error in caplog.text
    assert env.open == 0
    check_aligned(trajectory, kit.row_of)


async def test_a_turn_that_cannot_be_decoded_is_a_failure_of_its_episode(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    class Broken(ByteRenderer):
        def decode(self, tokens: Any) -> str:
            raise ValueError("no such token")

    rules = EpisodeRules(RolloutConfig(describe_tools=False))
    trajectory = await run_episode(env, task, kit.ToldEngine([kit.FIX]), Broken(), tool_format("hermes"), rules)
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
async def test_a_grade_that_no_record_can_hold_is_a_failure_of_its_episode(
    env: Any, task: Task, kit: SimpleNamespace, grade: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def graded(episode: Any) -> Any:
        return grade

    monkeypatch.setattr(kit.MemoryEpisode, "grade", graded)
    trajectory = await drive(env, task, kit.ToldEngine([kit.SUBMIT]))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    assert "grade" in trajectory.error.splitlines()[0] or "float" in trajectory.error.splitlines()[0]


async def test_a_grade_of_numpy_is_taken(
    env: Any, task: Task, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def graded(episode: Any) -> Grade:
        return Grade(np.float32(0.5), np.bool_(True), patch="half a pair: \ud800")

    monkeypatch.setattr(kit.MemoryEpisode, "grade", graded)
    trajectory = await drive(env, task, kit.ToldEngine([kit.SUBMIT]))
    assert (trajectory.stop, trajectory.reward, trajectory.resolved) == (StopReason.SUBMITTED, 0.5, True)
    decode_trajectory(encode_trajectory(trajectory), "here")


@pytest.mark.parametrize("result", [None, "text", ToolResult(None), ToolResult(3, submitted=True)])
async def test_a_tool_that_returns_no_text_is_a_failure_of_its_episode(
    env: Any, task: Task, kit: SimpleNamespace, result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(tools: Any, call: Any) -> Any:
        return result

    monkeypatch.setattr(kit.MemoryTools, "call", call)
    trajectory = await drive(env, task, kit.ToldEngine([kit.SUBMIT]))
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert trajectory.error.startswith("TypeError: a tool returned a ")


async def test_half_a_surrogate_pair_is_shown_as_a_question_mark(env: Any, task: Task, kit: SimpleNamespace) -> None:
    async def call(tools: Any, call: Any) -> ToolResult:
        return ToolResult("a file named \udcff", submitted=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kit.MemoryTools, "call", call)
        trajectory = await drive(env, task, kit.ToldEngine([kit.SUBMIT]))
    assert (trajectory.stop, trajectory.turns[0].observation) == (StopReason.SUBMITTED, "a file named ?")


async def test_missing_routes_are_raised(env: Any, task: Task, kit: SimpleNamespace) -> None:
    with pytest.raises(RoutesMissingError, match="absent"):
        await drive(env, task, kit.ToldEngine([RoutesMissingError("routed_experts absent")]))
    assert env.open == 0


async def test_cancellation_closes_the_sandbox_and_propagates(task: Task, kit: SimpleNamespace) -> None:
    reached = asyncio.Event()

    async def stall() -> None:
        reached.set()
        await asyncio.Event().wait()

    env = kit.MemoryEnvironment(on_call=stall)
    running = asyncio.create_task(drive(env, task, kit.ToldEngine([kit.FIX])))
    await reached.wait()
    assert env.open == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert env.open == 0


def test_any_episode_is_aligned(kit: SimpleNamespace) -> None:
    texts = st.text(max_size=30)
    turn = st.one_of(
        texts,
        texts.map(lambda text: kit.call("echo", text=text)),
        st.just(kit.FIX),
        st.just(kit.SUBMIT),
        st.lists(st.integers(0, 256), min_size=1, max_size=40),
    )

    @settings(max_examples=150, deadline=None)
    @given(
        turns=st.lists(turn, min_size=1, max_size=6),
        max_tokens=st.integers(1, 400),
        max_new_tokens=st.integers(1, 120),
        max_turns=st.integers(1, 8),
    )
    def holds(turns: list[Any], max_tokens: int, max_new_tokens: int, max_turns: int) -> None:
        env = kit.MemoryEnvironment()
        limits = {"max_tokens": max_tokens, "max_new_tokens": max_new_tokens, "max_turns": max_turns}
        trajectory = asyncio.run(drive(env, env.tasks("train")[0], kit.ToldEngine(turns), **limits))
        check_aligned(trajectory, kit.row_of)
        assert not trajectory.stop.infrastructure
        assert len(trajectory.tokens) <= max(max_tokens, 4)  # the opening alone is 4
        assert len(trajectory.turns) <= max_turns
        assert env.open == 0

    holds()


@dataclass
class Talk:
    """An episode in words: it says how many turns it heard, and ends at ``bye``."""

    heard: list[str] = field(default_factory=list)
    tools: FunctionToolSet = field(default_factory=lambda: FunctionToolSet(()))
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": "Talk."},)

    async def respond(self, text: str) -> ToolResult:
        self.heard.append(text)
        return ToolResult(str(len(self.heard)), submitted=text == "bye")

    async def grade(self) -> Grade:
        return Grade(float(len(self.heard)), True)


async def test_an_episode_in_words_hears_whole_turns_and_calls_nothing(
    env: Any, task: Task, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk()
    monkeypatch.setattr(env, "start", lambda task: nullcontext(talk), raising=False)
    turns = [kit.FIX, "<tool_call>{", "more", "bye"]
    trajectory = await drive(env, task, kit.ToldEngine(turns), describe_tools=True, max_parse_failures=1)
    assert talk.heard == turns
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUBMITTED, 4.0)
    assert [(turn.tool, turn.parse_failure, turn.observation) for turn in trajectory.turns] == [
        (None, None, str(count)) for count in (1, 2, 3, 4)
    ]
    assert trajectory.messages[0] == talk.messages[0], "there are no tools to describe"
    check_aligned(trajectory, kit.row_of)
