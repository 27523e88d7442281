"""The checks of the route probe: functions of an engine's raw responses, one per row of the probe's table.

Rows are int32 ``[T rows, L layers, K]``. Row i belongs to token i of prompt and completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from agent_rl.engine.route_probe.conversations import Conversation, differences, differing_choices
from agent_rl.engine.route_probe.requests import RawResponse, Rows
from agent_rl.models.spec import ModelSpec
from r3.payload import narrow
from r3.routing import RoutingError

ROUNDING = 0.05
"""Maximum share of choices (token, layer, slot) that may differ between two computations of the same tokens. It counts
choices, not whole sets, because rounding usually exchanges one expert of a set. In bfloat16, up to 0.114 of the sets
and 0.017 of the choices of a conversation's part differ (8 layers, top-8 of 128, 100 conversations). Of rows shifted
by one, 0.4 of the choices differ."""
CHANGED, CHANGED_BEFORE, REACH = 0.06, 0.2, 3
"""``CHANGED``: minimum share of differing sets at and after the token where two prompts diverge. ``CHANGED_BEFORE``:
maximum share before it. ``REACH``: rows compared on each side. A small trained model may differ in only a fifth of
the sets at that token."""


class CheckStatus(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table: the check's name, its status, the finding, and advice if it failed."""

    name: str
    status: CheckStatus
    finding: str
    advice: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ProbeResponses:
    """All responses of one server.

    ``cold`` and ``cached``: one prompt, twice. ``late``: the same again, with the routes from its middle on.
    ``variants``: the same prompt up to token ``changed_at``, other tokens after it. ``stopped``: ended by a stop token.
    ``siblings``: two concurrent requests with another prompt. ``repeats``: each sibling's prompt and completion as a
    prompt, with the routes from the last token of the siblings' prompt on. ``conversations``: concurrent ones of
    several turns, and a second pass over each. ``retracted`` is None if no retraction was provoked, for the reason
    ``untried``. ``captures``: the server's own report of its flag.
    """

    captures: bool | None
    cold: RawResponse
    cached: RawResponse
    late: RawResponse
    variants: tuple[RawResponse, ...]
    changed_at: tuple[int, ...]
    stopped: RawResponse
    siblings: tuple[RawResponse, ...]
    repeats: tuple[RawResponse, ...]
    conversations: tuple[Conversation, ...]
    aborted: RawResponse
    retracted: RawResponse | None
    untried: str

    @property
    def all(self) -> tuple[RawResponse, ...]:
        last = () if self.retracted is None else (self.retracted,)
        first = (self.cold, self.cached, self.late, *self.variants, self.stopped)
        turns = (response for conversation in self.conversations for response in conversation.all)
        return (*first, *self.siblings, *self.repeats, *turns, self.aborted, *last)


Outcome = tuple[CheckStatus, str]
CAPTURE, KEY = "routes captured", "key in every response"

_ADVICE = {
    CAPTURE: "start the engine with --enable-return-routed-experts",
    KEY: "connect to the engine directly: SGLang's router (sglang-router 0.3.2) drops routed_experts, and a decode "
    "server (prefill-decode disaggregation) sends none for one token",
    "start honored": "use an SGLang release with routed_experts_start_len (0.5.23 has it)",
    "row i is token i's": "rows are shifted: do not train on them; report the engine's version",
    "cold and cached alike": "turn off what serves stale rows: hierarchical cache, prefill/decode disaggregation",
    "siblings keep their rows": "rows of parallel samples are mixed up: turn off prefix sharing",
    "conversations alike in a second pass": "do not train on these routes: a server option (drafts, data-parallel "
    "attention, a cache tier) or a proxy changes rows under load; turn it off",
    "distinct ids in range": "check that --model is this server's model, that no expert is fused or padded, and that "
    "no server behind the address only decodes (prefill-decode disaggregation)",
    "no all-zero MoE layer": "a layer's router is not captured by this engine for this model",
    "log-probs": "the engine must support return_logprob",
    "weight version": "without one version at a time the sampling weights are unknown",
}
_COUNT_ADVICE = "row counts must be prompt + completion - 1 - start; otherwise rows cannot be aligned"


