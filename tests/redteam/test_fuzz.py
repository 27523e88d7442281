"""Fuzzed episodes end with a grade on every backend, never with an infrastructure failure."""

from __future__ import annotations

import pytest
from support.contexts import used_backend_of

from tests.redteam.attack import report_stopped
from tests.redteam.fuzz import fuzz

pytestmark = [pytest.mark.redteam, pytest.mark.slow]


async def check(backend: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    async with used_backend_of(backend):
        endings = await fuzz(backend, range(count), at_once=4)
    assert set(endings) <= {"submitted", "max_turns", "time_limit", "parse_failures", "solved"}, capsys.readouterr().out
    report_stopped(f"{count} fuzzed episodes on {backend}", f"each has a grade: {dict(endings)}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "count"),
    [
        pytest.param("bubblewrap", 20, marks=pytest.mark.bubblewrap),
        pytest.param("docker", 10, marks=pytest.mark.docker),
    ],
)
async def test_no_fuzzed_episode_is_an_infrastructure_failure(
    backend: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    await check(backend, count, capsys)


@pytest.mark.exhaustive
@pytest.mark.timeout(10800)
@pytest.mark.parametrize(
    ("backend", "count"),
    [
        pytest.param("bubblewrap", 4000, marks=pytest.mark.bubblewrap),
        pytest.param("docker", 500, marks=pytest.mark.docker),
        pytest.param("podman", 500, marks=pytest.mark.podman),
    ],
)
async def test_none_of_5000_fuzzed_episodes_is_an_infrastructure_failure(
    backend: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    await check(backend, count, capsys)
