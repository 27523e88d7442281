"""What must hold of an engine's routes, as functions of its raw answers: one row of the probe's table each.

Rows come from the answers as int32 ``[T rows, L layers, K]``. Row i belongs to token i of the prompt and completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from agent_rl.engine.route_probe.requests import RawAnswer
from agent_rl.models.spec import ModelSpec
from r3.payload import narrow
from r3.routing import RoutingError

Rows = NDArray[np.int32]

ROUNDING = 0.1
"""Share of (token, layer) sets that two computations of the same tokens may differ in: bf16 alone flips 1 to 2.4 %,
rows of other tokens differ in most."""
CHANGED, CHANGED_BEFORE, REACH = 0.06, 0.2, 3
"""Share of sets that must differ at and after, and before, the token at which prompts part; and how far from it is
looked. Before it rows are equal but for rounding. At it a small trained model may differ in a fifth of them only."""


class Verdict(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table: what was checked, the verdict, what was found, and what to do where it failed."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """All that was asked of one server.

    ``cold`` and ``cached``: one prompt, twice. ``late``: again, with the routes from its middle on. ``variants``: the
    same prompt up to the token in ``changed_at``, other tokens from there. ``stopped``: ended by a stop token.
    ``siblings``: two at once of another prompt; ``repeats``: each one's prompt and completion as a prompt, with the
    routes from the last token of the siblings' prompt on. ``retracted`` is None where that was not tried, for the
    reason ``untried``.
    ``captures``: what the server says of its flag.
    """

    captures: bool | None
    cold: RawAnswer
    cached: RawAnswer
    late: RawAnswer
    variants: tuple[RawAnswer, ...]
    changed_at: tuple[int, ...]
    stopped: RawAnswer
    siblings: tuple[RawAnswer, ...]
    repeats: tuple[RawAnswer, ...]
    aborted: RawAnswer
    retracted: RawAnswer | None
    untried: str

    @property
    def every(self) -> tuple[RawAnswer, ...]:
        last = () if self.retracted is None else (self.retracted,)
        first = (self.cold, self.cached, self.late, *self.variants, self.stopped)
        return (*first, *self.siblings, *self.repeats, self.aborted, *last)


Outcome = tuple[Verdict, str]
CAPTURE, KEY = "routes captured", "key in every answer"

_ADVICE = {
    CAPTURE: "start the engine with --enable-return-routed-experts",
    KEY: "ask the engine itself: SGLang's router (sglang-router 0.3.2) drops routed_experts",
    "start honoured": "use an SGLang that knows routed_experts_start_len (0.5.23 does)",
    "row i is token i's": "rows are shifted: don't train on them; report the engine's version",
    "cold and cached alike": "turn off what serves stale rows: hierarchical cache, prefill/decode disaggregation",
    "siblings keep their rows": "rows of parallel samples are mixed up: ask for each once, turn off prefix sharing",
    "distinct ids in range": "check that the facts are this model's (--model), and that no expert is fused or padded",
    "no all-zero MoE layer": "a layer's router is not captured by this engine for this model",
    "log-probs": "the engine must honour return_logprob",
    "weight version": "an engine without weight_version can't be told which weights sampled",
}
_COUNT_ADVICE = "row counts must be prompt + completion - 1 - start: nothing can be aligned otherwise"


def check_all(answers: Answers, facts: ModelSpec) -> tuple[Check, ...]:
    """Every check, in the table's order. None raises."""
    moe = list(facts.moe_layer_ids)
    checks: dict[str, Callable[[], Outcome]] = {
        CAPTURE: lambda: _captured(answers),
        KEY: lambda: _key(answers),
        "rows after length": lambda: _counted(answers.cold, "length"),
        "rows after a stop token": lambda: _counted(answers.stopped, "stop"),
        "rows after an abort": lambda: _counted(answers.aborted, "abort"),
        "rows after a retraction": lambda: _after_retraction(answers),
        "start honoured": lambda: _start(answers, moe),
        "row i is token i's": lambda: _aligned(answers, moe),
        "cold and cached alike": lambda: _cached(answers, moe),
        "siblings keep their rows": lambda: _siblings(answers, moe),
        "distinct ids in range": lambda: _ids(answers, facts),
        "no all-zero MoE layer": lambda: _layers(answers, facts),
        "log-probs": lambda: _logprobs(answers),
        "weight version": lambda: _version(answers),
    }
    return tuple(_named(name, check()) for name, check in checks.items())


def _named(name: str, outcome: Outcome) -> Check:
    verdict, found = outcome
    advice = _ADVICE.get(name, _COUNT_ADVICE) if verdict is Verdict.FAILED else ""
    return Check(name, verdict, found, advice)


