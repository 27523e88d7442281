"""One episode: sample a turn, run its tool call, append what came back; until an ending, which is then graded.

A turn of a :class:`envs.Dialogue` is heard by the episode as it stands, and no call is looked for.

Every ending but an infrastructure failure is graded on whatever the agent left behind, submitted or not, as R2E-Gym
does. Infrastructure failures become a trajectory without a reward; errors that no other episode would escape (missing
routes, a missing image, no usable sandbox backend, a broken task record) are raised and stop the run.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

from agent_rl.config import EnvConfig, R3Config, RolloutConfig, RunConfig
from agent_rl.engine.gate import TurnGate
from agent_rl.engine.types import Engine
from agent_rl.errors import EngineAborted, EngineError, HarnessError, RoutesMissingError
from agent_rl.rollout.audit import Auditor
from agent_rl.rollout.opening import Renderer, open_conversation
from agent_rl.rollout.transcript import Transcript
from agent_rl.rollout.turn_log import Answered, LoggedTurn, ReplayDiffers, TurnLog
from agent_rl.types import Completion, FinishReason, SamplingParams, StopReason, Trajectory, Turn
from envs import Dialogue, Environment, Episode, Grade, GradingError, Task, UndecidableError, find_interface
from sandbox import ImageMissingError, SandboxError, SandboxHostLostError, SandboxUnavailableError, bounded
from sandbox.bounds import PausableTimeout
from tools import ParseFailure, ToolCallFormat, ToolResult, ToolSet

Answerer = Callable[[str], Awaitable[ToolResult] | ParseFailure]
"""Begins to answer a turn, or says why it holds no call. An episode has one, since ``isinstance`` of a protocol takes
6 µs."""

MAX_ABORTS = 3
"""How often a turn is asked on after the engine aborted it of itself."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """What an episode is held to: the config's sections. ``routes`` None asks the engine for none.

    ``env`` bounds what ``rollout.time_limit`` does not cover, since starting and grading are the infrastructure's work:
    passing its bounds is an infrastructure failure, not an ending of the policy's.
    """

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    routes: R3Config | None = field(default_factory=R3Config)

    @classmethod
    def of(cls, config: RunConfig) -> EpisodeRules:
        """The rules of a training rollout under ``config``."""
        return cls(config.rollout, config.env, config.r3 if config.wants_routes else None)

    def for_evaluation(self, *, greedy: bool) -> EpisodeRules:
        """The same without routes; ``greedy`` also sets the temperature to 0."""
        return replace(self.limited(temperature=0.0) if greedy else self, routes=None)

    def limited(self, **rollout: float | bool) -> EpisodeRules:
        """The same with other values of keys of ``rollout``."""
        return replace(self, rollout=self.rollout.model_copy(update=rollout))

    def sampling(self, room: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """How the next turn is sampled where ``room`` tokens are left to it."""
        return SamplingParams(
            temperature=self.rollout.temperature,
            top_p=self.rollout.top_p,
            max_new_tokens=min(self.rollout.max_new_tokens, room),
            stop_token_ids=stop_token_ids,
        )


async def run_episode(
    env: Environment,
    task: Task,
    engine: Engine,
    renderer: Renderer,
    fmt: ToolCallFormat,
    rules: EpisodeRules,
    audit: Auditor | None = None,
    gate: TurnGate | None = None,
    log: TurnLog | None = None,
) -> Trajectory:
    """Drive ``task`` to an ending and grade it; ``audit`` then looks at its routes, or not. While ``gate``, that of
    the engine, is closed, ``rollout.time_limit`` does not run. With ``log`` it goes on from the turns kept there, or
    starts over where the tools answer otherwise than they did.

    A sandbox, grading or engine failure is returned as a trajectory whose ``stop.infrastructure`` is True and whose
    reward is None. Raises RoutesMissingError, ImageMissingError, SandboxUnavailableError and TaskRecordError; being
    cancelled closes the sandbox first.
    """
    while True:
        try:
            return await EpisodeRun(env, task, engine, renderer, fmt, rules, gate, log).run(audit)
        except ReplayDiffers:
            assert log is not None, "only what was kept is taken again"
            await log.start_over()


class EpisodeRun:
    """The state of one running episode."""

    def __init__(
        self,
        env: Environment,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        fmt: ToolCallFormat,
        rules: EpisodeRules,
        gate: TurnGate | None,
        log: TurnLog | None = None,
    ) -> None:
        self.env, self.task, self.engine, self.gate = env, task, engine, gate or TurnGate()
        self.log, self.opening, self.answers, self.replayed = log, "", list[Completion](), 0
        self.renderer, self.fmt, self.rules, self.limits = renderer, fmt, rules, rules.rollout
        self.interface = find_interface(rules.env.interface)
        self.session = f"{task.id}-{uuid.uuid4().hex[:12]}"
        self.began, self.started = round(time.time(), 3), time.perf_counter()
        self.transcript = Transcript((), max_tokens=self.limits.max_tokens, routes=None)
        self.messages: list[Mapping[str, str]] = []
        self.turns: list[dict[str, Any]] = []  # the fields of Turn: frozen at the end, since a turn may be cut short
        self.parse_failures_in_a_row = 0
        self.start_seconds = self.grade_began = self.grade_seconds = 0.0

    async def run(self, audit: Auditor | None = None) -> Trajectory:
        """See :func:`run_episode`."""
        trajectory = await self._run()
        return trajectory if audit is None else await audit(trajectory, self.session)

    async def _run(self) -> Trajectory:
        try:
            async with self._started_episode() as episode:
                tools = episode.tools
                self._open(episode, tools)
                stop = await self._act(episode if isinstance(episode, Dialogue) else tools)
                return self._trajectory(stop, await self._grade(episode))
        except (RoutesMissingError, ImageMissingError, SandboxUnavailableError):
            raise
        except EngineError as error:
            return self._trajectory(StopReason.ENGINE_FAILURE, None, error)
        except HarnessError as error:
            return self._trajectory(StopReason.HARNESS_FAILURE, None, error)
        except UndecidableError as error:
            return self._trajectory(StopReason.UNDECIDABLE, None, error)
        except SandboxHostLostError as error:
            return self._trajectory(StopReason.HOST_LOST, None, error)
        except (SandboxError, GradingError) as error:
            return self._trajectory(StopReason.SANDBOX_FAILURE, None, error)

    @asynccontextmanager
    async def _started_episode(self) -> AsyncIterator[Episode]:
        async with AsyncExitStack() as stack:
            async with bounded(self.rules.env.start_timeout, "starting the task"):
                episode = await stack.enter_async_context(self.env.start(self.task))
            self.start_seconds = _seconds_since(self.started)
            yield episode

    def _open(self, episode: Episode, tools: ToolSet) -> None:
        *first, last = episode.messages
        self.messages, opening = open_conversation(
            self.renderer,
            self.fmt,
            [*first, {**last, "content": self._remarked(last["content"])}],
            tools.schemas(),
            describe_tools=self.limits.describe_tools,
        )
        self.transcript = Transcript(opening, max_tokens=self.limits.max_tokens, routes=self.rules.routes)
        self.opening = sha256(array("i", opening).tobytes()).hexdigest()[:16]

    async def _act(self, partner: ToolSet | Dialogue) -> StopReason:
        """Take the turns. ``partner`` is what they are given to: the tools, or the episode itself."""
        answerer = partner.hear if isinstance(partner, Dialogue) else partial(self._call, partner)
        kept = [] if self.log is None else await self.log.kept()
        async with bounded(self.limits.time_limit, "calling the tools again"):
            for logged in kept:
                if stop := await self._take_again(answerer, logged):
                    return stop
        limit = PausableTimeout(kept[-1].left if kept else self.limits.time_limit)
        try:
            async with limit:
                with self.gate.uncharged(limit):
                    return await self._take_turns(answerer, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            return StopReason.TIME_LIMIT

    async def _take_turns(self, answerer: Answerer, limit: PausableTimeout) -> StopReason:
        while len(self.turns) < self.limits.max_turns:
            stop = await self._turn(answerer, self.engine)
            if self.log is not None and self.answers:
                completions, self.answers = tuple(self.answers), []
                turn = Turn(**self.turns[-1])
                await self.log.keep(LoggedTurn(self.opening, completions, turn, limit.left))
            if stop:
                return stop
        return StopReason.MAX_TURNS

    async def _take_again(self, answerer: Answerer, logged: LoggedTurn) -> StopReason | None:
        """As :meth:`_turn`, with what was sampled before. Raises ReplayDiffers where anything else comes of it."""
        if self.opening != logged.opening:
            raise ReplayDiffers(f"{self.session} begins with another prompt than the first time")
        stop = await self._turn(answerer, Answered(logged.completions))
        self.answers.clear()
        if self.turns[-1]["observation"] != logged.turn.observation:
            raise ReplayDiffers(f"turn {self.replayed} of {self.session} was answered otherwise than the first time")
        self.turns[-1] = asdict(logged.turn)
        self.replayed += 1
        return stop

    async def _turn(self, answerer: Answerer, engine: Engine) -> StopReason | None:
        """Sample, call or speak, observe; the ending if there is one."""
        if self.transcript.room < 1:
            return StopReason.CONTEXT_FULL
        sampled = await self._sample(engine)
        answer = answerer(self.turns[-1]["text"])
        text, stop = self._refused(answer) if isinstance(answer, ParseFailure) else await self._answered(answer)
        return stop or self._observe(text, sampled)

    async def _sample(self, engine: Engine) -> Sequence[int]:
        """The turn's tokens. Where the request is aborted the turn goes on from what came: whenever it was cut for new
        weights, and a few times where the engine gave it up."""
        started, prompt_tokens = time.perf_counter(), len(self.transcript.tokens)
        left, sampled, retractions = min(self.limits.max_new_tokens, self.transcript.room), list[int](), 0
        aborts = 0
        while aborts <= MAX_ABORTS:
            completion = await engine.generate(
                self.transcript.tokens,
                self.rules.sampling(left, self.renderer.stop_token_ids),
                routes_from=self.transcript.routes_from,
                session=self.session,
            )
            self.transcript.sampled(completion)
            if self.log is not None:
                self.answers.append(completion)
            aborted = completion.finish is FinishReason.ABORT
            aborts += aborted and not completion.cut
            retractions += completion.retractions
            if completion.tokens or not aborted:
                if not sampled:
                    self._begin_turn(prompt_tokens, completion.cached_tokens, _microseconds(started - self.started))
                sampled += completion.tokens
                left -= len(completion.tokens)
                self._note_sampled(sampled, completion.weight_version, _seconds_since(started), retractions)
            if not aborted or left == 0:
                return sampled
        raise EngineAborted(
            f"engine {completion.engine} aborted a turn of {self.session} {aborts} times, {len(sampled)} tokens into it"
        )

    def _begin_turn(self, prompt_tokens: int, cached_tokens: int, began: float) -> None:
        self.messages.append({})
        self.turns.append(
            {
                "tool": None,
                "arguments": {},
                "parse_failure": None,
                "observation": "",
                "prompt_tokens": prompt_tokens,
                "observation_tokens": 0,
                "cached_tokens": cached_tokens,
                "tool_seconds": 0.0,
                "began": began,
            }
        )

    def _note_sampled(self, sampled: Sequence[int], weight_version: str, seconds: float, retractions: int) -> None:
        """Write the turn down as far as it has come."""
        text = self.renderer.decode(sampled)
        self.messages[-1] = {"role": "assistant", "content": text}
        self.turns[-1].update(
            text=text,
            completion_tokens=len(sampled),
            weight_version=weight_version,
            generate_seconds=seconds,
            retractions=retractions,
        )

    def _call(self, tools: ToolSet, text: str) -> Awaitable[ToolResult] | ParseFailure:
        parsed = self.fmt.parse(text)
        if isinstance(parsed, ParseFailure):
            return parsed
        self.parse_failures_in_a_row = 0
        self.turns[-1].update(tool=parsed.name, arguments=dict(parsed.arguments))
        return tools.call(parsed)

    def _refused(self, failure: ParseFailure) -> tuple[str, StopReason | None]:
        self.parse_failures_in_a_row += 1
        self.turns[-1].update(parse_failure=failure.reason, observation=failure.reason)
        most = self.limits.max_parse_failures
        ended = most is not None and self.parse_failures_in_a_row >= most
        return failure.reason, StopReason.PARSE_FAILURES if ended else None

    async def _answered(self, answering: Awaitable[ToolResult]) -> tuple[str, StopReason | None]:
        started = time.perf_counter()
        try:
            result = await answering
        finally:
            self.turns[-1]["tool_seconds"] = _seconds_since(started)
        self.turns[-1]["observation"] = result.text
        return result.text, StopReason.SUBMITTED if result.submitted else None

    def _observe(self, text: str, sampled: Sequence[int]) -> StopReason | None:
        """Append the observation, or end the episode where it leaves no room to answer it."""
        stop_included = bool(sampled) and sampled[-1] in self.renderer.stop_token_ids
        text = self._remarked(text)
        tokens = self.renderer.observation(text, stop_included=stop_included)
        self.messages.append({"role": self.interface.observation_role or "tool", "content": text})
        self.turns[-1]["observation_tokens"] = len(tokens)
        if len(tokens) >= self.transcript.room:
            return StopReason.CONTEXT_FULL
        self.transcript.observed(tokens)
        return None

    def _remarked(self, text: str) -> str:
        return self.interface.with_remark(text, len(self.turns), self.limits.max_turns)

    async def _grade(self, episode: Episode) -> Grade:
        started = time.perf_counter()
        self.grade_began = round(started - self.started, 6)
        async with bounded(self.rules.env.grading_limit, "grading"):
            grade = await episode.grade()
        self.grade_seconds = _seconds_since(started)
        return grade

    def _trajectory(self, stop: StopReason, grade: Grade | None, error: Exception | None = None) -> Trajectory:
        tokens, loss_mask, logprobs, routing = self.transcript.arrays()
        return Trajectory(
            task_id=self.task.id,
            env=self.task.env,
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            routing=routing,
            stop=stop,
            reward=grade.reward if grade else None,
            resolved=grade.resolved if grade else False,
            turns=tuple(Turn(**fields) for fields in self.turns),
            messages=tuple(self.messages),
            versions=self.transcript.versions,
            patch=grade.patch if grade else "",
            error=f"{type(error).__name__}: {error}" if error else "",
            suspected_hack=tuple(grade.suspected_hack) if grade else (),
            seconds=_seconds_since(self.started),
            grade_seconds=self.grade_seconds,
            began=self.began,
            replayed_turns=self.replayed,
            start_seconds=self.start_seconds,
            grade_began=self.grade_began,
            tests=grade.tests if grade else {},
            test_log=grade.log if grade else "",
        )


def _seconds_since(started: float) -> float:
    """By the clock of ``time.perf_counter``, in whole microseconds: further digits would only fill records."""
    return _microseconds(time.perf_counter() - started)


def _microseconds(seconds: float) -> float:
    """As ``round(seconds, 6)`` does, in a third of its time."""
    return round(seconds * 1e6) / 1e6
