"""The probe's checks on generated responses: rounding, faults, and what they cannot decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent_rl.engine.route_probe.checks import Check, CheckStatus, ProbeResponses, check_all
from agent_rl.engine.route_probe.conversations import Conversation
from agent_rl.engine.route_probe.requests import RawResponse
from agent_rl.models.spec import ModelSpec

LAYERS, EXPERTS, TOP_K, PROMPT = 24, 64, 4, 80
FACTS = ModelSpec(
    "qwen3_moe", moe=(False, *[True] * (LAYERS - 1)), hidden=8, heads=2, kv_heads=1, head_dim=4, inner=8,
    vocab_size=1000, max_positions=4096, num_experts=EXPERTS, top_k=TOP_K,
)  # fmt: skip
Rows = NDArray[np.int32]


def routes(tokens: list[int], alike: float) -> Rows:
    """``[T, layers, top_k]``: routes of a token in its place; a share ``alike`` of the sets is every token's."""
    return np.stack([row_of(token, place, alike) for place, token in enumerate(tokens)])


@cache
def row_of(token: int, place: int, alike: float) -> Rows:
    own, common = np.random.default_rng((token, place)), np.random.default_rng(place)
    experts = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    same = own.random((LAYERS, 1)) < alike
    return np.where(same, common.permuted(experts, axis=1), own.permuted(experts, axis=1))[:, :TOP_K]


class Server:
    """Answers as a sound server would. In rows that are computed anew a share ``rounding`` of the sets has another last
    expert. ``change`` is applied to all rows."""

    def __init__(self, rounding: float = 0.0, alike: float = 0.0, change: Callable[[Rows], Rows] = lambda r: r) -> None:
        self.rng, self.rounding, self.alike, self.change = np.random.default_rng(0), rounding, alike, change

    def answer(
        self, prompt: list[int], count: int, *, start: int = 0, cached: int = 0, finish: str = "length"
    ) -> RawResponse:
        tokens = [int(token) for token in np.random.default_rng(len(prompt) + count).integers(0, 1000, count)]
        rows = routes([*prompt, *tokens][:-1], self.alike)
        flipped = self.rng.random(rows.shape[:2]) < self.rounding
        flipped[:cached] = False
        free = ~(rows[flipped][..., None] == np.arange(EXPERTS)).any(axis=1)
        rows[flipped, -1] = free.argmax(axis=1)
        rows[:, 0] = 0
        rows = self.change(rows)[start:]
        return RawResponse(tuple(prompt), start, tuple(tokens), finish, cached, 0, count, "7", rows.nbytes, rows)

    def conversation(self, prompt: list[int], version: str = "7") -> Conversation:
        first = self.answer(prompt, 8)
        more = [*prompt, *first.tokens, 1, 2, 3]
        second = self.answer(more, 8, start=len(prompt) + 7)
        again = self.answer([*more, *second.tokens], 1)
        return Conversation((first, second), replace(again, weight_version=version, order=version == "8"))

    def answers(self, **changes: Any) -> ProbeResponses:
        rng = np.random.default_rng(5)
        prompt, other = rng.integers(0, 1000, PROMPT).tolist(), rng.integers(0, 1000, PROMPT).tolist()
        places = tuple(range(20, 60, 5))
        siblings = (self.answer(other, 8), self.answer(other, 7))
        found = ProbeResponses(
            captures=True,
            cold=self.answer(prompt, 8),
            cached=self.answer(prompt, 1, cached=PROMPT - 1),
            late=self.answer(prompt, 1, start=40, cached=PROMPT - 1),
            variants=tuple(
                self.answer([*prompt[:at], *rng.integers(0, 1000, PROMPT - at).tolist()], 1) for at in places
            ),
            changed_at=places,
            stopped=self.answer(prompt, 3, finish="stop"),
            siblings=siblings,
            repeats=tuple(self.answer([*other, *one.tokens], 1, start=PROMPT - 1) for one in siblings),
            conversations=(self.conversation(other),),
            aborted=self.answer(prompt, 5, finish="abort"),
            retracted=replace(self.answer(prompt, 5), retractions=1),
            untried="",
        )
        return replace(found, **changes)


def found(answers: ProbeResponses) -> dict[str, Check]:
    return {check.name: check for check in check_all(answers, FACTS)}


def not_ok(answers: ProbeResponses) -> dict[str, CheckStatus]:
    return {name: check.status for name, check in found(answers).items() if check.status is not CheckStatus.OK}