def check_all(responses: ProbeResponses, model_spec: ModelSpec) -> tuple[Check, ...]:
    """The results of all checks, in the table's order. No check raises."""
    moe = list(model_spec.moe_layer_ids)
    checks: dict[str, Callable[[], Outcome]] = {
        CAPTURE: lambda: _captured(responses),
        KEY: lambda: _key(responses),
        "rows after length": lambda: _counted(responses.cold, "length"),
        "rows after a stop token": lambda: _counted(responses.stopped, "stop"),
        "rows after an abort": lambda: _counted(responses.aborted, "abort"),
        "rows after a retraction": lambda: _after_retraction(responses),
        "start honored": lambda: _start(responses, moe),
        "row i is token i's": lambda: _aligned(responses, moe),
        "cold and cached alike": lambda: _cached(responses, moe),
        "siblings keep their rows": lambda: _siblings(responses, moe),
        "conversations alike in a second pass": lambda: _conversations(responses, moe),
        "distinct ids in range": lambda: _ids(responses, model_spec),
        "no all-zero MoE layer": lambda: _layers(responses, model_spec),
        "log-probs": lambda: _logprobs(responses),
        "weight version": lambda: _version(responses),
    }
    return tuple(_as_check(name, check()) for name, check in checks.items())


def _as_check(name: str, outcome: Outcome) -> Check:
    status, finding = outcome
    advice = _ADVICE.get(name, _COUNT_ADVICE) if status is CheckStatus.FAILED else ""
    return Check(name, status, finding, advice)


def _captured(responses: ProbeResponses) -> Outcome:
    with_routes = sum(response.payload_bytes is not None for response in responses.all)
    if with_routes:
        return CheckStatus.OK, f"in {with_routes} of {len(responses.all)} responses"
    if responses.captures:
        return CheckStatus.SKIPPED, "the server says it does, no response has them"
    reason = (
        "the server reports that it does not capture"
        if responses.captures is False
        else "no response has routed_experts"
    )
    return CheckStatus.FAILED, reason


def _key(responses: ProbeResponses) -> Outcome:
    without_routes = sum(response.payload_bytes is None for response in responses.all)
    if not without_routes:
        return CheckStatus.OK, f"all {len(responses.all)} responses"
    if without_routes == len(responses.all) and not responses.captures:
        return CheckStatus.SKIPPED, "nothing is captured"
    ranks = {response.dp_rank for response in responses.all if response.payload_bytes is None}
    rank = f", all of data-parallel rank {ranks.pop()}" if len(ranks) == 1 and None not in ranks else ""
    return CheckStatus.FAILED, f"{without_routes} of {len(responses.all)} responses lack routed_experts{rank}"


def _row_error(response: RawResponse) -> Outcome | None:
    """Why a response's rows cannot be checked, or None."""
    if response.payload_bytes is None:
        return CheckStatus.SKIPPED, "no routes"
    if response.wire_TLK is None:
        fault = "not base64" if response.payload_bytes < 0 else f"{response.payload_bytes} bytes are not whole rows"
        return CheckStatus.FAILED, f"{fault} of this model's shape"
    if len(response.wire_TLK) != response.rows_expected:
        lacking = "" if len(response.wire_TLK) != len(response.tokens) - 1 else ": the prompt's are missing"
        return CheckStatus.FAILED, f"expected {response.rows_expected} rows, received {len(response.wire_TLK)}{lacking}"
    return None


def _unusable(*responses: RawResponse) -> Outcome | None:
    """Why the rows of ``responses`` cannot be compared, or None. A wrong count is reported by another check."""
    for response in responses:
        if (error := _row_error(response)) is not None:
            return CheckStatus.SKIPPED, error[1]
    if len({response.weight_version for response in responses}) > 1:
        return CheckStatus.SKIPPED, "the weights changed between two responses"
    return None


def _counted(response: RawResponse, finish: str) -> Outcome:
    if response.finish != finish:
        return CheckStatus.SKIPPED, f"not provoked: the response ended by {response.finish}"
    counts = f"{response.rows_expected} rows for {len(response.prompt)} + {len(response.tokens)} tokens"
    return _row_error(response) or (CheckStatus.OK, counts)


def _after_retraction(responses: ProbeResponses) -> Outcome:
    response = responses.retracted
    if response is None:
        return CheckStatus.SKIPPED, f"not provoked: {responses.untried}"
    if not response.retractions:
        return CheckStatus.SKIPPED, "not provoked: the request had ended before"
    return _counted(response, "length")


