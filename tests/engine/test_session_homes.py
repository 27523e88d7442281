"""Sessions keep their engine, and new ones spread by load."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest

from agent_rl.engine.homes import SessionHomes


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
    homes.forget("s")
    assert home(homes, "s") != before
    homes.forget("never seen")


def test_with_one_engine_there_is_nowhere_else_to_go() -> None:
    homes = SessionHomes(["a"])
    assert home(homes, "s") == "a"
    homes.forget("s")
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
