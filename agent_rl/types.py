"""The data that flows from engine to trainer. All frozen; no torch.

A worked example, one trajectory of two turns (``p`` prompt, ``a`` sampled, ``o`` observation tokens)::

    tokens     p p p a a a o o a a
    loss_mask  0 0 0 1 1 1 0 0 1 1
    logprobs   0 0 0 x x x 0 0 x x     of token i given tokens[:i], as sampled
    routing    r r r r r r r r r -     row i: experts used when token i was the input; the last is absent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r3.routing import Routing


class StopReason(StrEnum):
    """Why an episode ended."""

    SUBMITTED = "submitted"  # the agent called submit
    MAX_TURNS = "max_turns"  # max_turns turns were taken without a submit
    CONTEXT_FULL = "context_full"  # the next turn or observation would pass max_tokens
    TIME_LIMIT = "time_limit"  # the episode's wall-clock limit passed
    PARSE_FAILURES = "parse_failures"  # too many turns in a row held no well-formed tool call
    PROGRAM_FAILED = "program_failed"  # the agent program failed after a reply had reached it, whoever's fault that is
    SANDBOX_FAILURE = "sandbox_failure"  # infrastructure: the sandbox or the grading broke
    HOST_LOST = "host_lost"  # infrastructure: the machine that its sandbox was on is gone
    HARNESS_FAILURE = "harness_failure"  # infrastructure: the agent program ended before a reply reached it
    ENVIRONMENT_ERROR = "environment_error"  # infrastructure: an unexpected exception; the record has its traceback
    ENGINE_FAILURE = "engine_failure"  # infrastructure: the engine failed past its retry budget
    UNDECIDABLE = "undecidable"  # the task's own parts keep it from ever being graded
    CANCELLED = "cancelled"  # stopped from outside: by Ctrl-C, or by another part of the run that failed

    @property
    def infrastructure(self) -> bool:
        """Whether the ending says nothing about the policy: such a trajectory has no reward."""
        return self in _WITHOUT_REWARD


_WITHOUT_REWARD = frozenset(
    {
        StopReason.SANDBOX_FAILURE,
        StopReason.HOST_LOST,
        StopReason.HARNESS_FAILURE,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.ENGINE_FAILURE,
        StopReason.UNDECIDABLE,
        StopReason.CANCELLED,
    }
)


class TrainingStatus(StrEnum):
    """What training made of a trajectory."""

    TRAINED = "trained"
    DISCARDED = "discarded"  # with its whole group, by dynamic sampling
    MASKED = "masked"  # for the way it ended
    DROPPED = "dropped"  # for want of routes
    UNIFORM = "uniform"  # all rewards that it is compared with are equal
    EMPTY = "empty"  # nothing was sampled


@dataclass(frozen=True, slots=True)
class TrainingDecision:
    """A trajectory's training status, and its advantage where one was taken; None where nobody trained."""

    training_status: TrainingStatus | None
    advantage: float | None = None


class FinishReason(StrEnum):
    """Why one completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` 0 is greedy. ``stop_token_ids`` end a turn and are kept in the output."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The sampled tokens among ``start`` to ``stop`` (exclusive) are of weights ``version``."""

    start: int
    stop: int
    version: str


