"""Runs one episode: sample a turn, execute its tool call, append the observation, repeat; then grade the result.

A turn of a :class:`envs.Dialogue` goes to the episode as text; no tool call is parsed. Where an episode has tools and a
user, a turn without a call goes to the user. With ``rollout.compaction`` a conversation that grows too long goes on in
a new branch (:mod:`agent_rl.rollout.compaction`).

Every episode is graded on the state that the agent left, submitted or not, as in R2E-Gym, unless the infrastructure
failed. An exception, expected or not, becomes a trajectory without a reward (:func:`stop_reason_for`). Only errors that
would affect every episode are raised and stop the run.
"""

from __future__ import annotations

import logging
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
from agent_rl.render.prefix_check import Role
from agent_rl.rollout.compaction import SUMMARY, Compactions, Observation, OpenBranch, TurnStart
from agent_rl.rollout.episode_recovery import LoggedTurn, ReplayDiffers, ReplayEngine, TurnLog
from agent_rl.rollout.initial_prompt import Renderer, build_initial_prompt
from agent_rl.rollout.route_audit import Auditor
from agent_rl.rollout.subagents import SILENT, TASK, Delegation, Subagents
from agent_rl.rollout.thought_limits import TurnBudget, measure_thoughts
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import Completion, FinishReason, SampledCall, SamplingParams, StopReason, Trajectory, Turn
from envs import (
    Dialogue,
    Environment,
    Episode,
    Grade,
    GradingError,
    Task,
    TaskRecordError,
    UndecidableError,
    load_scaffold,
    target_of,
    user_of,
)
from envs.grades import checked_grade, weighted
from envs.model_calls import ModelCall, recorded_calls
from envs.sources import source_of
from sandbox import ImageMissingError, SandboxError, SandboxNodeLostError, SandboxUnavailableError, bounded, printable
from sandbox.timeouts import PausableTimeout, charged_to
from tools import ParseFailure, ToolCallFormat, ToolDefinitionError, ToolResult, ToolSet, parse_call, words_of
from tools.formats import parse_turn

TurnHandler = Callable[[str], Awaitable[ToolResult] | ParseFailure]
"""Starts to execute a turn, or returns why it holds no tool call. Resolved once per episode, because ``isinstance``
of a protocol takes 6 µs."""

_log = logging.getLogger(__name__)

_MAX_LINE_CHARS = 300
_MAX_FRAMES = 20

MAX_ABORTS = 3
"""How often a turn is requested again after the engine aborted it on its own."""


_STOPS_THE_RUN = (RoutesMissingError, ImageMissingError, SandboxUnavailableError, TaskRecordError, ToolDefinitionError)
_ENDINGS: Sequence[tuple[type[Exception], StopReason | None]] = (
    *((kind, None) for kind in _STOPS_THE_RUN),
    (EngineError, StopReason.ENGINE_FAILURE),
    (HarnessError, StopReason.HARNESS_FAILURE),
    (AgentRlError, None),  # errors of the run: config, disk, weights, guard
    (UndecidableError, StopReason.UNDECIDABLE),
    (SandboxNodeLostError, StopReason.NODE_LOST),
    (SandboxError, StopReason.SANDBOX_FAILURE),
    (GradingError, StopReason.SANDBOX_FAILURE),
    (Exception, StopReason.ENVIRONMENT_ERROR),
)
"""How an exception ends an episode; the first matching class decides. None: the exception stops the run."""


