"""Which engines may be sent requests: a state machine, without input, output or clock.

::

    starting ──▶ joining ──▶ serving ◀──▶ suspect
        ▲           ▲           │            │
        │           ├── stale ──┴────────────┤
        │           │                        ▼
        └───────────┴───────────────────── dead ──▶ retired

An engine joins when it was checked (*admitted*) and holds the weights that were published last; where nothing was
published yet, the checks are enough. One that did not answer a request is suspect until a question about its health is
answered; one that answers from other weights than the published ones (*stale*: its supervisor started it again) has to
join again. Each time that an engine dies or is stale is a loss; one with more losses than ``restarts`` is retired, and
losses are forgotten when it lives from one update to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

MISSES = 3
"""Questions about its health in a row that an engine leaves unanswered before it counts as dead."""


class Phase(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine. ``url`` is empty until it first came up, and may change with a restart; ``reason``: of its phase."""

    name: str
    url: str = ""
    phase: Phase = Phase.STARTING
    admitted: bool = False
    misses: int = 0
    losses: int = 0
    reason: str = ""


class Fleet:
    """The engines of a run, by name. ``listeners`` are called with a member as it was and as it is, at each change of
    its phase and when it was admitted.

    An event that does not fit a member's phase (an answer of an engine that died meanwhile) changes nothing.
    """

    def __init__(self, restarts: int = 0) -> None:
        self.listeners: list[Callable[[Member, Member], None]] = []
        self._restarts = restarts
        self._members: dict[str, Member] = {}
        self._versions: list[str] = []
        self._settled = -1
        self._counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def find(self, url: str) -> Member | None:
        """The member at ``url``, unless it is retired."""
        found = [each for each in self._members.values() if each.url == url and each.phase is not Phase.RETIRED]
        return found[0] if found else None

    def urls(self, *phases: Phase) -> tuple[str, ...]:
        """Where the engines in one of ``phases`` are, in the order in which they were added."""
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
        """The engines that lack nothing but the published weights."""
        joining = (each for each in self._members.values() if each.phase is Phase.JOINING)
        return tuple(each.url for each in joining if each.admitted)

    def candidates(self, tried: Sequence[str] = ()) -> tuple[str, ...]:
        """The engines to send a request to that failed at those ``tried``: serving ones, or else suspects."""
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
        """A new engine, which is not known to answer, or a retired one that begins anew."""
        if name not in self._members or self._members[name].phase is Phase.RETIRED:
            self._members[name] = Member(name, url)

    def up(self, name: str, url: str) -> None:
        """It answers, at ``url``."""
        if (member := self._members[name]).phase in (Phase.STARTING, Phase.DEAD):
            self._turn(replace(member, url=url, phase=Phase.JOINING, admitted=False, misses=0))

    def admitted(self, name: str) -> None:
        """It passed the checks."""
        if (member := self._members[name]).phase is Phase.JOINING:
            ready = replace(member, admitted=True, misses=0)
            self._turn(ready if self._versions else replace(ready, phase=Phase.SERVING))

    def publishing(self, version: str) -> None:
        """From now on answers may be of ``version`` too."""
        if self._versions[-1:] != [version]:
            self._versions.append(version)

    def settled(self) -> None:
        """The version that was published last is everywhere: requests that begin now are answered from no other."""
        self._settled = len(self._versions) - 1

    def published(self, url: str) -> None:
        """The engine at ``url`` holds the version that was published last."""
        member = self.find(url)
        if member is not None and (member.admitted or member.phase in (Phase.SERVING, Phase.SUSPECT)):
            losses = member.losses if member.phase is Phase.JOINING else 0
            self._turn(replace(member, phase=Phase.SERVING, misses=0, losses=losses))

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._settled != len(self._versions) - 1

    @property
    def floor(self) -> int:
        """To be kept with a request that begins now, for :meth:`accepts`."""
        return self._settled

    def accepts(self, version: str, floor: int) -> bool:
        """Whether an answer from weights ``version`` may be used, of a request that began at ``floor``."""
        return floor < 0 or version in self._versions[floor:]

    def stale(self, url: str, version: str) -> None:
        """The engine at ``url`` has weights ``version``, which are not the published ones."""
        if (member := self.find(url)) is not None and member.phase in (Phase.SERVING, Phase.SUSPECT):
            wanted = self._versions[-1] if self._versions else ""
            reason = f"{url} answers from weights {version!r}, not {wanted!r}: it was started again"
            self._lose(member, Phase.JOINING, reason)

    def failed(self, url: str, reason: str) -> None:
        """The engine at ``url`` did not answer a request."""
        if (member := self.find(url)) is not None and member.phase is Phase.SERVING:
            self._turn(replace(member, phase=Phase.SUSPECT, reason=reason))

    def answered(self, name: str) -> None:
        """It answered a question about its health."""
        member = self._members[name]
        if member.phase is Phase.SUSPECT or member.misses:  # else nothing changes, as with nearly every request
            phase = Phase.SERVING if member.phase is Phase.SUSPECT else member.phase
            self._turn(replace(member, phase=phase, misses=0))

    def missed(self, name: str, reason: str) -> None:
        """It did not answer a question about its health."""
        member = self._members[name]
        if member.phase in (Phase.JOINING, Phase.SERVING, Phase.SUSPECT):
            if member.misses + 1 == MISSES:
                self.died(name, reason)
            else:
                phase = Phase.SUSPECT if member.phase is Phase.SERVING else member.phase
                self._turn(replace(member, phase=phase, misses=member.misses + 1, reason=reason))

    def died(self, name: str, reason: str) -> None:
        """It is known to be dead, or could not be started."""
        if (member := self._members[name]).phase not in (Phase.DEAD, Phase.RETIRED):
            self._lose(member, Phase.DEAD, reason)

    def restart(self, name: str) -> None:
        """It is being started again."""
        if (member := self._members[name]).phase is Phase.DEAD:
            self._turn(replace(member, phase=Phase.STARTING))

    def retire(self, name: str, reason: str) -> None:
        """It is never used again."""
        if (member := self._members[name]).phase is not Phase.RETIRED:
            self._turn(replace(member, phase=Phase.RETIRED, reason=reason))

    def metrics(self) -> dict[str, float]:
        """``engines/*``: how many engines serve now, and what happened since this was last asked."""
        counts, self._counts = self._counts, Counter()
        values = {"serving": len(self.urls(Phase.SERVING)), **{name: counts[name] for name in _EVENTS}}
        return {f"engines/{name}": float(value) for name, value in values.items()}

    def _lose(self, member: Member, phase: Phase, reason: str) -> None:
        lost = replace(member, phase=phase, admitted=False, misses=0, losses=member.losses + 1, reason=reason)
        self._turn(lost)
        if lost.losses > self._restarts:
            self._turn(replace(lost, phase=Phase.RETIRED))

    def _turn(self, after: Member) -> None:
        before = self._members[after.name]
        self._members[after.name] = after
        self._counts.update(name for name, fits in _EVENTS.items() if fits(before.phase, after.phase))
        if (before.phase, before.admitted) != (after.phase, after.admitted):
            for listener in self.listeners:
                listener(before, after)


_EVENTS: dict[str, Callable[[Phase, Phase], bool]] = {
    "suspected": lambda before, after: before is not after is Phase.SUSPECT,
    "stale": lambda before, after: before in (Phase.SERVING, Phase.SUSPECT) and after is Phase.JOINING,
    "deaths": lambda before, after: before is not after is Phase.DEAD,
    "joins": lambda before, after: before is Phase.JOINING and after is Phase.SERVING,
    "retired": lambda before, after: before is not after is Phase.RETIRED,
}
