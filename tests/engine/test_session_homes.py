"""Sessions keep their engine, and new ones spread by load."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest

from agent_rl.engine.homes import REST_SECONDS, SessionHomes


def home(homes: SessionHomes, session: str) -> str:
    with homes.visit(session) as url:
        return url


def test_a_session_stays_where_it_began() -> None:
    homes = SessionHomes(["a", "b", "c"])
    first = {f"s{n}": home(homes, f"s{n}") for n in range(30)}
    assert Counter(first.values()) == {"a": 10, "b": 10, "c": 10}
    assert first == {session: home(homes, session) for session in reversed(first)}


def test_new_sessions_avoid_the_busy_engine() -> None:
    homes = SessionHomes(["a", "b"])
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(homes.visit("first"))
        assert {home(homes, f"s{n}") for n in range(8)} == {"b"}
    assert home(homes, "last") == "a"


def test_a_failed_engine_is_left_for_another() -> None:
    homes = SessionHomes(["a", "b"])
    before = home(homes, "s")
    homes.failed("s")
    assert home(homes, "s") != before
    homes.failed("never seen")


def test_no_session_moves_to_an_engine_that_has_just_failed() -> None:
    """With two of eight dead, every session is moved at most once."""
    now = 0.0
    homes = SessionHomes([str(n) for n in range(8)], clock=lambda: now)
    first = {f"s{n}": home(homes, f"s{n}") for n in range(200)}
    moved = [session for session, url in first.items() if url in "01"]
    assert len(moved) == 50
    homes.failed(moved[0])
    homes.failed(next(session for session in moved if first[session] != first[moved[0]]))
    for session in moved[1:]:
        homes.failed(session)
    assert not {home(homes, session) for session in first} & {"0", "1"}
    assert not {home(homes, f"new{n}") for n in range(50)} & {"0", "1"}
    now = REST_SECONDS
    assert {home(homes, f"later{n}") for n in range(120)} >= {"0", "1"}


def test_an_engine_that_answers_again_is_used_again() -> None:
    homes = SessionHomes(["a", "b"])
    assert home(homes, "s") == "a"
    homes.failed("s")
    assert home(homes, "t") == home(homes, "u") == "b"
    homes.answered("a")
    assert home(homes, "v") == "a"


def test_with_one_engine_there_is_nowhere_else_to_go() -> None:
    homes = SessionHomes(["a"])
    assert home(homes, "s") == "a"
    homes.failed("s")
    assert home(homes, "s") == "a"


def test_a_failed_request_is_no_load() -> None:
    homes = SessionHomes(["a", "b"])
    with pytest.raises(RuntimeError), homes.visit("s"):
        raise RuntimeError
    assert home(homes, "t") == "b"
    assert home(homes, "u") == "a"


def test_no_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SessionHomes([])