@pytest.mark.parametrize(("rounding", "alike"), [(0.0, 0.0), (0.06, 0.0), (0.06, 0.8), (0.06, 0.5)])
def test_rounding_and_tokens_with_equal_routes_are_no_fault(rounding: float, alike: float) -> None:
    server = Server(rounding, alike)
    cold = server.answers()
    # What is stored is served as it is: the cached rows are the cold ones.
    stored = {
        name: replace(answer, wire_TLK=cold.cold.wire_TLK[answer.start : PROMPT])
        for name, answer in (("cached", cold.cached), ("late", cold.late))
        if cold.cold.wire_TLK is not None
    }
    assert not_ok(replace(cold, **stored)) == {}


@pytest.mark.parametrize("off", [-2, -1, 1, 2])
def test_shifted_rows_are_reported_with_their_distance(off: int) -> None:
    check = found(Server(alike=0.6, change=lambda rows: np.roll(rows, off, axis=0)).answers())["row i is token i's"]
    assert check.status is CheckStatus.FAILED
    assert f"diverge {abs(off)} {'after' if off > 0 else 'before'} the token" in check.finding


def test_zeros_of_a_moe_layer_are_a_fault_and_of_a_dense_layer_are_not() -> None:
    def zeroed(rows: Rows) -> Rows:
        rows[:, 5] = 0
        return rows

    assert not_ok(Server(change=zeroed).answers()) == {"no all-zero MoE layer": CheckStatus.FAILED}


def test_a_check_without_evidence_is_skipped() -> None:
    sound = Server().answers()
    uncached = replace(sound.cached, cached_tokens=0)
    assert not_ok(replace(sound, cached=uncached)) == {"cold and cached alike": CheckStatus.SKIPPED}
    untold = replace(sound, retracted=None, untried="3 requests of others are running")
    assert not_ok(untold) == {"rows after a retraction": CheckStatus.SKIPPED}
    assert found(untold)["rows after a retraction"].finding == "not provoked: 3 requests of others are running"
    ended = replace(sound, aborted=replace(sound.aborted, finish="length"))
    assert not_ok(ended) == {"rows after an abort": CheckStatus.SKIPPED}
    newer = replace(sound, cached=replace(sound.cached, weight_version="8", order=1))
    assert set(not_ok(newer).values()) == {CheckStatus.SKIPPED}
    assert "the weights changed between two responses" in found(newer)["cold and cached alike"].finding


def test_a_conversation_across_a_weight_update_is_not_compared() -> None:
    server = Server()
    sound = server.answers()
    prompt = list(sound.siblings[0].prompt)
    updated = replace(sound, conversations=(server.conversation(prompt, version="8"),))
    assert not_ok(updated) == {"conversations alike in a second pass": CheckStatus.SKIPPED}


def test_versions_that_alternate_are_reported_and_an_update_is_not() -> None:
    sound = Server().answers()

    def answered(response: RawResponse, order: int, version: str) -> RawResponse:
        return replace(response, order=order, weight_version=version)

    def version_check(versions: str) -> Check:
        pairs = enumerate(zip(sound.variants, versions, strict=True))
        variants = [answered(one, at + 1, version) for at, (one, version) in pairs]
        return found(replace(sound, variants=tuple(variants)))["weight version"]

    # Every other response has order 0 and version 7.
    assert version_check("77778888").finding == "7, 8"
    assert version_check("77878888").finding == "versions 7, 8 alternate: not all ranks have the same weights"


@pytest.mark.parametrize(
    ("captures", "failing"), [(True, "key in every response"), (False, "routes captured"), (None, "routes captured")]
)
def test_stripped_routes_and_missing_capture_are_distinguished(captures: bool | None, failing: str) -> None:
    def stripped(value: Any) -> Any:
        if isinstance(value, RawResponse):
            return replace(value, payload_bytes=None, wire_TLK=None)
        if isinstance(value, Conversation):
            return Conversation(stripped(value.turns), stripped(value.again))
        return tuple(map(stripped, value)) if isinstance(value, tuple) else value

    sound = Server().answers()
    parts = {field.name: stripped(getattr(sound, field.name)) for field in fields(sound)}
    strip = ProbeResponses(**parts | {"captures": captures})
    assert [name for name, status in not_ok(strip).items() if status is CheckStatus.FAILED] == [failing]
    assert found(strip)["log-probs"].status is CheckStatus.OK
    assert found(strip)["distinct ids in range"].status is CheckStatus.SKIPPED
