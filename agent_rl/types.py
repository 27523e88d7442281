"""Data types shared by engine, rollout and trainer. All frozen; no torch.

Example: a trajectory of two turns (``p`` prompt, ``a`` sampled, ``o`` observation tokens)::

    tokens     p p p a a a o o a a
    loss_mask  0 0 0 1 1 1 0 0 1 1
    logprobs   0 0 0 x x x 0 0 x x     log-prob of token i given tokens[:i], as sampled
    routing    r r r r r r r r r -     row i: experts used with token i as input; the last row is absent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.model_calls import ModelCall
from r3.kept_tokens import KeptTokens
from r3.routing import Routing


class StopReason(StrEnum):
    """Why an episode ended."""

    SUBMITTED = "submitted"  # the agent called submit
    MAX_TURNS = "max_turns"  # max_turns turns were taken without a submit
    CONTEXT_FULL = "context_full"  # the next turn or observation would exceed max_tokens
    TIME_LIMIT = "time_limit"  # the episode's wall-clock limit passed
    PARSE_FAILURES = "parse_failures"  # too many turns in a row held no well-formed tool call
    PROGRAM_FAILED = "program_failed"  # the agent program failed after it had received a response
    SANDBOX_FAILURE = "sandbox_failure"  # infrastructure: the sandbox or the grading failed
    NODE_LOST = "node_lost"  # infrastructure: the sandbox's node is lost
    HARNESS_FAILURE = "harness_failure"  # infrastructure: the agent program ended before it received a response
    ENVIRONMENT_ERROR = "environment_error"  # infrastructure: an unexpected exception; the record has its traceback
    ENGINE_FAILURE = "engine_failure"  # infrastructure: the engine failed past its retry budget
    UNDECIDABLE = "undecidable"  # the task itself cannot be graded
    CANCELLED = "cancelled"  # stopped by Ctrl-C or by a failure elsewhere in the run

    @property
    def infrastructure(self) -> bool:
        """Whether infrastructure or the task caused the end. Such a trajectory has no reward."""
        return self in _WITHOUT_REWARD


_WITHOUT_REWARD = frozenset(
    {
        StopReason.SANDBOX_FAILURE,
        StopReason.NODE_LOST,
        StopReason.HARNESS_FAILURE,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.ENGINE_FAILURE,
        StopReason.UNDECIDABLE,
        StopReason.CANCELLED,
    }
)


class TrainingStatus(StrEnum):
    """How training used a trajectory."""

    TRAINED = "trained"
    DISCARDED = "discarded"  # with its whole group, by dynamic sampling
    MASKED = "masked"  # by train.filter, because of its stop reason
    DROPPED = "dropped"  # because routes are missing
    UNIFORM = "uniform"  # all rewards of its group (or batch) are equal
    EMPTY = "empty"  # no token was sampled


@dataclass(frozen=True, slots=True)
class TrainingDecision:
    """A trajectory's training status and advantage. None: the trajectory was not considered for training."""

    training_status: TrainingStatus | None
    advantage: float | None = None


class FinishReason(StrEnum):
    """Why one completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. ``temperature`` 0 is greedy. ``top_k`` None: all tokens. ``keep_mask``: return the kept
    tokens, and log-probs normalized over them. ``stop_token_ids`` end a turn and stay in the output. ``grammar``: EBNF
    text that the reply follows, of which the last ``grammar_prefix`` tokens of the prompt are the beginning."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    keep_mask: bool = False
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    grammar_prefix: int = 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The sampled tokens in ``[start, stop)`` come from weights ``version``."""

    start: int
    stop: int
    version: str


