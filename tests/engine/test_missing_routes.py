"""``r3.missing`` and ``r3.source`` against the real server, behind a proxy that drops the key now and then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_proxy import Fault, Rows, StripsEvery, proxy

from agent_rl.config import EngineConfig, R3Config
from agent_rl.controller.advantages import build_samples
from agent_rl.controller.route_checks import check_missing_budget
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import RoutesMissingError
from agent_rl.models.spec import read_model_spec
from agent_rl.rollout.metrics import missing_token_fraction
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import Group, SamplingParams, StopReason, Trajectory
from r3.routing import SpanKind, validate

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TURNS, SAMPLED, OBSERVED, OPENING = 4, 6, 5, 30


class Counts(Fault):
    """Counts the rows that pass."""

    rows_sent = 0

    def rows(self, request: dict[str, Any], answer: Mapping[str, Any], rows: Rows) -> Rows:
        self.rows_sent += len(rows)
        return rows


@pytest.fixture
async def client_of(model: Path, engine_config: EngineConfig) -> AsyncIterator[Any]:
    opened: list[SGLangEngine] = []

    def client(url: str) -> SGLangEngine:
        opened.append(SGLangEngine(url, read_model_spec(model), engine_config))
        return opened[-1]

    yield client
    for engine in opened:
        await engine.close()


async def converse(engine: SGLangEngine, reward: float, seed: int, **r3: Any) -> Trajectory:
    """An episode's tokens as the loop collects them, under a config's policy."""
    rng = np.random.default_rng(seed)
    transcript = Transcript(rng.integers(2, 250, OPENING).tolist(), max_tokens=1000, routes=R3Config(**r3))
    for turn in range(TURNS):
        sampling = SamplingParams(max_new_tokens=SAMPLED)
        session, start = f"{seed}", transcript.routes_from
        transcript.sampled(await engine.generate(transcript.tokens, sampling, routes_from=start, session=session))
        if turn < TURNS - 1:
            transcript.observed(rng.integers(2, 250, OBSERVED).tolist())
    tokens, mask, logprobs, routing = transcript.arrays()
    return Trajectory(
        task_id="t", env="e", tokens=tokens, loss_mask=mask, logprobs=logprobs, routing=routing,
        stop=StopReason.SUBMITTED, reward=reward, resolved=bool(reward), turns=(), messages=(),
        versions=transcript.versions,
    )  # fmt: skip


async def test_a_missing_key_stops_the_run_unless_it_may_be_missing(server: str, client_of: Any) -> None:
    async with proxy(server, StripsEvery(nth=3)) as url:
        with pytest.raises(RoutesMissingError, match=rf"{url}: turn 2: expected rows \[\d+, \d+\) .* received none"):
            await converse(client_of(url), 1.0, 0)


async def test_native_leaves_holes_that_are_counted(server: str, client_of: Any) -> None:
    async with proxy(server, StripsEvery(nth=3)) as url:
        # Of eight answers the third and the sixth lack routes: the one's last turn but one, the other's second.
        members = [
            await converse(client_of(url), reward, seed, missing="without_replay")
            for seed, reward in ((1, 1.0), (2, 0.0))
        ]
    whole = await converse(client_of(server), 1.0, 1)
    per_turn, needed = OBSERVED + SAMPLED, OPENING + TURNS * (OBSERVED + SAMPLED) - OBSERVED - 1
    for member, first in zip(members, (OPENING + SAMPLED - 1 + per_turn, OPENING + SAMPLED - 1), strict=True):
        routing = member.routing
        assert routing is not None
        validate(routing)
        assert np.flatnonzero(~routing.present[:-1]).tolist() == list(range(first, first + per_turn))
        (hole,) = [span for span in routing.spans[:-1] if span.kind is SpanKind.MISSING]
        assert (hole.start, hole.stop, hole.engine) == (first, first + per_turn, url)
        assert member.routes_missing == per_turn
        assert member.routes_needed == needed
    prompt = slice(0, OPENING - 1)
    assert whole.routing is not None
    assert members[0].routing is not None
    np.testing.assert_array_equal(
        np.sort(members[0].routing.experts[prompt], 2), np.sort(whole.routing.experts[prompt], 2)
    )
    assert missing_token_fraction(members) == pytest.approx(per_turn / needed)
    group = [Group("t", tuple(members))]
    assert len(build_samples(group).samples) == 2
    policy = {"missing": "without_replay", "missing_budget": 0.1}
    with pytest.raises(RoutesMissingError, match=r"step 1: 16.18% of its tokens lack routes, r3.missing_budget=0.1"):
        check_missing_budget(1, group, R3Config(**policy))


async def test_drop_sample_leaves_out_whole_trajectories(server: str, client_of: Any) -> None:
    async with proxy(server, StripsEvery(nth=6)) as url:
        group = [await converse(client_of(url), float(seed == 0), seed, missing="drop_sample") for seed in range(3)]
    assert [member.routes_missing > 0 for member in group] == [False, True, True]
    result = build_samples([Group("t", (*group, group[0]))], drop_missing=True)
    assert result.dropped == 2
    assert result.samples == (), "the two that are left have one reward"


async def test_the_latest_routes_cost_the_whole_prefix_every_turn(server: str, client_of: Any) -> None:
    sent: dict[str, int] = {}
    for source in ("sampled", "latest"):
        counts = Counts()
        async with proxy(server, counts) as url:
            trajectory = await converse(client_of(url), 1.0, 5, source=source)
        sent[source] = counts.rows_sent
        assert trajectory.routing is not None
        validate(trajectory.routing)
        assert trajectory.routes_missing == 0
    ends = [OPENING + SAMPLED + turn * (OBSERVED + SAMPLED) - 1 for turn in range(TURNS)]
    assert sent == {"sampled": ends[-1], "latest": sum(ends)}