def _rows(response: RawResponse, moe: Sequence[int], start: int, stop: int) -> Rows:
    """Rows ``[start, stop)`` of the sequence, MoE layers only, with each row's experts sorted."""
    assert response.wire_TLK is not None
    return np.sort(response.wire_TLK[start - response.start : stop - response.start, moe], axis=2)


def _compare(first: Rows, second: Rows, *, exact: int, what: str) -> Outcome:
    """Compare rows. The first ``exact`` rows must be equal (both responses read one stored row), the others up to
    rounding."""
    differ_TL = (first != second).any(axis=2)
    if differ_TL[:exact].any():
        row = int(differ_TL[:exact].any(axis=1).argmax())
        return (
            CheckStatus.FAILED,
            f"{what}: {differ_TL[:exact].mean():.0%} of the stored sets differ, first in row {row}",
        )
    share = float(differing_choices(first, second).mean()) if differ_TL.size else 0.0
    if share > ROUNDING:
        return CheckStatus.FAILED, f"{what}: {share:.0%} of the choices differ"
    return (
        CheckStatus.OK,
        f"{what}: {'equal' if not share else f'{share:.1%} of the choices differ, which is rounding'}",
    )


def _start(responses: ProbeResponses, moe: Sequence[int]) -> Outcome:
    late, cached = responses.late, responses.cached
    if late.wire_TLK is not None and len(late.wire_TLK) == late.rows_expected + late.start:
        return CheckStatus.FAILED, f"requested from row {late.start}, received all {len(late.wire_TLK)} rows"
    if (error := _row_error(late) or _unusable(late, cached)) is not None:
        return error
    stop = len(late.prompt) - 1
    exact = max(0, min(late.cached_tokens, cached.cached_tokens) - late.start)
    rows = (_rows(response, moe, late.start, stop) for response in (late, cached))
    return _compare(*rows, exact=min(exact, stop - late.start), what=f"rows from {late.start} on")


def _aligned(responses: ProbeResponses, moe: Sequence[int]) -> Outcome:
    """Row i depends on the tokens up to i: prompts that diverge at a token must diverge at its row.

    Whether one token's routes differ is random, so many pairs of prompts are used, each diverging elsewhere; ``share``
    is taken over the pairs' sets, by distance of the row from the diverging token.
    """
    if (error := _unusable(responses.cached, *responses.variants)) is not None:
        return error
    base = _rows(responses.cached, moe, 0, len(responses.cached.prompt) - 1)
    pairs = [
        (at, _rows(variant, moe, 0, len(base)))
        for at, variant in zip(responses.changed_at, responses.variants, strict=True)
    ]
    share = {
        distance: float(np.mean([(base[at + distance] != rows[at + distance]).any(axis=1) for at, rows in pairs]))
        for distance in range(-REACH, REACH + 1)
    }
    limits = {distance: CHANGED_BEFORE if distance < 0 else CHANGED for distance in share}
    changed = [distance for distance in share if share[distance] > limits[distance]]
    if not changed:
        return CheckStatus.FAILED, "different prompts get the same rows"
    if changed[0]:
        offset = f"{abs(changed[0])} {'before' if changed[0] < 0 else 'after'}"
        return CheckStatus.FAILED, f"rows diverge {offset} the token at which prompts diverge"
    return CheckStatus.OK, f"{len(pairs)} prompts diverge at the row of their first different token"


def _cached(responses: ProbeResponses, moe: Sequence[int]) -> Outcome:
    cold, cached = responses.cold, responses.cached
    if (error := _unusable(cold, cached)) is not None:
        return error
    if cached.cached_tokens == 0:
        return CheckStatus.SKIPPED, "not provoked: nothing was served from the prefix cache"
    stop = len(cold.prompt) - 1
    exact = min(cached.cached_tokens, stop)
    return _compare(
        _rows(cold, moe, 0, stop), _rows(cached, moe, 0, stop), exact=exact, what=f"{exact} rows from the cache"
    )


def _siblings(responses: ProbeResponses, moe: Sequence[int]) -> Outcome:
    if (error := _unusable(*responses.siblings, *responses.repeats)) is not None:
        return error
    first, second = responses.siblings
    shared = len(first.prompt) - 1
    prompts = (_rows(sibling, moe, 0, shared) for sibling in (first, second))
    status, finding = _compare(*prompts, exact=0, what="their prompt's rows")
    if status is CheckStatus.FAILED:
        return status, finding
    for sibling, repeat in zip(responses.siblings, responses.repeats, strict=True):
        stop = shared + len(sibling.tokens)
        rows = (_rows(response, moe, shared, stop) for response in (sibling, repeat))
        status, repeat_finding = _compare(*rows, exact=0, what="a sibling's own rows, requested again")
        if status is CheckStatus.FAILED:
            return status, repeat_finding
    return status, finding


