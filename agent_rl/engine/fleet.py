"""Which engines may be sent requests: a state machine without I/O or clock.

::

    starting ──▶ joining ──▶ serving ◀──▶ suspect
        ▲           ▲           │            │
        │           ├── stale ──┴────────────┤
        │           │                        ▼
        └───────────┴───────────────────── dead ──▶ retired

An engine joins when it passed the admission checks (*admitted*) and holds the weights published last; before the first
publish the checks are enough. An engine that did not answer a request is suspect until a health check succeeds. An
engine that answers from other weights than the published ones (*stale*: something restarted it) has to join again. Each
death and each stale answer is a loss. An engine with more losses than ``restarts`` is retired; the count is reset when
it lives from one update to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from agent_rl.errors import EngineLost
from agent_rl.utils.concurrency import Notifier

T = TypeVar("T")

MISSES = 3
"""Consecutive failed health checks after which an engine counts as dead."""


class Phase(StrEnum):
    """The phase of an engine's life."""

    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine. ``url`` is empty until it first comes up, and may change with a restart. ``reason``: why it is in its
    phase."""

    name: str
    url: str = ""
    phase: Phase = Phase.STARTING
    admitted: bool = False
    misses: int = 0
    losses: int = 0
    reason: str = ""


class Fleet:
    """The engines of a run, by name. At each change of an engine's phase and when it is admitted, ``listeners`` are
    called with the engine before and after, and ``changed`` wakes those who wait.

    An event that does not fit an engine's phase (a response of an engine that died meanwhile) changes nothing.
    """

    def __init__(self, restarts: int = 0) -> None:
        self.listeners: list[Callable[[Member, Member], None]] = []
        self.changed = Notifier()
        self._restarts = restarts
        self._members: dict[str, Member] = {}
        self._versions: list[str] = []
        self._settled = -1
        self._counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def find(self, url: str) -> Member | None:
        """The engine at ``url``, unless it is retired."""
        matches = [each for each in self._members.values() if each.url == url and each.phase is not Phase.RETIRED]
        return matches[0] if matches else None

    async def until(self, find: Callable[[Fleet], T]) -> T:
        """Wait until ``find`` returns something true, and return it. Raises EngineLost where no engine is left."""
        while not (result := find(self)):
            if (reason := self.lost) is not None:
                raise EngineLost(f"no engine is left: {reason}")
            await self.changed.wait()
        return result

    def urls(self, *phases: Phase) -> tuple[str, ...]:
        """The addresses of the engines in one of ``phases``, in the order in which they were added."""
        return tuple(each.url for each in self._members.values() if each.phase in phases)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def in_use(self) -> tuple[str, ...]:
        """The engines that hold the published weights."""
        return self.urls(Phase.SERVING, Phase.SUSPECT)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The admitted engines that wait for the published weights."""
        joining = (each for each in self._members.values() if each.phase is Phase.JOINING)
        return tuple(each.url for each in joining if each.admitted)

    def candidates(self, tried: Sequence[str] = ()) -> tuple[str, ...]:
        """The engines that a request may be sent to: serving ones that are not among ``tried``, else all serving ones,
        else suspects."""
        serving = self.urls(Phase.SERVING)
        untried = tuple(url for url in serving if url not in tried)
        return untried or serving or self.in_use

    @property
    def lost(self) -> str | None:
        """Why no engine will ever serve again, in one line; None while one may."""
        if any(each.phase is not Phase.RETIRED for each in self._members.values()):
            return None
        return "; ".join(each.reason for each in self._members.values()) or "there is no engine"

    def add(self, name: str, url: str = "") -> None:
        """Add a new engine, which is not up yet, or a retired one that starts over."""
        if name not in self._members or self._members[name].phase is Phase.RETIRED:
            self._members[name] = Member(name, url)

    def up(self, name: str, url: str) -> None:
        """The engine is up, at ``url``."""
        if (member := self._members[name]).phase in (Phase.STARTING, Phase.DEAD):
            self._replace(replace(member, url=url, phase=Phase.JOINING, admitted=False, misses=0))

    def admitted(self, name: str) -> None:
        """The engine passed the admission checks."""
        if (member := self._members[name]).phase is Phase.JOINING:
            ready = replace(member, admitted=True, misses=0)
            self._replace(ready if self._versions else replace(ready, phase=Phase.SERVING))

    def publishing(self, version: str) -> None:
        """From now on responses may be of ``version`` too."""
        if self._versions[-1:] != [version]:
            self._versions.append(version)

    def settled(self) -> None:
        """All engines in use hold the version published last: requests that begin now must be answered from it."""
        self._settled = len(self._versions) - 1

    def published(self, url: str) -> None:
        """The engine at ``url`` holds the version published last."""
        member = self.find(url)
        if member is not None and (member.admitted or member.phase in (Phase.SERVING, Phase.SUSPECT)):
            losses = member.losses if member.phase is Phase.JOINING else 0
            self._replace(replace(member, phase=Phase.SERVING, misses=0, losses=losses))

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._settled != len(self._versions) - 1

    @property
    def floor(self) -> int:
        """The index of the oldest version that a request which begins now may be answered from; for :meth:`accepts`."""
        return self._settled

    def accepts(self, version: str, floor: int) -> bool:
        """Whether a response from weights ``version`` may be used, for a request that began at ``floor``."""
        return floor < 0 or version in self._versions[floor:]

    def stale(self, url: str, version: str) -> None:
        """The engine at ``url`` has weights ``version``, which are not the published ones."""
        if (member := self.find(url)) is not None and member.phase in (Phase.SERVING, Phase.SUSPECT):
            published = self._versions[-1] if self._versions else ""
            reason = f"{url} answers from weights {version!r}, not {published!r}: it was restarted"
            self._lose(member, Phase.JOINING, reason)

    def failed(self, url: str, reason: str) -> None:
        """The engine at ``url`` did not answer a request."""
        if (member := self.find(url)) is not None and member.phase is Phase.SERVING:
            self._replace(replace(member, phase=Phase.SUSPECT, reason=reason))

    def answered(self, name: str) -> None:
        """A health check succeeded."""
        member = self._members[name]
        if member.phase is Phase.SUSPECT or member.misses:  # else nothing changes, as with nearly every request
            phase = Phase.SERVING if member.phase is Phase.SUSPECT else member.phase
            self._replace(replace(member, phase=phase, misses=0))

    def missed(self, name: str, reason: str) -> None:
        """A health check failed."""
        member = self._members[name]
        if member.phase in (Phase.JOINING, Phase.SERVING, Phase.SUSPECT):
            if member.misses + 1 == MISSES:
                self.died(name, reason)
            else:
                phase = Phase.SUSPECT if member.phase is Phase.SERVING else member.phase
                self._replace(replace(member, phase=phase, misses=member.misses + 1, reason=reason))

    def died(self, name: str, reason: str) -> None:
        """The engine is dead, or could not be started."""
        if (member := self._members[name]).phase not in (Phase.DEAD, Phase.RETIRED):
            self._lose(member, Phase.DEAD, reason)

    def restart(self, name: str) -> None:
        """The engine is being restarted."""
        if (member := self._members[name]).phase is Phase.DEAD:
            self._replace(replace(member, phase=Phase.STARTING))

    def retire(self, name: str, reason: str) -> None:
        """The engine is never used again."""
        if (member := self._members[name]).phase is not Phase.RETIRED:
            self._replace(replace(member, phase=Phase.RETIRED, reason=reason))

    def metrics(self) -> dict[str, float]:
        """``engines/*``: how many engines serve now, and counts of events since the last call."""
        counts, self._counts = self._counts, Counter()
        values = {"serving": len(self.urls(Phase.SERVING)), **{name: counts[name] for name in _EVENTS}}
        return {f"engines/{name}": float(value) for name, value in values.items()}

    def _lose(self, member: Member, phase: Phase, reason: str) -> None:
        lost = replace(member, phase=phase, admitted=False, misses=0, losses=member.losses + 1, reason=reason)
        self._replace(lost)
        if lost.losses > self._restarts:
            self._replace(replace(lost, phase=Phase.RETIRED))

    def _replace(self, after: Member) -> None:
        before = self._members[after.name]
        self._members[after.name] = after
        self._counts.update(name for name, fits in _EVENTS.items() if fits(before.phase, after.phase))
        if (before.phase, before.admitted) != (after.phase, after.admitted):
            for listener in self.listeners:
                listener(before, after)
            self.changed.notify()


_EVENTS: dict[str, Callable[[Phase, Phase], bool]] = {
    "suspected": lambda before, after: before is not after is Phase.SUSPECT,
    "stale": lambda before, after: before in (Phase.SERVING, Phase.SUSPECT) and after is Phase.JOINING,
    "deaths": lambda before, after: before is not after is Phase.DEAD,
    "joins": lambda before, after: before is Phase.JOINING and after is Phase.SERVING,
    "retired": lambda before, after: before is not after is Phase.RETIRED,
}