def _captured(answers: Answers) -> Outcome:
    having = sum(answer.payload_bytes is not None for answer in answers.every)
    if having:
        return Verdict.OK, f"in {having} of {len(answers.every)} answers"
    if answers.captures:
        return Verdict.SKIPPED, "the server says it does, no answer has them"
    reason = "the server says it does not" if answers.captures is False else "no answer has routed_experts"
    return Verdict.FAILED, reason


def _key(answers: Answers) -> Outcome:
    lacking = sum(answer.payload_bytes is None for answer in answers.every)
    if not lacking:
        return Verdict.OK, f"all {len(answers.every)} answers"
    if lacking == len(answers.every) and not answers.captures:
        return Verdict.SKIPPED, "nothing is captured"
    return Verdict.FAILED, f"{lacking} of {len(answers.every)} answers lack routed_experts"


def _trouble(answer: RawAnswer) -> Outcome | None:
    """Why an answer's rows can't be looked at, or None."""
    if answer.payload_bytes is None:
        return Verdict.SKIPPED, "no routes to look at"
    if answer.wire_TLK is None:
        fault = "not base64" if answer.payload_bytes < 0 else f"{answer.payload_bytes} bytes are not whole rows"
        return Verdict.FAILED, f"{fault} of this model's shape"
    if len(answer.wire_TLK) != answer.rows_expected:
        return Verdict.FAILED, f"expected {answer.rows_expected} rows, received {len(answer.wire_TLK)}"
    return None


def _unusable(*answers: RawAnswer) -> Outcome | None:
    """For checks that compare rows: a wrong count is another check's to report."""
    for answer in answers:
        if (trouble := _trouble(answer)) is not None:
            return Verdict.SKIPPED, trouble[1]
    if len({answer.weight_version for answer in answers}) > 1:
        return Verdict.SKIPPED, "the weights changed between two answers"
    return None


def _counted(answer: RawAnswer, finish: str) -> Outcome:
    if answer.finish != finish:
        return Verdict.SKIPPED, f"not provoked: the answer ended by {answer.finish}"
    counts = f"{answer.rows_expected} rows for {len(answer.prompt)} + {len(answer.tokens)} tokens"
    return _trouble(answer) or (Verdict.OK, counts)


def _after_retraction(answers: Answers) -> Outcome:
    answer = answers.retracted
    if answer is None:
        return Verdict.SKIPPED, f"not provoked: {answers.untried}"
    if not answer.retractions:
        return Verdict.SKIPPED, "not provoked: the request had ended before"
    return _counted(answer, "length")


def _rows(answer: RawAnswer, moe: Sequence[int], start: int, stop: int) -> Rows:
    """Rows ``[start, stop)`` of the sequence, MoE layers only, each row's experts in order."""
    assert answer.wire_TLK is not None
    return np.sort(answer.wire_TLK[start - answer.start : stop - answer.start, moe], axis=2)


def _compare(first: Rows, second: Rows, *, exact: int, what: str) -> Outcome:
    """Equal rows: to the last in the first ``exact`` (both read one stored row), up to rounding in the others."""
    differ_TL = (first != second).any(axis=2)
    if differ_TL[:exact].any():
        row = int(differ_TL[:exact].any(axis=1).argmax())
        return Verdict.FAILED, f"{what}: {differ_TL[:exact].mean():.0%} of the stored sets differ, first in row {row}"
    share = float(differ_TL.mean()) if differ_TL.size else 0.0
    if share > ROUNDING:
        return Verdict.FAILED, f"{what}: {share:.0%} of the sets differ"
    return Verdict.OK, f"{what}: {'equal' if not share else f'{share:.1%} of the sets differ, which is rounding'}"


def _start(answers: Answers, moe: Sequence[int]) -> Outcome:
    late, whole = answers.late, answers.cached
    if late.wire_TLK is not None and len(late.wire_TLK) == late.rows_expected + late.start:
        return Verdict.FAILED, f"asked from row {late.start}, received all {len(late.wire_TLK)} rows"
    if (trouble := _trouble(late) or _unusable(late, whole)) is not None:
        return trouble
    stop = len(late.prompt) - 1
    exact = max(0, min(late.cached_tokens, whole.cached_tokens) - late.start)
    rows = (_rows(answer, moe, late.start, stop) for answer in (late, whole))
    return _compare(*rows, exact=min(exact, stop - late.start), what=f"rows from {late.start} on")