def _conversations(responses: ProbeResponses, moe: Sequence[int]) -> Outcome:
    """The worst part of all conversations. A wrong row count fails here too: it may come with load alone."""
    usable, why = [], "no routes"
    for conversation in responses.conversations:
        for response in conversation.all:
            if (error := _row_error(response)) is not None and error[0] is CheckStatus.FAILED:
                return CheckStatus.FAILED, f"{_rank(response)}{error[1]}"
        if (skipped := _unusable(*conversation.all)) is None:
            usable.append(conversation)
        else:
            why = skipped[1]
    if not usable:
        return CheckStatus.SKIPPED, why
    shares = [(share, part, one) for one in usable for part, share in differences(one, moe).items()]
    share, part, worst = max(shares, key=lambda entry: entry[0])
    if share > ROUNDING:
        return CheckStatus.FAILED, f"{_rank(worst.turns[0], worst.again)}{part}: {share:.0%} of the choices differ"
    return (
        CheckStatus.OK,
        f"{len(usable)} at once: {f'at most {share:.1%} of the choices differ' if share else 'equal'}",
    )


def _rank(*responses: RawResponse) -> str:
    ranks = [str(response.dp_rank) for response in responses if response.dp_rank is not None]
    return f"data-parallel rank {' against '.join(ranks)}: " if ranks else ""


def _zero_layers(responses: ProbeResponses, model_spec: ModelSpec) -> tuple[list[Rows], list[int]]:
    """The rows of every usable response, MoE layers only, and the ids of the layers that are zero in all of them."""
    moe = list(model_spec.moe_layer_ids)
    rows = [response.wire_TLK[:, moe] for response in responses.all if response.wire_TLK is not None]
    if not rows:
        return [], []
    used_L = np.any([part.any(axis=(0, 2)) for part in rows], axis=0)
    return rows, [layer for layer, used in zip(moe, used_L, strict=True) if not used]


def _ids(responses: ProbeResponses, model_spec: ModelSpec) -> Outcome:
    rows, zero = _zero_layers(responses, model_spec)
    kept = [index for index, layer in enumerate(model_spec.moe_layer_ids) if layer not in zero]
    if not rows or not kept:
        return CheckStatus.SKIPPED, "no routes"
    experts = np.concatenate(rows)[:, kept]
    zero_rows = int((~experts.any(axis=(1, 2))).sum())
    if zero_rows and model_spec.top_k > 1:
        return CheckStatus.FAILED, f"{zero_rows} of {len(experts)} rows are zeros: they were not captured"
    try:
        narrow(experts, model_spec.num_experts, "all responses")
    except RoutingError as error:
        return CheckStatus.FAILED, str(error)
    return CheckStatus.OK, f"top-{model_spec.top_k} of {model_spec.num_experts} in {len(experts)} rows"


def _layers(responses: ProbeResponses, model_spec: ModelSpec) -> Outcome:
    rows, zero = _zero_layers(responses, model_spec)
    if not rows:
        return CheckStatus.SKIPPED, "no routes"
    if zero:
        return CheckStatus.FAILED, f"layer{'s' if len(zero) > 1 else ''} {', '.join(map(str, zero))}: all zeros"
    return CheckStatus.OK, f"{len(model_spec.moe_layer_ids)} MoE layers of {model_spec.num_layers}"


def _logprobs(responses: ProbeResponses) -> Outcome:
    for response in responses.all:
        if response.logprobs != len(response.tokens):
            return CheckStatus.FAILED, f"{response.logprobs} finite log-probs for {len(response.tokens)} tokens"
    return CheckStatus.OK, "one per token"


def _version(responses: ProbeResponses) -> Outcome:
    versions = {response.weight_version for response in responses.all}
    if "" in versions:
        return CheckStatus.FAILED, "a response has none"
    in_order = [response.weight_version for response in sorted(responses.all, key=lambda response: response.order)]
    if sum(left != right for left, right in pairwise(in_order)) >= len(versions):
        return (
            CheckStatus.FAILED,
            f"versions {', '.join(sorted(versions))} alternate: not all ranks have the same weights",
        )
    return CheckStatus.OK, ", ".join(sorted(versions))