def append_version(spans: list[VersionSpan], span: VersionSpan, further: int = 0) -> None:
    """Append ``span``, ``further`` tokens further on; one of the version that the last is of goes on from it."""
    start = spans.pop().start if spans and spans[-1].version == span.version else span.start + further
    spans.append(VersionSpan(start, span.stop + further, span.version))


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the engine answered to one request.

    ``tokens`` and ``logprobs``: the sampled tokens and each one's log-prob, ``[completion]``.
    ``routing``: rows ``[routes_from, prompt + completion - 1)`` of the whole sequence, or None where none were asked
    for, or none came.
    With ``finish`` ABORT they are what came before the engine gave the request up; ``routing`` is None with no tokens.
    ``weight_version`` sampled the last token; ``earlier`` tells, where an update fell within it, which tokens (counted
    from 0) were sampled before.
    ``retractions``: how often the engine put the request back into its queue and computed its tokens again.
    ``cut``: it was ABORTed because new weights were published, as may happen to a turn any number of times.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    weight_version: str
    engine: str
    routing: Routing | None = None
    earlier: tuple[VersionSpan, ...] = ()
    retractions: int = 0
    cut: bool = False
    cached_tokens: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which tokens, counted from 0; none where no token was sampled."""
        first = self.earlier[-1].stop if self.earlier else 0
        last = VersionSpan(first, len(self.tokens), self.weight_version)
        return (*self.earlier, last) if first < len(self.tokens) else self.earlier


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: what was sampled, what was called, what came back, and the time each took in seconds.

    ``retractions``: how often the engine put the turn's requests back into its queue. ``began``: seconds after the
    episode did.
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


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """A trajectory's log-probs as the engine gave them when it evaluated the whole of it again, ``n`` times.

    ``values`` float32 ``[n, sampled tokens]``, in the order of the tokens; ``seconds`` all evaluations took together.
    """

    values: NDArray[np.float32]
    seconds: float = 0.0

    @property
    def mean(self) -> NDArray[np.float32]:
        """``[sampled tokens]``: the mean of the log-probs (not the log of the mean probability)."""
        return self.values.mean(axis=0, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RouteAudit:
    """A trajectory's routes compared with what the engine answered when it was asked for them again.

    Counted in sets, one a token and layer: those that came out of the prefix cache, those computed by a prefill, and
    how many of each differ from the trajectory's.
    """

    cached: int
    cached_differing: int
    prefilled: int
    prefilled_differing: int


class BranchCause(StrEnum):
    """Why an agent program's conversation went on in a sequence of its own."""

    START = "start"  # it was the first
    TOOLS = "tools"  # other tools were offered
    REWRITE = "rewrite"  # the messages before were changed, dropped or compacted; or it is a sub-agent's
    PARALLEL = "parallel"  # two requests ran at once
    RETRY = "retry"  # the same request was made again after its reply had been given


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One sequence of a trajectory: what the engine saw and sampled along one line of a conversation.

    Arrays as in :class:`Trajectory`. ``loss_mask`` is True where a token was sampled and is trained *here*: one that
    several branches hold is trained in the first of them and is context in the others. ``parent`` is the number of the
    earlier branch whose first ``shared`` tokens this one begins with (None and 0 for one that begins afresh).
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routing: Routing | None
    versions: tuple[VersionSpan, ...]
    parent: int | None = None
    shared: int = 0
    cause: BranchCause = BranchCause.START

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """The distinct weight versions that sampled, in order of first use."""
        return tuple(dict.fromkeys(span.version for span in self.versions))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that are trained in this branch."""
        return int(self.loss_mask.sum())

    @property
    def routes_needed(self) -> int:
        """Rows of routes that a trainer replays: all but the last token's; 0 where nothing was sampled."""
        return len(self.tokens) - 1 if self.loss_mask.any() else 0

    @property
    def routes_missing(self) -> int:
        """How many of those the engine did not send."""
        held = 0 if self.routing is None else int(self.routing.present[:-1].sum())
        return self.routes_needed - held


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A finished episode: all tokens in order, which were sampled, their log-probs, and every token's routes.

    ``tokens`` int32 ``[S]``, ``loss_mask`` bool ``[S]`` (True where sampled), ``logprobs`` float32 ``[S]`` (0 where not
    sampled), ``routing`` of S rows (the last absent) or None. ``reward`` is None iff ``stop.infrastructure``.
    ``versions``: which weights sampled which tokens, in order, each sampled token in one span; a span of one version
    goes on over observations.
    ``error`` says in its first line why the infrastructure failed; after an ``environment_error`` a traceback follows.
    ``tests`` and ``test_log`` are the grading's, for a person to read; of the log a run's records keep the end.
    ``began``: the Unix time at which it got its place among the episodes in flight, after ``queue_seconds`` of waiting
    (0: not recorded); its task took ``start_seconds`` to start, and grading began ``grade_began`` seconds after it did.
    ``recovered``: it was sampled by an earlier start of the run, so this process's clock says nothing of it.
    ``replayed_turns``: so many of its turns were sampled before its sandbox or its run was lost, and taken again.
    These arrays are the first branch's; ``further`` are those that an agent program's conversation had besides.
    ``harness`` counts what its program did: ``rewrites``, ``retries``, ``echo_differs``.
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
    began: float = 0.0
    queue_seconds: float = 0.0
    start_seconds: float = 0.0
    grade_began: float = 0.0
    tests: Mapping[str, str] = field(default_factory=dict)
    test_log: str = ""
    rescored: Rescored | None = None
    audit: RouteAudit | None = None
    recovered: bool = False
    replayed_turns: int = 0
    further: tuple[Branch, ...] = ()
    harness: Mapping[str, int] = field(default_factory=dict)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All its sequences, at least one."""
        first = Branch(self.tokens, self.loss_mask, self.logprobs, self.routing, self.versions)
        return first, *self.further

    @property
    def total_tokens(self) -> int:
        """Tokens of all branches, what several hold counted in each."""
        return len(self.tokens) + sum(len(branch.tokens) for branch in self.further)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that are trained, over all branches."""
        return sum(branch.sampled_tokens for branch in self.branches)

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """The distinct weight versions that sampled, in order of first use."""
        return tuple(dict.fromkeys(version for branch in self.branches for version in branch.weight_versions))

    @property
    def routes_needed(self) -> int:
        """Rows of routes that a trainer replays, over all branches."""
        return sum(branch.routes_needed for branch in self.branches)

    @property
    def routes_missing(self) -> int:
        """How many of those the engine did not send."""
        return sum(branch.routes_missing for branch in self.branches)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The n trajectories of one task; every one has a reward (infrastructure failures were retried or dropped)."""

    task_id: str
    trajectories: tuple[Trajectory, ...]
    infrastructure_failures: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the trainer trains on: one branch of a trajectory with the trajectory's advantage (a scalar, the same for
    all its sampled tokens).

    ``logprobs`` float32 ``[S]`` are those it was sampled with; ``old_logprobs`` float32 ``[S]`` those that the ratio is
    to be taken against, where they are neither these nor the trainer's own (0 where nothing was sampled).
    ``trajectory`` names what it is a branch of: samples of one name are siblings, counted as one sequence and updated
    in the same mini step. None: it has no sibling. ``lag`` int32 ``[S]``: how many updates older than the weights
    before this step those are that sampled a token (0 where nothing was sampled); None where all are the same.
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


class TokenFlag(IntFlag):
    """What an update made of a sampled token."""

    CLIPPED = 1  # the objective's clip took its gradient
    REWEIGHTED = 2  # the correction changed its weight
    MASKED = 4  # the correction left it out


@dataclass(frozen=True, slots=True, eq=False)
class TokenDetail:
    """What the trainer saw of one sample's ``S`` tokens, ``n`` of them sampled, in ``layers`` MoE layers.

    ``gap`` and ``gap_without_replay`` float32 ``[n]``: the trainer's log-prob less the engine's, with the configured
    replay and without any. ``entropy`` float16 ``[n]``, ``flags`` uint8 ``[n]`` (:class:`TokenFlag`). ``differs`` and
    ``differs_without_replay`` uint8 ``[S, ceil(layers / 8)]``: a bit for each MoE layer whose experts differ from the
    rollout's, where the token was the input. None: not measured.
    """

    gap: NDArray[np.float32]
    gap_without_replay: NDArray[np.float32] | None
    entropy: NDArray[np.float16] | None
    flags: NDArray[np.uint8]
    layers: int
    differs: NDArray[np.uint8] | None
    differs_without_replay: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """One step's numbers by metric name (the names are listed in docs/metrics.md)."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)


TokenIds = Sequence[int]