def stop_reason_for(error: Exception) -> StopReason | None:
    """How ``error`` ends an episode; None if the error affects every episode and stops the run."""
    return next(stop for kind, stop in _ENDINGS if isinstance(error, kind))


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """The config sections that bound an episode. ``routes`` None requests no routes. ``masks``: request the kept tokens
    where sampling is truncated.

    ``env`` limits the start of the task and the grading, which ``rollout.time_limit`` does not cover. Exceeding these
    limits is an infrastructure failure. ``reward_weights``: of the parts of the reward, by source.
    """

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    routes: R3Config | None = field(default_factory=R3Config)
    masks: bool = True
    reward_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig) -> EpisodeRules:
        """The rules of a training rollout under ``config``."""
        sources = config.environments
        longest = max(config.env.grade_timeout, *(source.grade_timeout or 0.0 for source in sources.values()))
        env = config.env.model_copy(update={"grade_timeout": longest})
        weights = {name: source.reward_weights for name, source in sources.items()}
        return cls(config.rollout, env, config.routes_config, reward_weights=weights)

    def weights_of(self, task_id: str) -> Mapping[str, float]:
        """The weights of the reward's parts for a task; empty if its reward is the environment's."""
        return self.reward_weights.get(source_of(task_id, tuple(self.reward_weights)), {})

    def for_evaluation(self, *, greedy: bool, temperature: float | None = None) -> EpisodeRules:
        """The same rules without routes and masks, at ``temperature`` where one is given; ``greedy`` sets it to 0."""
        chosen = 0.0 if greedy else temperature
        return replace(self if chosen is None else self.override(temperature=chosen), routes=None, masks=False)

    def override(self, **rollout: object) -> EpisodeRules:
        """The same rules with other values for keys of ``rollout``."""
        return replace(self, rollout=self.rollout.model_copy(update=rollout))

    def sampling(self, remaining_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Sampling parameters for the next turn if the episode may add ``remaining_tokens``."""
        return SamplingParams(
            temperature=self.rollout.temperature,
            top_p=self.rollout.top_p,
            top_k=self.rollout.top_k,
            min_p=self.rollout.min_p,
            keep_mask=self.masks and self.rollout.truncated,
            max_new_tokens=min(self.rollout.max_new_tokens, remaining_tokens),
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
    """Run ``task`` to its end and grade it. ``audit`` may then audit its routes. While ``gate`` (the engine's gate) is
    closed, ``rollout.time_limit`` does not elapse. With ``log`` the episode replays the logged turns first; it starts
    over if a tool returns another result than before.

    A failure of the sandbox, the grading, the engine or the environment's code is returned as a trajectory with
    ``stop.infrastructure`` True and ``reward`` None. Raises only errors for which :func:`stop_reason_for` is None.
    Cancellation closes the sandbox first.
    """
    while True:
        try:
            return await EpisodeRun(env, task, engine, renderer, fmt, rules, gate, log).run(audit)
        except ReplayDiffers:
            assert log is not None, "only logged turns are replayed"
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
        self.log, self.prompt_hash, self.completions, self.replayed = log, "", list[Completion](), 0
        self.renderer, self.fmt, self.rules, self.limits = renderer, fmt, rules, rules.rollout
        self.scaffold = load_scaffold(rules.env.scaffold)
        self.model_calls: list[ModelCall] = []
        self.user: Callable[[str], Awaitable[ToolResult]] | None = None
        self.session = f"{task.id}-{uuid.uuid4().hex[:12]}"
        self.began, self.started = round(time.time(), 3), time.perf_counter()
        self.task_messages: Sequence[Mapping[str, str]] = ()
        self.schemas: Sequence[Mapping[str, Any]] = ()
        self.branch = OpenBranch(Transcript((), max_tokens=self.limits.max_tokens, routes=None))
        self.branches = [self.branch]
        self.compactions, self.subagents = Compactions(self.limits), Subagents(self.limits.subagents)
        # The fields of Turn: frozen at the end, because a turn may be interrupted.
        self.turns: list[dict[str, Any]] = []
        self.parse_failures_in_a_row = 0
        self.start_seconds = self.grade_began = self.grade_seconds = 0.0

    @property
    def transcript(self) -> Transcript:
        """The tokens of the present branch."""
        return self.branch.transcript

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The messages of the present branch."""
        return self.branch.messages

    async def run(self, audit: Auditor | None = None) -> Trajectory:
        """See :func:`run_episode`."""
        with recorded_calls() as self.model_calls:
            trajectory = await self._run()
        return trajectory if audit is None else await audit(trajectory, self.session)

    async def _run(self) -> Trajectory:
        graded: Trajectory | None = None
        try:
            async with self._started_episode() as episode:
                target = target_of(episode)
                self._open(episode, target)
                stop = await self._act(target)
                graded = self._trajectory(stop, await self._grade(episode))
            return graded
        except Exception as error:
            ending = stop_reason_for(error)
            if ending is None:
                raise
            if graded is not None:  # a grade is final before the clean-up
                _log.warning("task %s: a graded episode could not be cleaned up: %r", self.task.id, error)
                return graded
            failed = self._trajectory(ending, None, error)
            if ending is StopReason.ENVIRONMENT_ERROR:
                _log.warning("task %s: an episode ended with an unexpected error: %s", self.task.id, failed.error)
            return failed

    @asynccontextmanager
    async def _started_episode(self) -> AsyncIterator[Episode | Dialogue]:
        async with AsyncExitStack() as stack:
            async with bounded(self.rules.env.start_timeout, "starting the task"):
                episode = await stack.enter_async_context(self.env.start(self.task))
            self.start_seconds = _seconds_since(self.started)
            yield episode

    def _open(self, episode: Episode | Dialogue, target: ToolSet | Dialogue) -> None:
        self.user = user_of(episode)
        self.task_messages = episode.messages
        if not isinstance(target, Dialogue):
            self.schemas = [*target.schemas(), *self.subagents.schemas]
        messages, prompt = self._initial_prompt(0)
        transcript = Transcript(prompt, max_tokens=self.limits.max_tokens, routes=self.rules.routes)
        self.branch = OpenBranch(transcript, messages)
        self.branches = [self.branch]
        self.prompt_hash = sha256(array("i", prompt).tobytes()).hexdigest()[:16]

    def _initial_prompt(self, turns: int, addition: str = "") -> tuple[list[Mapping[str, str]], list[int]]:
        """The messages of the task, with ``addition`` at their end, and their tokens, after ``turns`` turns."""
        *first, last = self.task_messages
        last = {**last, "content": self._with_remark(last["content"] + addition, turns)}
        describe = self.limits.describe_tools
        return build_initial_prompt(self.renderer, self.fmt, [*first, last], self.schemas, describe_tools=describe)

    async def _act(self, target: ToolSet | Dialogue) -> StopReason:
        """Run the turns. ``target`` executes them: the tools, or the episode itself."""
        handle = target.respond if isinstance(target, Dialogue) else partial(self._call, target)
        logged_turns = [] if self.log is None else await self.log.kept()
        async with bounded(self.limits.time_limit, "replaying the tool calls"):
            for logged in logged_turns:
                if stop := await self._replay_turn(handle, logged):
                    return stop
        limit = PausableTimeout(logged_turns[-1].seconds_left if logged_turns else self.limits.time_limit)
        try:
            async with limit:
                with self.gate.uncharged(limit), charged_to(limit):
                    return await self._run_turns(handle, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            return StopReason.TIME_LIMIT

    async def _run_turns(self, handle: TurnHandler, limit: PausableTimeout) -> StopReason:
        while len(self.turns) < self.limits.max_turns:
            stop = await self._turn(handle, self.engine)
            if self.log is not None and self.completions:
                completions, self.completions = tuple(self.completions), []
                turn = Turn(**self.turns[-1])
                await self.log.keep(LoggedTurn(self.prompt_hash, completions, turn, limit.left))
            if stop:
                return stop
        return StopReason.MAX_TURNS

    async def _replay_turn(self, handle: TurnHandler, logged: LoggedTurn) -> StopReason | None:
        """Run :meth:`_turn` with the logged completions. Raises ReplayDiffers if the result differs."""
        if self.prompt_hash != logged.prompt_hash:
            raise ReplayDiffers(f"{self.session}: the initial prompt differs from the logged one")
        stop = await self._turn(handle, ReplayEngine(logged.completions))
        self.completions.clear()
        if self.turns[-1]["observation"] != logged.turn.observation:
            raise ReplayDiffers(f"{self.session}: the observation of turn {self.replayed} differs from the logged one")
        self.turns[-1] = asdict(logged.turn)
        self.replayed += 1
        return stop

    async def _turn(self, handle: TurnHandler, engine: Engine) -> StopReason | None:
        """Sample a turn, execute it, append the observation; returns the stop reason if the episode ends. The turn
        after an observation that was held back is a summary."""
        if self.compactions.held_back is not None:
            return await self._compact(engine)
        if self.transcript.remaining < 1:
            return StopReason.CONTEXT_FULL
        tokens = await self._sample(engine)
        turn_stop = tokens[-1] if tokens and tokens[-1] in self.renderer.stop_token_ids else None
        outcome = handle(self.turns[-1]["text"])
        if isinstance(outcome, ParseFailure) and self.subagents.running:
            return self._end_subagent()
        text, stop = (
            self._record_parse_failure(outcome)
            if isinstance(outcome, ParseFailure)
            else await self._record_result(outcome)
        )
        if self.subagents.request is not None:
            return self._begin_subagent(turn_stop)
        stop = stop or self._observe(text, turn_stop, self.turns[-1])
        if self.subagents.running and (stop or self.subagents.is_over()):
            return self._end_subagent()
        return stop

    async def _sample(self, engine: Engine) -> Sequence[int]:
        """The turn's tokens. After an abort the turn continues from the tokens received so far: without limit if new
        weights interrupted it, at most :data:`MAX_ABORTS` times if the engine aborted it on its own."""
        started, prompt_tokens = time.perf_counter(), len(self.transcript.tokens)
        limits, tokens, began, retractions, aborts = self.limits, list[int](), False, 0, 0
        context = self.transcript.remaining
        budget = TurnBudget(self.renderer, limits.max_thinking_tokens, limits.max_new_tokens, context)
        while aborts <= MAX_ABORTS:
            if closing := budget.close_thoughts(tokens):
                self.transcript.observed(closing)
                tokens += closing
            completion = await engine.generate(
                self.transcript.tokens,
                self.rules.sampling(budget.request, self.renderer.stop_token_ids),
                routes_from=self.transcript.routes_from,
                session=self.session,
            )
            self.transcript.sampled(completion)
            if self.log is not None:
                self.completions.append(completion)
            aborted = completion.finish is FinishReason.ABORT
            aborts += aborted and not completion.interrupted
            retractions += completion.retractions
            if completion.tokens or not aborted:
                if not began:
                    self._begin_turn(prompt_tokens, completion, _microseconds(started - self.started))
                    began = True
                tokens += completion.tokens
                self._update_turn(tokens, budget, completion.weight_version, _seconds_since(started), retractions)
            if budget.ends(completion):
                return tokens
        raise EngineAborted(
            f"engine {completion.engine} aborted a turn of {self.session} {aborts} times after {len(tokens)} tokens"
        )

    def _begin_turn(self, prompt_tokens: int, completion: Completion, began: float) -> None:
        self.branch.turns.append(TurnStart(len(self.turns), prompt_tokens, len(self.messages)))
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
                "cached_tokens": completion.cached_tokens,
                "weight_version": "",
                "generate_seconds": 0.0,
                "tool_seconds": 0.0,
                "began": began,
                "usage": completion.usage,
                "branch": self.branches.index(self.branch),
            }
        )

    def _update_turn(
        self, tokens: Sequence[int], budget: TurnBudget, weight_version: str, seconds: float, retractions: int
    ) -> None:
        """Record the turn as far as it has been sampled."""
        text = self.renderer.decode(tokens)
        self.messages[-1] = {"role": "assistant", "content": text}
        self.turns[-1].update(
            text=text,
            completion_tokens=len(tokens) - budget.inserted,
            inserted_tokens=budget.inserted,
            weight_version=weight_version,
            generate_seconds=seconds,
            retractions=retractions,
            **measure_thoughts(self.renderer, tokens, text, budget.closed)._asdict(),
        )

    def _call(self, tools: ToolSet, text: str) -> Awaitable[ToolResult] | ParseFailure:
        parsed = parse_call(self.fmt, text, self.renderer.reasoning)
        if isinstance(parsed, ParseFailure):
            to_user = self.user is not None and not self.subagents.running and parsed.words
            words = words_of(self.fmt, text, self.renderer.reasoning) if to_user else ""
            if not words or self.user is None:
                return parsed
            self.parse_failures_in_a_row = 0
            return self.user(words)
        self.parse_failures_in_a_row = 0
        self.turns[-1].update(tool=parsed.name, arguments=dict(parsed.arguments))
        if self.subagents.takes(parsed.name):
            return self.subagents.accept(parsed.arguments.get("prompt"))
        return tools.call(parsed)

    def _begin_subagent(self, stop: int | None) -> StopReason | None:
        """Begin the sub-agent's branch. A request that fills its context is its result."""
        first, most = self.subagents.take_request(self.task_messages)
        messages, prompt = build_initial_prompt(
            self.renderer, self.fmt, first, self.schemas[:-1], describe_tools=self.limits.describe_tools
        )
        parent, number = self.branch, len(self.turns) - 1
        if len(prompt) >= most:
            self.turns[-1]["observation"] = text = f"{TASK}: the prompt does not fit into {most} tokens"
            return self._observe(text, stop, self.turns[-1])
        self._enter(parent.child(self.branches.index(parent), messages, prompt, most))
        self.subagents.running = Delegation(self.branch, parent, number, stop)
        return None

    def _end_subagent(self) -> StopReason | None:
        """The sub-agent's last words become the observation of the turn that called it."""
        words = parse_turn(self.fmt, self.turns[-1]["text"], self.schemas, self.renderer.reasoning).text or SILENT
        ended = self.subagents.end()
        self.branch, turn = ended.parent, self.turns[ended.turn]
        turn["observation"] = words
        return self._observe(words, ended.stop, turn)

    def _enter(self, branch: OpenBranch) -> None:
        self.branch = branch
        self.branches.append(branch)

    def _record_parse_failure(self, failure: ParseFailure) -> tuple[str, StopReason | None]:
        self.parse_failures_in_a_row += 1
        self.turns[-1].update(parse_failure=failure.reason, observation=failure.reason)
        limit = self.limits.max_parse_failures
        ended = limit is not None and self.parse_failures_in_a_row >= limit
        return failure.reason, StopReason.PARSE_FAILURES if ended else None

    async def _record_result(self, pending: Awaitable[ToolResult]) -> tuple[str, StopReason | None]:
        started = time.perf_counter()
        try:
            result = await pending
        finally:
            self.turns[-1]["tool_seconds"] = _seconds_since(started)
        self.turns[-1]["observation"] = text = _checked_text(result)
        return text, StopReason.SUBMITTED if result.submitted else None

    def _observe(self, text: str, stop: int | None, turn: dict[str, Any]) -> StopReason | None:
        """Append the observation after ``turn``, which ended with the token ``stop``; returns CONTEXT_FULL if no token
        is left to respond to it. An observation that makes a compaction necessary is held back."""
        call = SampledCall(turn["tool"], turn["text"]) if turn["tool"] else None
        by_user: Role | None = None if turn["tool"] or turn["parse_failure"] else "user"
        observation = Observation(text, by_user, stop, call)
        tokens, message = self._render(observation)
        turn["observation_tokens"] = len(tokens)
        in_all = len(self.transcript.tokens) + len(tokens)
        if not self.subagents.running and self.compactions.needed(in_all, len(self.turns)):
            self.compactions.held_back = observation
            return None
        self.messages.append(message)
        if len(tokens) >= self.transcript.remaining:
            return StopReason.CONTEXT_FULL
        self.transcript.observed(tokens)
        return None

    def _render(self, observation: Observation) -> tuple[list[int], Mapping[str, str]]:
        """The tokens and the message of an observation with the note for the next turn."""
        text = self._with_remark(observation.text, len(self.turns))
        tokens = self.renderer.observation(text, observation.role, stop=observation.stop, call=observation.call)
        return tokens, {"role": observation.role or self.scaffold.observation_role or "tool", "content": text}

    async def _compact(self, engine: Engine) -> StopReason | None:
        """Sample a summary as the last turn of the branch and begin the next branch; returns CONTEXT_FULL if the
        request or the next branch does not fit."""
        compaction, before, held_back = self.compactions.config, self.branch, self.compactions.take_held_back()
        kept = before.last_turns(compaction.keep_turns)
        request = self.renderer.observation(compaction.prompt, "user", stop=held_back.stop)
        if len(request) >= before.transcript.remaining:
            before.messages.append(self._render(held_back)[1])
            return StopReason.CONTEXT_FULL
        before.transcript.observed(request)
        before.messages.append({"role": "user", "content": compaction.prompt})
        start = len(before.transcript.tokens)
        await self._sample(engine)
        self.turns[-1]["summary"] = True
        self.compactions.done += 1
        if not compaction.train_summary:
            before.transcript.leave_out_from(start)
        summary = parse_turn(self.fmt, self.turns[-1]["text"], self.schemas, self.renderer.reasoning).text
        prompts = partial(self._initial_prompt, addition=f"\n\n{SUMMARY}\n{summary}")
        tokens, message = self._render(held_back)
        branch = self.compactions.next_branch(before, self.branches.index(before), prompts, kept, len(tokens))
        if branch is None:
            return StopReason.CONTEXT_FULL
        self._enter(branch)
        self.messages.append(message)
        self.transcript.observed(tokens)
        return None

    def _with_remark(self, text: str, turns: int) -> str:
        return self.scaffold.with_turn_note(text, turns, self.limits.max_turns)

    async def _grade(self, episode: Episode | Dialogue) -> Grade:
        started = time.perf_counter()
        self.grade_began = round(started - self.started, 6)
        async with bounded(self.rules.env.grading_timeout, "grading"):
            grade = await episode.grade()
        self.grade_seconds = _seconds_since(started)
        return weighted(checked_grade(grade, len(self.turns)), self.rules.weights_of(self.task.id))

    def _trajectory(self, stop: StopReason, grade: Grade | None, error: Exception | None = None) -> Trajectory:
        branches = [branch.closed() for branch in self.branches]
        while len(branches) > 1 and not branches[-1].sampled_tokens:
            branches.pop()
        first, *further = branches
        return Trajectory(
            task_id=self.task.id,
            env=self.task.env,
            tokens=first.tokens,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            routing=first.routing,
            kept=first.kept,
            stop=stop,
            reward=grade.reward if grade else None,
            resolved=grade.resolved if grade else False,
            turns=tuple(Turn(**fields) for fields in self.turns),
            messages=first.messages,
            versions=first.versions,
            further=tuple(further),
            patch=grade.patch if grade else "",
            error=_describe_error(error, stop) if error else "",
            suspected_hack=tuple(grade.suspected_hack) if grade else (),
            seconds=_seconds_since(self.started),
            grade_seconds=self.grade_seconds,
            mutant_seconds=grade.mutant_seconds if grade else 0.0,
            began=self.began,
            replayed_turns=self.replayed,
            start_seconds=self.start_seconds,
            grade_began=self.grade_began,
            tests=grade.tests if grade else {},
            test_log=grade.log if grade else "",
            parts=grade.parts if grade else {},
            metrics=grade.metrics if grade else {},
            turn_rewards=tuple(grade.turn_rewards) if grade else (),
            model_calls=tuple(self.model_calls),
        )


def _checked_text(result: object) -> str:
    """The text of a tool's ``result`` with encodable characters. Raises TypeError if it is not a ToolResult with
    text."""
    if not isinstance(result, ToolResult) or not isinstance(result.text, str):
        raise TypeError(f"a tool returned a {type(result).__name__}, not a ToolResult with a text")
    return result.text.encode(errors="replace").decode()


def _describe_error(error: Exception, stop: StopReason) -> str:
    """The error in one line. For an environment error also its location and, in further lines, its traceback."""
    if stop is not StopReason.ENVIRONMENT_ERROR:
        return f"{type(error).__name__}: {error}"
    trace = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    line = " ".join(f"{type(error).__name__}: {trace}".split())[:_MAX_LINE_CHARS]
    location = f" ({trace.stack[-1].filename}:{trace.stack[-1].lineno})" if trace.stack else ""
    return printable(f"{line}{location}\n{''.join(trace.format())}")


def _seconds_since(started: float) -> float:
    """Seconds since ``started`` (``time.perf_counter``), rounded to microseconds to keep records short."""
    return _microseconds(time.perf_counter() - started)


def _microseconds(seconds: float) -> float:
    """The same as ``round(seconds, 6)`` in a third of the time."""
    return round(seconds * 1e6) / 1e6
