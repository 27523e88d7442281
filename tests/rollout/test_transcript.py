"""Transcripts with rows that name the whole prefix they were computed from, so that no row can pass for another."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.config import R3Config, RouteSource
from agent_rl.errors import RoutesMissingError
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import Completion, FinishReason, VersionSpan
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, Span, SpanKind, validate

LAYERS, EXPERTS = 4, 256


def causal_rows(tokens: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Row i spells a checksum of tokens 0 to i: it is the same wherever that prefix is, and nowhere else."""
    sums, value = [], 0
    for token in tokens[:stop]:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        sums.append(value)
    digits = np.array(sums[start:], np.int64).reshape(-1, 1) >> np.array([0, 8, 16, 24])
    first = (digits & 255).astype(np.uint8)
    return np.stack([first, first + np.uint8(1)], axis=2)


def completion(prompt: Any, sampled: Any, routes_from: Any, *, version: str = "1", finish: str = "stop") -> Completion:
    """The response of a correct engine; token t has log-prob -t."""
    stop = len(prompt) + len(sampled) - 1
    routing = None
    if routes_from is not None:
        experts = causal_rows([*prompt, *sampled], routes_from, stop)
        rows = stop - routes_from
        cut = min(max(len(prompt) - 1 - routes_from, 0), rows)
        spans = [Span(0, cut, version, "e", SpanKind.PREFILLED), Span(cut, rows, version, "e", SpanKind.SAMPLED)]
        kept = tuple(span for span in spans if span.start < span.stop)
        routing = Routing(experts, np.ones(rows, np.bool_), kept, EXPERTS)
    logprobs = tuple(-float(token) for token in sampled)
    mask = None if version.endswith("2") else KeptTokens.from_rows(kept_rows(sampled))
    return Completion(tuple(sampled), logprobs, FinishReason(finish), version, "e", routing, mask)


def kept_rows(tokens: Sequence[int]) -> list[list[int]]:
    """What each token is drawn from; every third one from the whole vocabulary."""
    return [[token, token + 1] if token % 3 else [] for token in tokens]


class Conversation:
    """A transcript, and tokens that never repeat, so that each one names the place where it was sampled."""

    def __init__(self, source: RouteSource = "sampled", missing: Literal["without_replay", "error"] = "error") -> None:
        self.next_token = 0
        self.sampled: list[int] = []
        self.transcript = Transcript(self.fresh(3), max_tokens=1000, routes=R3Config(source=source, missing=missing))

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def turn(self, count: int, *, observed: int = 0, routes: bool = True, **how: Any) -> None:
        if observed:
            self.transcript.observed(self.fresh(observed))
        tokens = self.fresh(count)
        self.sampled += tokens
        start = self.transcript.routes_from if routes else None
        self.transcript.sampled(completion(self.transcript.tokens, tokens, start, **how))


def sampled_by(versions: Sequence[VersionSpan], loss_mask: np.ndarray) -> list[str]:
    """The version of every sampled token."""
    return [next(span.version for span in versions if span.start <= at < span.stop) for at in np.flatnonzero(loss_mask)]


def check(transcript: Transcript) -> tuple[np.ndarray, np.ndarray, Routing]:
    tokens, loss_mask, logprobs, routing = transcript.arrays()
    validate(routing)
    assert routing.tokens == len(tokens) == len(loss_mask) == len(logprobs)
    assert bool(loss_mask[-1])
    assert not routing.present[-1]
    held = np.flatnonzero(routing.present)
    np.testing.assert_array_equal(routing.experts[held], causal_rows(tokens.tolist(), 0, len(tokens))[held])
    np.testing.assert_array_equal(logprobs, np.where(loss_mask, -tokens.astype(np.float32), 0))
    return tokens, loss_mask, routing


finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
requests = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), finishes), min_size=1, max_size=12)
"""Of each request: tokens observed before it, tokens sampled (or come before the abort), how it ended."""


@given(requests=requests, source=st.sampled_from(["sampled", "latest"]))
def test_any_conversation_lines_up(requests: list[tuple[int, int, FinishReason]], source: Any) -> None:
    talk, after_abort, versions = Conversation(source), False, dict[str, None]()
    for number, (observed, sampled, finish) in enumerate(requests):
        talk.turn(sampled, observed=0 if after_abort else observed, finish=finish, version=str(number))
        after_abort = finish is FinishReason.ABORT
        if sampled:
            versions[str(number)] = None
    assert [span.version for span in talk.transcript.versions] == list(versions)
    if not talk.sampled:
        assert talk.transcript.arrays()[3] is None
        return
    tokens, loss_mask, routing = check(talk.transcript)
    assert tokens[loss_mask].tolist() == talk.sampled
    sampling = [str(number) for number, (_, sampled, _) in enumerate(requests) for _ in range(sampled)]
    assert sampled_by(talk.transcript.versions, loss_mask) == sampling
    rows = [
        [] if version.endswith("2") else row for version, row in zip(sampling, kept_rows(talk.sampled), strict=True)
    ]
    if (kept := talk.transcript.kept_tokens) is None:
        assert {version[-1:] for version in sampling} <= {"2"}
    else:
        assert [row.tolist() for row in np.split(kept.ids, np.cumsum(kept.counts)[:-1])] == rows
    assert routing.present[:-1].all()
    if source == "sampled":  # each token's row of sampling is of the version that sampled it
        for span in routing.spans[:-1]:
            feeds_sampled = [int(tokens[row + 1]) in talk.sampled for row in range(span.start, span.stop)]
            assert all(feeds_sampled) == (span.kind is SpanKind.SAMPLED)


