"""Sessions keep their engine, and new ones spread by load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from sound_server import SPEC, SoundServer
from support.local_server import serving

from agent_rl.engine.routing import SessionAffinity
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.types import SamplingParams


def home(homes: SessionAffinity, session: str, urls: Sequence[str] = "ab") -> str:
    with homes.request(session, urls) as url:
        return url


def test_a_session_keeps_its_engine() -> None:
    homes = SessionAffinity()
    first = {f"s{n}": home(homes, f"s{n}", "abc") for n in range(30)}
    assert Counter(first.values()) == {"a": 10, "b": 10, "c": 10}
    assert first == {session: home(homes, session, "abc") for session in reversed(first)}


def test_new_sessions_avoid_the_busy_engine() -> None:
    homes = SessionAffinity()
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(homes.request("first", "ab"))
        assert {home(homes, f"s{n}") for n in range(8)} == {"b"}
    assert home(homes, "last") == "a"


def test_a_session_leaves_an_excluded_engine() -> None:
    homes = SessionAffinity()
    assert home(homes, "s") == "a"
    assert home(homes, "s", "bc") == "b"
    assert home(homes, "s", "abc") == "b", "and stays where it went"
    assert home(homes, "t", "ab") == "a", "which it left has no session any more"


def test_a_failed_request_is_no_load() -> None:
    homes = SessionAffinity()
    with pytest.raises(RuntimeError), homes.request("s", "ab"):
        raise RuntimeError
    assert home(homes, "t") == "b"
    assert home(homes, "u") == "a"


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_rl.engine.routing.MAX_SESSIONS", 2)
    homes = SessionAffinity()
    assert [home(homes, session) for session in "stu"] == ["a", "b", "a"]
    assert home(homes, "v") == "a", "s is forgotten: each engine has one session"


async def test_a_session_keeps_its_data_parallel_rank() -> None:
    server = SoundServer(dp_ranks=2)
    async with serving(server.handle) as url, SGLangEngine(url, SPEC) as engine:
        for session in "abcdef" * 2:
            await engine.generate([ord(session)] * 50, SamplingParams(max_new_tokens=1), routes_from=0, session=session)
    ranks = {(prompt[0], rank) for prompt, rank in server.requests if len(prompt) == 50}
    assert len(ranks) == 6, "one rank a session"
    assert {rank for _, rank in ranks} == {0, 1}