def _aligned(answers: Answers, moe: Sequence[int]) -> Outcome:
    """Row i depends on tokens up to i, and on no later one: prompts that part at a token part at its row.

    Whether one token's routes differ from another's is chance, so many pairs of prompts are taken together, each
    parting elsewhere; ``share`` is of the pairs' sets, by the row's distance from the token at which they part.
    """
    if (trouble := _unusable(answers.cached, *answers.variants)) is not None:
        return trouble
    base = _rows(answers.cached, moe, 0, len(answers.cached.prompt) - 1)
    pairs = [
        (at, _rows(variant, moe, 0, len(base)))
        for at, variant in zip(answers.changed_at, answers.variants, strict=True)
    ]
    share = {
        distance: float(np.mean([(base[at + distance] != rows[at + distance]).any(axis=1) for at, rows in pairs]))
        for distance in range(-REACH, REACH + 1)
    }
    limits = {distance: CHANGED_BEFORE if distance < 0 else CHANGED for distance in share}
    changed = [distance for distance in share if share[distance] > limits[distance]]
    if not changed:
        return Verdict.FAILED, "prompts of different tokens get the same rows"
    if changed[0]:
        found = f"{abs(changed[0])} {'before' if changed[0] < 0 else 'after'}"
        return Verdict.FAILED, f"prompts that part at a token part {found} its row"
    return Verdict.OK, f"{len(pairs)} prompts part at the row of the token they part at"


def _cached(answers: Answers, moe: Sequence[int]) -> Outcome:
    cold, cached = answers.cold, answers.cached
    if (trouble := _unusable(cold, cached)) is not None:
        return trouble
    if cached.cached_tokens == 0:
        return Verdict.SKIPPED, "not provoked: nothing was served from the prefix cache"
    stop = len(cold.prompt) - 1
    exact = min(cached.cached_tokens, stop)
    return _compare(
        _rows(cold, moe, 0, stop), _rows(cached, moe, 0, stop), exact=exact, what=f"{exact} rows from the cache"
    )


def _siblings(answers: Answers, moe: Sequence[int]) -> Outcome:
    if (trouble := _unusable(*answers.siblings, *answers.repeats)) is not None:
        return trouble
    first, second = answers.siblings
    shared = len(first.prompt) - 1
    prompts = (_rows(sibling, moe, 0, shared) for sibling in (first, second))
    verdict, finding = _compare(*prompts, exact=0, what="their prompt's rows")
    if verdict is Verdict.FAILED:
        return verdict, finding
    for sibling, repeat in zip(answers.siblings, answers.repeats, strict=True):
        stop = shared + len(sibling.tokens)
        own = (_rows(answer, moe, shared, stop) for answer in (sibling, repeat))
        verdict, found = _compare(*own, exact=0, what="a sibling's own rows, asked again")
        if verdict is Verdict.FAILED:
            return verdict, found
    return verdict, finding


def _zero_layers(answers: Answers, facts: ModelSpec) -> tuple[list[Rows], list[int]]:
    """The rows of every usable answer, MoE layers only, and the ids of the layers that are zero in all of them."""
    moe = list(facts.moe_layer_ids)
    rows = [answer.wire_TLK[:, moe] for answer in answers.every if answer.wire_TLK is not None]
    if not rows:
        return [], []
    used_L = np.any([part.any(axis=(0, 2)) for part in rows], axis=0)
    return rows, [layer for layer, used in zip(moe, used_L, strict=True) if not used]


def _ids(answers: Answers, facts: ModelSpec) -> Outcome:
    rows, zero = _zero_layers(answers, facts)
    kept = [index for index, layer in enumerate(facts.moe_layer_ids) if layer not in zero]
    if not rows or not kept:
        return Verdict.SKIPPED, "no routes to look at"
    together = np.concatenate(rows)[:, kept]
    try:
        narrow(together, facts.num_experts, "all answers")
    except RoutingError as error:
        return Verdict.FAILED, str(error)
    return Verdict.OK, f"top-{facts.top_k} of {facts.num_experts} in {len(together)} rows"


def _layers(answers: Answers, facts: ModelSpec) -> Outcome:
    rows, zero = _zero_layers(answers, facts)
    if not rows:
        return Verdict.SKIPPED, "no routes to look at"
    if zero:
        return Verdict.FAILED, f"layer{'s' if len(zero) > 1 else ''} {', '.join(map(str, zero))}: all zeros"
    return Verdict.OK, f"{len(facts.moe_layer_ids)} MoE layers of {facts.num_layers}"


def _logprobs(answers: Answers) -> Outcome:
    for answer in answers.every:
        if answer.logprobs != len(answer.tokens):
            return Verdict.FAILED, f"{answer.logprobs} finite log-probs for {len(answer.tokens)} tokens"
    return Verdict.OK, "one a token"


def _version(answers: Answers) -> Outcome:
    versions = {answer.weight_version for answer in answers.every}
    if "" in versions:
        return Verdict.FAILED, "an answer has none"
    return Verdict.OK, ", ".join(sorted(versions))
