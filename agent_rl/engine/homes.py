"""Which engine serves which session: sticky, so that the prefix cache hits, load-aware, so that none is swamped, and
with a memory, so that none is sent to an engine that has just failed."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_REMEMBERED = 1 << 16
REST_SECONDS = 30.0
"""How long no session moves to an engine that did not answer, while another does."""


class SessionHomes:
    """Keeps each session on the engine it began on; a new one goes where the fewest requests run.

    Plain consistent hashing would pin a session to an engine however busy that is; here load is looked at once, when
    the session begins, and again when its engine failed (:meth:`failed`). The oldest are forgotten past a bound.
    """

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not urls:
            raise ValueError("at least one engine URL is needed")
        self._urls = tuple(urls)
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._sessions: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self._clock = clock

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
            url = self._homes[session] = self._best()
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

    def answered(self, url: str) -> None:
        """The engine at ``url`` is well: sessions may begin there again."""
        self._failed_at.pop(url, None)

    def failed(self, session: str) -> None:
        """The session's engine did not answer: it goes on at another where there is one, and others stay away too.

        Which one is looked at when it goes on, for until then more may have turned out to be dead.
        """
        url = self._homes.pop(session, None)
        if url is not None:
            self._failed_at[url] = self._clock()
            self._sessions[url] -= 1

    def _best(self) -> str:
        """One that does not rest, or the one nearest to the end of its rest; of those the least busy."""
        return min(self._urls, key=lambda each: (self._rest(each), self._in_flight[each], self._sessions[each]))

    def _rest(self, url: str) -> float:
        failed = self._failed_at.get(url)
        return 0.0 if failed is None else max(0.0, failed + REST_SECONDS - self._clock())
