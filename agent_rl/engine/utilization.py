"""The engines' idle time and the share of their request slots in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Engine:
    """Measurements of one engine since ``began``. ``changed``: time of the last update; ``running``: requests
    running since then. ``empty``: seconds without any request; ``worked``: sum over requests of their seconds.
    ``slots``: requests that it can run at once, 0 if unknown."""

    began: float
    changed: float
    slots: int = 0
    running: int = 0
    empty: float = 0.0
    worked: float = 0.0

    def advance(self, now: float) -> None:
        self.empty += (now - self.changed) * (self.running == 0)
        self.worked += (now - self.changed) * self.running
        self.changed = now

    def reset(self, now: float) -> None:
        self.began, self.empty, self.worked = now, 0.0, 0.0


class EngineUtilization:
    """The requests that the engines run. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}

    def add(self, url: str, slots: int) -> None:
        """Set the number of requests that the engine at ``url`` can run at once (0: unknown)."""
        self._engine(url).slots = slots

    @contextmanager
    def running(self, url: str) -> Iterator[None]:
        """Counts a request that the engine at ``url`` runs within the block."""
        engine = self._engine(url)
        engine.running += 1
        try:
            yield
        finally:
            engine.advance(self._clock())
            engine.running -= 1

    def metrics(self, urls: Sequence[str]) -> dict[str, float]:
        """``engine/*`` of the engines at ``urls`` since the last call; empty without engines."""
        engines = [self._engine(url) for url in urls]
        now = self._clock()
        spent = [now - engine.began for engine in engines]
        slots = sum(engine.slots * seconds for engine, seconds in zip(engines, spent, strict=True))
        values = {"engine/empty_fraction": sum(engine.empty for engine in engines) / sum(spent)} if sum(spent) else {}
        if slots and all(engine.slots for engine in engines):
            values["engine/busy_fraction"] = sum(engine.worked for engine in engines) / slots
        for url in self._engines:
            self._engine(url).reset(now)
        return values

    def _engine(self, url: str) -> _Engine:
        """The engine at ``url`` with its times updated."""
        now = self._clock()
        engine = self._engines.setdefault(url, _Engine(now, now))
        engine.advance(now)
        return engine
