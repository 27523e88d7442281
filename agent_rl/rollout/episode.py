"""One episode: sample a turn, run its tool call, append what came back; until an ending, which is then graded.

A turn of a :class:`envs.Dialogue` is heard by the episode as it stands, and no call is looked for.

Every ending but an infrastructure failure is graded on whatever the agent left behind, submitted or not, as R2E-Gym
does. An exception becomes a trajectory without a reward, also one that nobody expected (:func:`ending_of`). Only errors
that every other episode would meet too are raised and stop the run.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

from agent_rl.config import EnvConfig, R3Config, RolloutConfig, RunConfig
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.types import Engine
from agent_rl.errors import AgentRlError, EngineAborted, EngineError, HarnessError, RoutesMissingError
from agent_rl.rollout.initial_prompt import Renderer, open_conversation
from agent_rl.rollout.route_audit import Auditor
from agent_rl.rollout.transcript import Transcript
from agent_rl.rollout.turn_log import Answered, LoggedTurn, ReplayDiffers, TurnLog
from agent_rl.types import Completion, FinishReason, SamplingParams, StopReason, Trajectory, Turn
from envs import (
    Dialogue,
    Environment,
    Episode,
    Grade,
    GradingError,
    Task,
    TaskRecordError,
    UndecidableError,
    find_scaffold,
)
from sandbox import (
    ImageMissingError,
    SandboxError,
    SandboxHostLostError,
    SandboxUnavailableError,
    bounded,
    printable,
)
from sandbox.timeouts import PausableTimeout
from tools import ParseFailure, ToolCallFormat, ToolDefinitionError, ToolResult, ToolSet

Answerer = Callable[[str], Awaitable[ToolResult] | ParseFailure]
"""Begins to answer a turn, or says why it holds no call. An episode has one, since ``isinstance`` of a protocol takes
6 µs."""

_log = logging.getLogger(__name__)

_LONGEST_LINE, _MOST_FRAMES = 300, 20

MAX_ABORTS = 3
"""How often a turn is asked on after the engine aborted it of itself."""


_STOPS_THE_RUN = (
    RoutesMissingError,
    ImageMissingError,
    SandboxUnavailableError,
    TaskRecordError,
    ToolDefinitionError,
)
_ENDINGS: Sequence[tuple[type[Exception], StopReason | None]] = (
    *((kind, None) for kind in _STOPS_THE_RUN),
    (EngineError, StopReason.ENGINE_FAILURE),
    (HarnessError, StopReason.HARNESS_FAILURE),
    (AgentRlError, None),  # of the run: a user's mistake, its disk, its weights, its guard
    (UndecidableError, StopReason.UNDECIDABLE),
    (SandboxHostLostError, StopReason.HOST_LOST),
    (SandboxError, StopReason.SANDBOX_FAILURE),
    (GradingError, StopReason.SANDBOX_FAILURE),
    (Exception, StopReason.ENVIRONMENT_ERROR),
)
"""What an exception makes of an episode, the first kind that fits. None: it is raised and stops the run."""


def ending_of(error: Exception) -> StopReason | None:
    """How ``error`` ends an episode; None where it is no matter of one episode and stops the run."""
    return next(stop for kind, stop in _ENDINGS if isinstance(error, kind))


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
    gate: GenerationGate | None = None,
    log: TurnLog | None = None,
) -> Trajectory:
    """Drive ``task`` to an ending and grade it; ``audit`` then looks at its routes, or not. While ``gate``, that of
    the engine, is closed, ``rollout.time_limit`` does not run. With ``log`` it goes on from the turns kept there, or
    starts over where the tools answer otherwise than they did.

    A failure of the sandbox, the grading, the engine or the environment's code is returned as a trajectory whose
    ``stop.infrastructure`` is True and whose reward is None. Raises only what :func:`ending_of` says stops the run;
    being cancelled closes the sandbox first.
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
        gate: GenerationGate | None,
        log: TurnLog | None = None,
    ) -> None:
        self.env, self.task, self.engine, self.gate = env, task, engine, gate or GenerationGate()
        self.log, self.opening, self.answers, self.replayed = log, "", list[Completion](), 0
        self.renderer, self.fmt, self.rules, self.limits = renderer, fmt, rules, rules.rollout
        self.scaffold = find_scaffold(rules.env.scaffold)
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
        except Exception as error:
            ending = ending_of(error)
            if ending is None:
                raise
            failed = self._trajectory(ending, None, error)
            if ending is StopReason.ENVIRONMENT_ERROR:
                _log.warning("task %s: an episode ended by an unexpected error: %s", self.task.id, failed.error)
            return failed

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
        self.messages.append({"role": "assistant", "content": ""})
        self.turns.append(
            {
                "text": "",
                "tool": None,
                "arguments": {},
                "parse_failure": None,
                "observation": "",
                "prompt_tokens": prompt_tokens,
                "completion_tokens": 0,
                "observation_tokens": 0,
                "cached_tokens": cached_tokens,
                "weight_version": "",
                "generate_seconds": 0.0,
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
        self.turns[-1]["observation"] = text = _checked_text(result)
        return text, StopReason.SUBMITTED if result.submitted else None

    def _observe(self, text: str, sampled: Sequence[int]) -> StopReason | None:
        """Append the observation, or end the episode where it leaves no room to answer it."""
        stop_included = bool(sampled) and sampled[-1] in self.renderer.stop_token_ids
        text = self._remarked(text)
        tokens = self.renderer.observation(text, stop_included=stop_included)
        self.messages.append({"role": self.scaffold.observation_role or "tool", "content": text})
        self.turns[-1]["observation_tokens"] = len(tokens)
        if len(tokens) >= self.transcript.room:
            return StopReason.CONTEXT_FULL
        self.transcript.observed(tokens)
        return None

    def _remarked(self, text: str) -> str:
        return self.scaffold.with_remark(text, len(self.turns), self.limits.max_turns)

    async def _grade(self, episode: Episode) -> Grade:
        started = time.perf_counter()
        self.grade_began = round(started - self.started, 6)
        async with bounded(self.rules.env.grading_limit, "grading"):
            grade = await episode.grade()
        self.grade_seconds = _seconds_since(started)
        return _checked_grade(grade)

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
            error=_described(error, stop) if error else "",
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


def _checked_grade(grade: object) -> Grade:
    """``grade`` as records and the trainer take it. Raises TypeError or ValueError where an environment returned what
    they cannot take."""
    if not isinstance(grade, Grade):
        raise TypeError(f"grade returned a {type(grade).__name__}, not a Grade")
    reward = float(grade.reward)
    if not math.isfinite(reward):
        raise ValueError(f"grade returned the reward {reward}, which is not a finite number")
    texts = (grade.patch, grade.log, *grade.suspected_hack, *grade.tests.keys(), *grade.tests.values())
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("grade returned a Grade whose patch, log, tests or suspected_hack are not strings")
    return replace(grade, reward=reward, resolved=bool(grade.resolved))


def _checked_text(result: object) -> str:
    """What the agent reads of a tool's ``result``, in characters that can be encoded. Raises TypeError for what no tool
    may return."""
    if not isinstance(result, ToolResult) or not isinstance(result.text, str):
        raise TypeError(f"a tool returned a {type(result).__name__}, not a ToolResult with a text")
    return result.text.encode(errors="replace").decode()


def _described(error: Exception, stop: StopReason) -> str:
    """The error in one line; where nobody expected it, its place too, and its traceback in the lines below."""
    if stop is not StopReason.ENVIRONMENT_ERROR:
        return f"{type(error).__name__}: {error}"
    told = traceback.TracebackException.from_exception(error, limit=-_MOST_FRAMES)
    line = " ".join(f"{type(error).__name__}: {told}".split())[:_LONGEST_LINE]
    place = f" ({told.stack[-1].filename}:{told.stack[-1].lineno})" if told.stack else ""
    return printable(f"{line}{place}\n{''.join(told.format())}")


def _seconds_since(started: float) -> float:
    """By the clock of ``time.perf_counter``, in whole microseconds: further digits would only fill records."""
    return _microseconds(time.perf_counter() - started)


def _microseconds(seconds: float) -> float:
    """As ``round(seconds, 6)`` does, in a third of its time."""
    return round(seconds * 1e6) / 1e6