def test_an_aborted_turn_continues_with_other_weights() -> None:
    talk = Conversation()
    talk.turn(2, finish="abort", version="7")
    assert talk.transcript.routes_from == 4
    talk.turn(0, finish="abort", version="7")  # given up before it sampled: nothing came, nothing is held
    assert talk.transcript.routes_from == 4
    talk.turn(3, version="8")
    _, loss_mask, routing = check(talk.transcript)
    assert loss_mask.tolist() == [False] * 3 + [True] * 5
    spans = [(span.start, span.stop, span.weight_version, span.kind) for span in routing.spans]
    prefilled, sampled = SpanKind.PREFILLED, SpanKind.SAMPLED
    assert spans == [(0, 2, "7", prefilled), (2, 4, "7", sampled), (4, 7, "8", sampled), (7, 8, "", SpanKind.MISSING)]
    assert talk.transcript.versions == (VersionSpan(3, 5, "7"), VersionSpan(5, 8, "8"))


def test_an_update_within_a_completion_names_both_versions() -> None:
    talk = Conversation()
    said = completion(talk.transcript.tokens, talk.fresh(4), 0, version="8")
    talk.transcript.sampled(replace(said, earlier=(VersionSpan(0, 1, "7"),)))
    assert talk.transcript.versions == (VersionSpan(3, 4, "7"), VersionSpan(4, 7, "8"))
    talk.turn(2, observed=2, version="8")
    assert talk.transcript.versions == (VersionSpan(3, 4, "7"), VersionSpan(4, 11, "8")), "it goes on over observations"


def test_an_observation_that_was_never_shown_has_no_rows() -> None:
    talk = Conversation()
    talk.turn(4)
    talk.transcript.observed(talk.fresh(6))
    assert check(talk.transcript)[0].tolist() == list(range(7))


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
@pytest.mark.parametrize("finish", ["stop", "abort"])
def test_a_wrong_row_count_is_named(shift: int, finish: str) -> None:
    """The engine starts at another row than requested, so that too many or too few rows come."""
    talk = Conversation()
    talk.turn(4)
    talk.transcript.observed(talk.fresh(5))
    prompt, sampled = list(talk.transcript.tokens), talk.fresh(2)
    said = completion(prompt, sampled, 6 + shift, finish=finish)
    with pytest.raises(RoutesMissingError, match=rf"engine e: turn 1: expected 7 rows \[6, 13\), received {7 - shift}"):
        talk.transcript.sampled(said)


def test_routes_that_were_not_sent_are_named() -> None:
    talk = Conversation()
    with pytest.raises(RoutesMissingError, match=r"engine e: turn 0: expected rows \[0, 4\) of routes, received none"):
        talk.turn(2, routes=False)
    talk.turn(2)
    with pytest.raises(RoutesMissingError, match=r"turn 1: expected rows \[4, 8\) of routes, received none"):
        talk.turn(1, observed=3, routes=False)


def test_log_probs_that_do_not_line_up_are_refused() -> None:
    talk = Conversation()
    said = replace(completion(talk.transcript.tokens, [9], 0), logprobs=())
    with pytest.raises(ValueError, match="sampled 1 tokens and sent 0 log-probs"):
        talk.transcript.sampled(said)


@given(held=st.lists(st.booleans(), min_size=1, max_size=8), source=st.sampled_from(["sampled", "latest"]))
def test_only_turns_whose_routes_never_came_are_absent(held: list[bool], source: Any) -> None:
    talk, turns = Conversation(source, missing="without_replay"), list[tuple[int, int, bool]]()
    for routes in held:
        before = 0 if not turns else turns[-1][1]
        talk.turn(3, observed=2, routes=routes)
        turns.append((before, len(talk.transcript.tokens) - 1, routes))
    if not any(held):
        assert talk.transcript.arrays()[3] is None
        return
    _, _, routing = check(talk.transcript)
    last = max(number for number, routes in enumerate(held) if routes)
    for number, (start, stop, routes) in enumerate(turns):
        expected = routes if source == "sampled" else number <= last
        assert (routing.present[start:stop] == expected).all()


def test_the_latest_routes_replace_those_sampled_with() -> None:
    talk = Conversation("latest")
    talk.turn(4, version="1")
    assert talk.transcript.routes_from == 0
    talk.turn(2, observed=1, version="2")
    routing = check(talk.transcript)[2]
    assert {span.weight_version for span in routing.spans if span.kind is not SpanKind.MISSING} == {"2"}
