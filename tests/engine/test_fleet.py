"""A fleet's states: in whatever order things happen, no answer from unpublished weights is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent_rl.engine.fleet import MISSES, Fleet, Member, Phase

ENGINES = ("a", "b", "c")
RESTARTS = 2
names = st.sampled_from(ENGINES)


def serving(*members: str, restarts: int = RESTARTS) -> Fleet:
    fleet = Fleet(restarts)
    for name in members:
        fleet.add(name, name)
        fleet.up(name, name)
        fleet.admitted(name)
    return fleet


def publish(fleet: Fleet, version: str) -> None:
    fleet.publishing(version)
    for url in fleet.in_use:
        fleet.published(url)
    fleet.settled()


class Lives(RuleBasedStateMachine):
    """Engines that live, die, come back with base weights, and are published to. ``held``: the weights each has."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.held = Fleet(RESTARTS), dict.fromkeys(ENGINES, "base")
        self.seen: list[tuple[Member, Member]] = []
        self.fleet.listeners.append(lambda before, after: self.seen.append((before, after)))
        self.step = 0
        for name in ENGINES:
            self.fleet.add(name, name)

    @rule(name=names)
    def comes_up(self, name: str) -> None:
        if self.fleet[name].phase in (Phase.STARTING, Phase.DEAD):
            self.held[name] = "base"
        self.fleet.up(name, name)

    @rule(name=names)
    def passes_its_checks(self, name: str) -> None:
        self.fleet.admitted(name)

    @rule()
    def everybody_is_published_to(self) -> None:
        self.step += 1
        self.fleet.publishing(str(self.step))
        for url in self.fleet.in_use:
            self.held[url] = str(self.step)
            self.fleet.published(url)
        self.fleet.settled()

    @precondition(lambda self: self.step)
    @rule()
    def one_that_waits_joins(self) -> None:
        for url in self.fleet.waiting[:1]:
            self.held[url] = str(self.step)
            self.fleet.published(url)

    @rule(name=names)
    def is_started_again_unnoticed(self, name: str) -> None:
        self.held[name] = "base"

    @rule(name=names)
    def fails_a_request(self, name: str) -> None:
        self.fleet.failed(name, "hung up")

    @rule(name=names)
    def is_asked_for_its_weights(self, name: str) -> None:
        if self.fleet.accepts(self.held[name], self.fleet.floor):
            self.fleet.answered(name)
        else:
            self.fleet.stale(name, self.held[name])
            assert name not in self.fleet.in_use

    @rule(name=names)
    def keeps_silent(self, name: str) -> None:
        self.fleet.missed(name, "no answer")

    @rule(name=names)
    def dies(self, name: str) -> None:
        self.fleet.died(name, "killed")

    @rule(name=names)
    def is_started(self, name: str) -> None:
        self.fleet.restart(name)

    @invariant()
    def requests_go_to_engines_in_use_alone(self) -> None:
        assert set(self.fleet.candidates()) <= set(self.fleet.in_use)
        assert not set(self.fleet.waiting) & set(self.fleet.in_use)
        assert bool(self.fleet.lost) == all(self.fleet[name].phase is Phase.RETIRED for name in ENGINES)

    @invariant()
    def an_engine_that_joined_after_a_publish_was_published_to(self) -> None:
        """The answers of all others are refused."""
        for url in self.fleet.in_use:
            accepted = self.fleet.accepts(self.held[url], self.fleet.floor)
            assert accepted == (not self.step or self.held[url] == str(self.step))

    @invariant()
    def the_retired_stay_retired_and_losses_are_bounded(self) -> None:
        assert not any(before.phase is Phase.RETIRED for before, _ in self.seen)
        for name in ENGINES:
            assert self.fleet[name].losses <= RESTARTS + 1
            assert (self.fleet[name].losses > RESTARTS) <= (self.fleet[name].phase is Phase.RETIRED)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_response_may_have_any_version_published_since_its_request_began() -> None:
    fleet = serving("a")
    assert fleet.accepts("default", fleet.floor), "nothing was published"
    publish(fleet, "1")
    before = fleet.floor
    fleet.publishing("2")
    during = fleet.floor
    assert [fleet.accepts(version, during) for version in ("0", "1", "2")] == [False, True, True]
    fleet.settled()
    assert [fleet.accepts(version, before) for version in ("1", "2")] == [True, True]
    assert [fleet.accepts(version, fleet.floor) for version in ("1", "2", "default", "")] == [False, True, False, False]


def test_an_update_resets_the_losses() -> None:
    fleet = serving("a", restarts=1)
    publish(fleet, "1")
    fleet.stale("a", "default")
    fleet.admitted("a")
    fleet.published("a")
    assert replace(fleet["a"], reason="") == Member("a", "a", Phase.SERVING, admitted=True, losses=1)
    publish(fleet, "2")
    assert fleet["a"].losses == 0
    for version in ("x", "y"):
        fleet.stale("a", version)
        fleet.admitted("a")
        fleet.published("a")
    assert fleet["a"].phase is Phase.RETIRED
    assert fleet.lost == "a answers from weights 'y', not '2': it was restarted"


def test_tried_engines_and_suspects_are_the_last_resort() -> None:
    fleet = serving("a", "b", "c")
    assert fleet.candidates(["a"]) == ("b", "c")
    fleet.failed("b", "hung up")
    assert fleet.candidates(["a"]) == ("c",)
    assert fleet.candidates(["a", "c"]) == ("a", "c"), "tried, but sound"
    fleet.failed("a", "hung up")
    fleet.failed("c", "hung up")
    assert fleet.candidates(["a"]) == ("a", "b", "c"), "there is nothing better"


@pytest.mark.parametrize("phase", [Phase.SERVING, Phase.JOINING])
def test_an_engine_is_dead_after_several_missed_responses(phase: Phase) -> None:
    fleet = serving("a")
    publish(fleet, "1")
    if phase is Phase.JOINING:
        fleet.stale("a", "default")
    for _ in range(MISSES - 1):
        fleet.missed("a", "no answer")
        assert fleet["a"].phase in (Phase.SUSPECT, Phase.JOINING)
    fleet.missed("a", "no answer")
    assert fleet["a"].phase is Phase.DEAD


def test_events_are_counted_once() -> None:
    fleet = serving("a", "b")
    publish(fleet, "1")
    fleet.metrics()
    fleet.failed("a", "hung up")
    fleet.died("a", "killed")
    fleet.stale("b", "default")
    fleet.admitted("b")
    fleet.published("b")
    expected = {"serving": 1, "joins": 1, "suspected": 1, "deaths": 1, "stale": 1, "retired": 0}
    assert fleet.metrics() == {f"engines/{name}": count for name, count in expected.items()}
    assert fleet.metrics()["engines/deaths"] == 0
