"""Which engine serves which session: sticky, so that the prefix cache hits, and load-aware, so that none is swamped."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_REMEMBERED = 1 << 16


class SessionHomes:
    """Keeps each session on the engine it began on; a new one goes where the fewest requests run.

    Plain consistent hashing would pin a session to an engine however busy that is; here load is looked at once, when
    the session begins, and again when its engine failed (:meth:`forget`). The oldest are forgotten past a bound.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("at least one engine URL is needed")
        self._urls = tuple(urls)
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._sessions: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def visit(self, session: str) -> Iterator[str]:
        """The session's engine, counted as busy with one more request inside the context."""
        url = self._home(session)
        self._in_flight[url] += 1
        try:
            yield url
        finally:
            self._in_flight[url] -= 1

    def _home(self, session: str) -> str:
        url = self._homes.get(session)
        if url is None:
            url = min(self._urls, key=lambda each: (self._in_flight[each], self._sessions[each]))
            self._homes[session] = url
            self._sessions[url] += 1
            if len(self._homes) > _REMEMBERED:
                _, oldest = self._homes.popitem(last=False)
                self._sessions[oldest] -= 1
        self._homes.move_to_end(session)
        return url

    def retire(self, url: str) -> None:
        """Send no session to ``url`` any more; those it served begin anew elsewhere. Raises ValueError for the last."""
        if self._urls == (url,):
            raise ValueError(f"{url} is the only engine left")
        self._urls = tuple(each for each in self._urls if each != url)
        self._homes = OrderedDict((session, home) for session, home in self._homes.items() if home != url)

    def forget(self, session: str) -> None:
        """Move the session to another engine than the one it was on, where there is another."""
        url = self._homes.pop(session, None)
        if url is None:
            return
        self._sessions[url] -= 1
        others = [each for each in self._urls if each != url]
        if others:
            home = min(others, key=lambda each: (self._in_flight[each], self._sessions[each]))
            self._homes[session] = home
            self._sessions[home] += 1