def append_version(spans: list[VersionSpan], span: VersionSpan, further: int = 0) -> None:
    """Append ``span``, moved by ``further`` tokens. It extends the last span if the version is the same."""
    start = spans.pop().start if spans and spans[-1].version == span.version else span.start + further
    spans.append(VersionSpan(start, span.stop + further, span.version))


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The engine's response to one request.

    ``tokens`` and ``logprobs``: the sampled tokens and each one's log-prob, ``[completion]``.
    ``routing``: rows ``[routes_from, prompt + completion - 1)`` of the whole sequence, or None if no routes were
    requested or received. With ``finish`` ABORT they are the tokens before the abort; without tokens ``routing`` is
    None. ``weight_version`` sampled the last token. ``earlier``: spans (counted from 0) that older versions sampled.
    ``kept``: the kept tokens of each sampled token; None: drawn from the whole vocabulary.
    ``retractions``: how often the engine requeued the request and recomputed its tokens. ``cut``: a weight update
    aborted the request. This can happen several times in one turn. ``usage``: as :attr:`Turn.usage`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    weight_version: str
    engine: str
    routing: Routing | None = None
    kept: KeptTokens | None = None
    earlier: tuple[VersionSpan, ...] = ()
    retractions: int = 0
    interrupted: bool = False
    cached_tokens: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0
    usage: Mapping[str, int] | None = None

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The weight versions of all tokens, counted from 0; empty if no token was sampled."""
        first = self.earlier[-1].stop if self.earlier else 0
        last = VersionSpan(first, len(self.tokens), self.weight_version)
        return (*self.earlier, last) if first < len(self.tokens) else self.earlier

    def stopped_after(self, count: int) -> Completion:
        """The completion as if sampling had stopped after its first ``count`` tokens."""
        routing = self.routing and self.routing.head(self.routing.tokens - len(self.tokens) + count)
        spans = [replace(span, stop=min(span.stop, count)) for span in self.versions if span.start < count]
        *earlier, last = spans or [VersionSpan(0, 0, self.weight_version)]
        return replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            finish=FinishReason.STOP,
            weight_version=last.version,
            routing=routing,
            kept=self.kept and self.kept.take(np.arange(count)),
            earlier=tuple(earlier),
        )


@dataclass(frozen=True, slots=True)
class SampledCall:
    """The tool call that a turn made: the tool's ``name``, and the text of the ``turn``."""

    name: str
    turn: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: sampled text, tool call, observation, and times in seconds.

    ``retractions``: how often the engine requeued the turn's requests. ``began``: start of the turn, in seconds since
    the start of the episode. ``thinking_tokens``, ``thinking_chars``: length of the thoughts at the start of the
    turn's tokens and of ``text``, with the marker that closes them. ``inserted_tokens``: tokens of the turn that were
    not sampled, because the loop closed its thoughts (``rollout.max_thinking_tokens``); they end the thoughts.
    ``left_out``: the rule (``rollout.harness.train_if``) that leaves the turn out of training, "" if none does.
    ``usage``: tokens as a chat endpoint counts them, by the fields of :class:`agent_rl.evaluation.usage.Usage`; empty
    if nobody counted the model's tokens, None if the turn's own counts are the model's tokens. ``summary``: the turn is
    the summary at the end of its branch (``rollout.compaction``). ``branch``: number of its branch; 0 for an agent
    program.
    """

    text: str
    tool: str | None
    arguments: Mapping[str, Any]
    parse_failure: str | None
    observation: str
    prompt_tokens: int
    completion_tokens: int
    observation_tokens: int
    cached_tokens: int
    weight_version: str
    generate_seconds: float
    tool_seconds: float
    retractions: int = 0
    began: float = 0.0
    thinking_tokens: int = 0
    thinking_chars: int = 0
    usage: Mapping[str, int] | None = None
    inserted_tokens: int = 0
    left_out: str = ""
    summary: bool = False
    branch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """A trajectory's log-probs from ``n`` new evaluations by the engine.

    ``values``: float32 ``[n, sampled tokens]``. ``seconds``: total time of all evaluations.
    """

    values: NDArray[np.float32]
    seconds: float = 0.0

    @property
    def mean(self) -> NDArray[np.float32]:
        """``[sampled tokens]``: the mean of the log-probs (not the log of the mean probability)."""
        return self.values.mean(axis=0, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RouteAudit:
    """A trajectory's routes compared with those of a second request.

    Counts expert sets, one per token and layer: sets from the prefix cache, sets computed by a prefill, and how many of
    each differ from the trajectory's sets.
    """

    cached: int
    cached_differing: int
    prefilled: int
    prefilled_differing: int


class BranchCause(StrEnum):
    """Why a conversation started a new branch."""

    START = "start"  # the first branch
    TOOLS = "tools"  # the tools changed
    REWRITE = "rewrite"  # earlier messages were changed, dropped or compacted; or a sub-agent began
    PARALLEL = "parallel"  # two requests ran concurrently
    RETRY = "retry"  # the same request was repeated after its response
    COMPACTION = "compaction"  # the built-in loop had the conversation summarized (rollout.compaction)
    SUBAGENT = "subagent"  # a turn called the tool task (rollout.subagents)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One token sequence of a trajectory: a path through an agent program's conversation tree, the part of an episode
    between two compactions, or the conversation of a sub-agent.

    Arrays as in :class:`Trajectory`. ``loss_mask`` is True for sampled tokens that are trained in this branch. A token
    that several branches share is trained in the first one and is context in the others. ``kept``: a row per trained
    token, or None. ``parent``: number of the earlier branch that shares the first ``shared`` tokens (None and 0 for a
    branch without parent). ``messages``: those of the branch; of an agent program's branches only the first has them.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routing: Routing | None
    versions: tuple[VersionSpan, ...]
    parent: int | None = None
    shared: int = 0
    cause: BranchCause = BranchCause.START
    kept: KeptTokens | None = None
    messages: tuple[Mapping[str, str], ...] = ()

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """The distinct weight versions of the sampled tokens, in order of first use."""
        return tuple(dict.fromkeys(span.version for span in self.versions))

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens trained in this branch."""
        return int(self.loss_mask.sum())

    @property
    def routes_needed(self) -> int:
        """Rows of routes that the trainer replays: one per token except the last; 0 if no token was sampled."""
        return len(self.tokens) - 1 if self.loss_mask.any() else 0

    @property
    def routes_missing(self) -> int:
        """Number of these rows that the engine did not send."""
        present = 0 if self.routing is None else int(self.routing.present[:-1].sum())
        return self.routes_needed - present


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """A teacher's most likely tokens at each of n sampled tokens: ``ids`` int32 ``[n, k]``, ``logprobs`` float32 ``[n,
    k]``, from the most likely one on."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def join(cls, parts: Sequence[TopTokens]) -> TopTokens:
        """The rows of all parts."""
        return cls(np.concatenate([each.ids for each in parts]), np.concatenate([each.logprobs for each in parts]))

    def split(self, counts: Sequence[int]) -> list[TopTokens]:
        """The rows of consecutive parts with these numbers of rows."""
        ends = np.cumsum(counts)[:-1]
        return [TopTokens(*part) for part in zip(np.split(self.ids, ends), np.split(self.logprobs, ends), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A finished episode.

    ``tokens`` int32 ``[S]``; ``loss_mask`` bool ``[S]``, True for sampled tokens; ``logprobs`` float32 ``[S]``, 0 for
    other tokens; ``routing`` with S rows (the last is absent) or None; ``kept`` with a row per sampled token, or None.
    They and ``messages`` belong to the first branch; ``further`` holds the other branches. ``reward`` is None iff
    ``stop.infrastructure``. ``versions``: weight versions of the sampled tokens, in order; a span may include
    observation tokens. ``teacher_logprobs`` float32 ``[sampled tokens]`` of all branches: those of a teacher;
    ``teacher_top``: its most likely tokens there.
    ``error``: reason of an infrastructure failure in the first line; for ``environment_error`` a traceback follows.
    ``tests``, ``test_log``: results and log of the hidden tests. A run's records keep only the end of the log.
    ``began``: Unix
    time at which the episode got its concurrency slot, after waiting ``queue_seconds`` (0: not recorded).
    ``start_seconds``: time to start the task. ``grade_began``: start of grading, in seconds since ``began``.
    ``recovered``: an earlier start of the run sampled it, so its times are not of this process. ``replayed_turns``:
    turns reused after the loss of the sandbox or the run. ``harness``: counters of the agent program: ``rewrites``,
    ``retries``, ``echo_differs``. ``parts``, ``metrics``, ``turn_rewards``: of the grade (:class:`envs.Grade`).
    ``model_calls``: the requests to judges and simulated users.
    """

    task_id: str
    env: str
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routing: Routing | None
    stop: StopReason
    reward: float | None
    resolved: bool
    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, str], ...]
    versions: tuple[VersionSpan, ...]
    patch: str = ""
    error: str = ""
    suspected_hack: tuple[str, ...] = ()
    seconds: float = 0.0
    grade_seconds: float = 0.0
    mutant_seconds: float = 0.0
    began: float = 0.0
    queue_seconds: float = 0.0
    start_seconds: float = 0.0
    grade_began: float = 0.0
    tests: Mapping[str, str] = field(default_factory=dict)
    test_log: str = ""
    rescored: Rescored | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    teacher_top: TopTokens | None = None
    audit: RouteAudit | None = None
    recovered: bool = False
    replayed_turns: int = 0
    further: tuple[Branch, ...] = ()
    harness: Mapping[str, int] = field(default_factory=dict)
    kept: KeptTokens | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    model_calls: tuple[ModelCall, ...] = ()

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, at least one."""
        arrays = self.tokens, self.loss_mask, self.logprobs, self.routing
        first = Branch(*arrays, self.versions, kept=self.kept, messages=self.messages)
        return first, *self.further

    @property
    def total_tokens(self) -> int:
        """Tokens of all branches. Shared tokens count in every branch."""
        return len(self.tokens) + sum(len(branch.tokens) for branch in self.further)

    @property
    def sampled_tokens(self) -> int:
        """Trained tokens of all branches."""
        return sum(branch.sampled_tokens for branch in self.branches)

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """The distinct weight versions of the sampled tokens, in order of first use."""
        return tuple(dict.fromkeys(version for branch in self.branches for version in branch.weight_versions))

    @property
    def routes_needed(self) -> int:
        """Rows of routes that the trainer replays, over all branches."""
        return sum(branch.routes_needed for branch in self.branches)

    @property
    def routes_missing(self) -> int:
        """Number of these rows that the engine did not send."""
        return sum(branch.routes_missing for branch in self.branches)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The n trajectories of one task. All have a reward; infrastructure failures were retried or dropped."""

    task_id: str
    trajectories: tuple[Trajectory, ...]
    infrastructure_failures: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A training sample: one branch of a trajectory with the trajectory's advantage (a scalar for all sampled tokens).

    ``advantages`` float32 ``[S]``: an advantage for each token instead; None: ``advantage`` for all. ``observed`` bool
    ``[S]``: the observation tokens to predict; None: none.
    ``logprobs`` float32 ``[S]``: log-probs as sampled. ``old_logprobs`` float32 ``[S]``: denominator of the importance
    ratio; None takes the sampled ones or the trainer's own. Both are 0 for tokens that were not sampled.
    ``trajectory``: samples with the same value are branches of one trajectory; they count as one sequence and share a
    mini step; None: no other branch. ``lag`` int32 ``[S]``: age of a sampled token's weights in updates before this
    step; None: the same for all tokens. ``kept``: as in :class:`Branch`. ``teacher_logprobs`` float32 ``[S]``: those of
    a teacher, 0 where not sampled. ``teacher_top``: its most likely tokens, a row per sampled token.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantage: float
    routing: Routing | None
    weight: float = 1.0
    old_logprobs: NDArray[np.float32] | None = None
    trajectory: int | None = None
    lag: NDArray[np.int32] | None = None
    kept: KeptTokens | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    teacher_top: TopTokens | None = None
    advantages: NDArray[np.float32] | None = None
    observed: NDArray[np.bool_] | None = None


