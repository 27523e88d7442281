"""How much of their time engines had nothing to do, and how many of their places were taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Engine:
    """An engine since ``began``: the requests that it has been running since ``changed``, the seconds before that in
    which it ran none, and the seconds of all requests before that, added up. ``places``: how many it can run at once, 0
    where that is not known."""

    began: float
    changed: float
    places: int = 0
    running: int = 0
    empty: float = 0.0
    worked: float = 0.0

    def pass_to(self, now: float) -> None:
        self.empty += (now - self.changed) * (self.running == 0)
        self.worked += (now - self.changed) * self.running
        self.changed = now

    def begin_anew(self, now: float) -> None:
        self.began, self.empty, self.worked = now, 0.0, 0.0


class EngineLoad:
    """The requests that engines run. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}

    def add(self, url: str, places: int) -> None:
        """The engine at ``url``, which from now on may run ``places`` requests at once (0: nobody knows how many)."""
        self._engine(url).places = places

    @contextmanager
    def running(self, url: str) -> Iterator[None]:
        """Around a request that the engine at ``url`` runs."""
        engine = self._engine(url)
        engine.running += 1
        try:
            yield
        finally:
            engine.pass_to(self._clock())
            engine.running -= 1

    def metrics(self, urls: Sequence[str]) -> dict[str, float]:
        """``engine/*`` of the engines at ``urls`` since this was last asked; without any, none."""
        engines = [self._engine(url) for url in urls]
        now = self._clock()
        spent = [now - engine.began for engine in engines]
        places = sum(engine.places * seconds for engine, seconds in zip(engines, spent, strict=True))
        values = {"engine/empty_fraction": sum(engine.empty for engine in engines) / sum(spent)} if sum(spent) else {}
        if places and all(engine.places for engine in engines):
            values["engine/busy_fraction"] = sum(engine.worked for engine in engines) / places
        for url in self._engines:
            self._engine(url).begin_anew(now)
        return values

    def _engine(self, url: str) -> _Engine:
        """The engine at ``url``, its times up to now."""
        now = self._clock()
        engine = self._engines.setdefault(url, _Engine(now, now))
        engine.pass_to(now)
        return engine
