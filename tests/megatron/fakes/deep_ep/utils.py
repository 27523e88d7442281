"""Events of a machine without asynchronous work."""

from __future__ import annotations


class EventHandle: ...


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None: ...

    def current_stream_wait(self) -> None: ...