def drawn_mask(sequence: Branch | Sample) -> NDArray[np.bool_]:
    """``[S]``: the tokens that a loss counts: sampled, not the first of the sequence, and drawn from two kept tokens or
    more. A single kept token has log-prob 0 under all weights, so ratio 1 and no gradient. Raises KeptTokensError."""
    mask = np.array(sequence.loss_mask, dtype=bool)
    if sequence.kept is not None:
        mask &= sequence.kept.spread(mask).counts != 1
    mask[:1] = False
    return mask


class TokenFlag(IntFlag):
    """How an update treated a sampled token."""

    CLIPPED = 1  # the objective's clip removed its gradient
    REWEIGHTED = 2  # the correction changed its weight
    MASKED = 4  # the correction masked it


@dataclass(frozen=True, slots=True, eq=False)
class TokenDetail:
    """Details of one sample's ``S`` tokens, ``n`` of them sampled, in ``layers`` MoE layers.

    ``gap`` and ``gap_without_replay`` float32 ``[n]``: trainer log-prob minus engine log-prob, with the configured
    replay and without replay. ``entropy`` float16 ``[n]``, ``flags`` uint8 ``[n]`` (:class:`TokenFlag`). ``differs``
    and ``differs_without_replay`` uint8 ``[S, ceil(layers / 8)]``: one bit per MoE layer, set if the experts for that
    input token differ from the rollout's. None: not measured.
    """

    gap: NDArray[np.float32]
    gap_without_replay: NDArray[np.float32] | None
    entropy: NDArray[np.float16] | None
    flags: NDArray[np.uint8]
    layers: int
    differs: NDArray[np.uint8] | None
    differs_without_replay: NDArray[np.uint8] | None


TokenIds = Sequence[int]
