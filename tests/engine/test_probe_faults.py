"""The probe's verdict on a sound server, and on the same server behind nine proxies that each damage its routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from engine_proxy import Fault, Lags, Request, Rows, proxy
from sound_server import SPEC, TOP_K, SoundServer, rows_of
from support.local_server import serving

from agent_rl.engine.route_probe.checks import CheckStatus
from agent_rl.engine.route_probe.conversations import COMPLETION, OBSERVATION
from agent_rl.engine.route_probe.run import ProbeReport, probe


def dp_rank(request: Request) -> int:
    return int(request.get("routed_dp_rank", 0))


def sequence(request: Request, answer: Mapping[str, Any]) -> list[int]:
    """The tokens whose rows the answer holds."""
    return [*request["input_ids"], *answer["output_ids"]][request["routed_experts_start_len"] : -1]


class Stale(Fault):
    """Rows of cached tokens are those of the request that used the cache's places before."""

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        cached = max(0, answer["meta_info"]["cached_tokens"] - request["routed_experts_start_len"])
        rows[:cached] = rows_of([7] * cached)
        return rows


class OfASibling(Fault):
    """Where two requests run in one batch, each gets the other's rows for the tokens that it samples."""

    last: Rows | None = None

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        sampled = len(answer["output_ids"])
        other, self.last = self.last, rows[-sampled:].copy()
        if other is not None and len(other) == sampled > 1:
            rows[-sampled:] = other
        return rows


class Zeroed(Fault):
    """Sampled tokens have no rows in the buffer."""

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        rows[1 - len(answer["output_ids"]) or len(rows) :] = 0
        return rows


class Truncated(Fault):
    """Rows after the first hundred are lost."""

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        return rows[:100]


class OfAnotherVersion(Fault):
    """Data-parallel rank 1 missed the last weight update; it reports its version, or the published one."""

    def __init__(self, version: str) -> None:
        self.version = version

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        super().answer(request, answer)
        if dp_rank(request):
            answer["meta_info"]["weight_version"] = self.version

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        if not dp_rank(request):
            return rows
        tokens = [*request["input_ids"], *answer["output_ids"]][:-1]
        return rows_of(tokens, weights=7)[request["routed_experts_start_len"] :]


class RankMissing(Fault):
    """Data-parallel rank 1 captures no routes."""

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        if dp_rank(request):
            del answer["meta_info"]["routed_experts"]


class PromptMissing(Fault):
    """The rows of the prompt stay on the prefill server."""

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        return rows[len(rows) - len(answer["output_ids"]) + 1 :]


class OfADecodeServer(Fault):
    """A decode server of SGLang 0.5.23: zeros for the prompt, and no routes where the prefill server sampled all."""

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        super().answer(request, answer)
        if len(answer["output_ids"]) == 1:
            del answer["meta_info"]["routed_experts"]

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        rows[: len(rows) - len(answer["output_ids"]) + 1] = 0
        return rows


class DraftsMixedIn(Fault):
    """Every third sampled token has the row of a rejected draft."""

    def rows(self, request: Request, answer: Mapping[str, Any], rows: Rows) -> Rows:
        sampled = rows[len(rows) - len(answer["output_ids"]) + 1 :]
        sampled[::3] = rows_of([11] * len(sampled[::3]))
        return rows


SECOND_PASS = "conversations alike in a second pass"
LENGTH = "rows after length"
CASES: list[tuple[str, Fault, str, str]] = [
    ("shifted", Lags(), "row i is token i's", "rows diverge 1 after the token at which prompts diverge"),
    ("stale", Stale(), "cold and cached alike", "of the stored sets differ, first in row 0"),
    ("of a sibling", OfASibling(), SECOND_PASS, "sampled tokens: "),
    ("zeroed", Zeroed(), "distinct ids in range", "rows are zeros: they were not captured"),
    ("truncated", Truncated(), LENGTH, "expected 167 rows, received 100"),
    ("of another version", OfAnotherVersion("7"), "weight version", "versions 7, 8 alternate: not all ranks have"),
    ("of another version, unsaid", OfAnotherVersion("8"), SECOND_PASS, "data-parallel rank "),
    (
        "rank 1 missing",
        RankMissing(),
        "key in every response",
        "responses lack routed_experts, all of data-parallel",
    ),
    ("prompt rows missing", PromptMissing(), LENGTH, "expected 167 rows, received 7: the prompt's are missing"),
    ("of a decode server", OfADecodeServer(), "distinct ids in range", "rows are zeros: they were not captured"),
    ("drafts mixed in", DraftsMixedIn(), SECOND_PASS, "sampled tokens: "),
]


@pytest.mark.parametrize("dp_ranks", [1, 2])
async def test_a_sound_server_passes(dp_ranks: int) -> None:
    async with serving(SoundServer(dp_ranks).handle) as url, proxy(url, Fault()) as passing:
        report = await probe(passing, SPEC)
    assert report.failed == ()
    assert [check.name for check in report.checks if check.status is CheckStatus.SKIPPED] == ["rows after a retraction"]
    assert finding(report, SECOND_PASS) == "4 at once: equal"


@pytest.mark.parametrize(("name", "fault", "check", "expected"), CASES, ids=[case[0] for case in CASES])
async def test_each_damage_is_named(name: str, fault: Fault, check: str, expected: str) -> None:
    fault.layers, fault.top_k = SPEC.num_layers, TOP_K
    async with serving(SoundServer(dp_ranks=2).handle) as url, proxy(url, fault) as damaging:
        report = await probe(damaging, SPEC)
    assert expected in finding(report, check)
    assert f"{check}: " in report.line()
    assert report.spoils(missing_allowed=False)
    assert np.all([each.advice for each in report.failed])


def finding(report: ProbeReport, name: str) -> str:
    return next(check.finding for check in report.checks if check.name == name)


@pytest.mark.parametrize(("cache", "longest"), [(4096, 399), (799, 160)])
async def test_a_conversation_crosses_a_chunk_where_there_is_room(cache: int, longest: int) -> None:
    server = SoundServer()
    server.info["max_total_num_tokens"] = cache
    async with serving(server.handle) as url:
        assert (await probe(url, SPEC)).failed == ()
    conversations = [len(prompt) for prompt, _ in server.requests]
    assert max(conversations) == longest + 3 * COMPLETION + 2 * OBSERVATION
