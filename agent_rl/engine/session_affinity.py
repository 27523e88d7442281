"""Which engine serves which session: sticky, so that the prefix cache hits, and load-aware, so that none is swamped."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_REMEMBERED = 1 << 16


class SessionAffinity:
    """Keeps each session on the engine it began on; a new one goes where the fewest requests run.

    Plain consistent hashing would pin a session to an engine however busy that is; here load is looked at once, when
    the session begins, and again when its engine may not be used any more. The oldest are forgotten past a bound.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._sessions: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def visit(self, session: str, candidates: Sequence[str]) -> Iterator[str]:
        """The session's engine, one of the ``candidates``, counted as busy with one more request in the context."""
        url = self._home(session, candidates)
        self._in_flight[url] += 1
        try:
            yield url
        finally:
            self._in_flight[url] -= 1

    def _home(self, session: str, candidates: Sequence[str]) -> str:
        url = self._homes.get(session)
        if url is None or url not in candidates:
            self._leave(session)
            url = self._homes[session] = min(candidates, key=lambda each: (self._in_flight[each], self._sessions[each]))
            self._sessions[url] += 1
            if len(self._homes) > _REMEMBERED:
                self._leave(next(iter(self._homes)))
        self._homes.move_to_end(session)
        return url

    def _leave(self, session: str) -> None:
        if (url := self._homes.pop(session, None)) is not None:
            self._sessions[url] -= 1
