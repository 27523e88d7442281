"""One backend before the sandboxes of several machines: it chooses a machine for each sandbox, and goes on without
lost ones.

A host that has the sandbox's image comes first, and among those the one with the fewest sandboxes. A host holds at
most so many sandboxes, and a start waits for a place. A task that holds a sandbox already does not wait: an
episode's sandboxes for grading are started while the agent's is still there, and episodes would else wait for each
other for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from sandbox.errors import ImageMissingError, SandboxHostLostError, SandboxStartError, SandboxUnavailableError
from sandbox.ray.host import HostReport, Look
from sandbox.ray.remote import RemoteHost
from sandbox.shielded import shielded
from sandbox.timeouts import uncharged
from sandbox.types import Sandbox, SandboxBackend, SandboxSpec

_Wanted = tuple[str, tuple[str, ...]]
"""What a sandbox needs of its host: the image, and the directories that it binds."""


@dataclass(eq=False)
class Place:
    """One host, the backend that starts sandboxes there, and how many it holds. ``fetching``: images on their way to
    it."""

    host: RemoteHost
    backend: SandboxBackend
    sandboxes: int = 0
    looks: dict[_Wanted, Look] = field(default_factory=dict)
    fetching: set[str] = field(default_factory=set)

    def has(self, wanted: _Wanted) -> bool:
        """Whether it has the image, as far as is known, or will have it soon."""
        look = self.looks.get(wanted)
        return (look is not None and look.image_id is not None) or wanted[0] in self.fetching


class ClusterBackend:
    """The sandboxes of all ``places``, at most ``most`` on each. ``pull``: hosts may fetch images that they lack.

    ``tell`` is given one line for every host that is lost.
    """

    def __init__(
        self, places: Sequence[Place], *, most: int, pull: bool = False, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self.places = tuple(places)
        self._most, self._pull, self._tell = most, pull, tell
        self._sandboxes: dict[str, tuple[Place, object]] = {}  # by id: where, and the task that asked for it
        self._pinned: dict[str, Place] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        for place in self.places:
            place.host.on_lost, place.host.on_end = self._lose, self._forget

    @property
    def name(self) -> str:
        return self.places[0].host.name

    @property
    def sandboxes(self) -> int:
        """Sandboxes that were handed out and are not closed."""
        return len(self._sandboxes)

    @property
    def lost(self) -> int:
        """How many hosts were lost."""
        return sum(bool(place.host.lost) for place in self.places)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox on one of the hosts; on another one where that is lost meanwhile.

        Raises what a host's own backend raises; ``ImageMissingError`` also where no host has the image or two have
        different ones; ``SandboxUnavailableError`` where some hosts lack a directory of ``ro_binds``, or all are lost.
        """
        while True:
            place = await self._place_for(spec)
            place.sandboxes += 1
            try:
                sandbox = await self._start(place, spec)
            except SandboxHostLostError:
                self._give_back(place)
                if place in self._pinned.values():
                    raise
            except BaseException:
                self._give_back(place)
                raise
            else:
                self._sandboxes[sandbox.id] = place, asyncio.current_task()
                return sandbox

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs on every host; return how many."""
        return sum(await asyncio.gather(*(place.backend.reap() for place in self._living())))

    async def report(self, place: Place) -> HostReport:
        """What a host says of itself. Raises ``SandboxHostLostError``."""
        report: HostReport = await place.host.ask("report")
        return report

    async def image_ids(self, image: str) -> dict[str, str]:
        """What ``image`` is on each host that has it, by the host's name. Raises as :meth:`start`."""
        wanted = await self._look(SandboxSpec(image=image))
        looks = {place.host.host_name: place.looks.get(wanted) for place in self._living()}
        return {name: look.image_id for name, look in looks.items() if look is not None and look.image_id is not None}

    async def close(self) -> None:
        """Close every sandbox on every host, and the hosts."""
        self._closed = True
        self._wake()
        await shielded(self._close())

    @asynccontextmanager
    async def pipes(self, names: Sequence[str], spec: SandboxSpec) -> AsyncIterator[str]:
        """A directory with named pipes on a host where sandboxes like ``spec`` may be; sandboxes that bind it go
        there."""
        wanted = await self._look(spec)
        place = self._choose(spec, wanted, waits=False)
        assert place is not None, "no host is full for what does not wait"
        directory: str = await place.host.ask("make_pipes", tuple(names))
        self._pinned[directory] = place
        try:
            yield directory
        finally:
            del self._pinned[directory]
            with suppress(SandboxHostLostError):
                await shielded(place.host.ask("remove_pipes", directory))

    async def _start(self, place: Place, spec: SandboxSpec) -> Sandbox:
        image, wanted = spec.image, self._wanted(spec)
        if self._pull and place.looks[wanted].image_id is None:
            place.fetching.add(image)
            try:
                with uncharged():
                    await place.host.ask("fetch", image)
            finally:
                place.fetching.discard(image)
                place.looks.pop(wanted, None)  # it is asked again
        return await place.backend.start(spec)

    async def _place_for(self, spec: SandboxSpec) -> Place:
        """Wait until a host can take a sandbox of ``spec``."""
        waits = all(holder is not asyncio.current_task() for _, holder in self._sandboxes.values())
        while True:
            if self._closed:
                raise SandboxStartError("the backend is closed")
            wanted = await self._look(spec)
            if (place := self._choose(spec, wanted, waits=waits)) is not None:
                return place
            with uncharged():
                await self._change()

    def _choose(self, spec: SandboxSpec, wanted: _Wanted, *, waits: bool) -> Place | None:
        """The host for a sandbox; None where all are full and it ``waits``. Raises where its pipes' host is lost."""
        pinned = [self._pinned[directory] for directory in spec.ro_binds if directory in self._pinned]
        if pinned and pinned[0].host.lost:
            raise SandboxHostLostError(pinned[0].host.lost)
        living = self._living()
        having = [place for place in living if place.has(wanted)]
        for candidates in [pinned] if pinned else [having, living if self._pull else []]:
            free = [place for place in candidates if not waits or place.sandboxes < self._most]
            if free:
                return min(free, key=lambda place: place.sandboxes)
        return None

    async def _look(self, spec: SandboxSpec) -> _Wanted:
        """Have every host looked at for what the sandbox needs, once; raises where that is not as it should be."""
        wanted = self._wanted(spec)
        unknown = [place for place in self._living() if wanted not in place.looks]
        await asyncio.gather(*(self._look_at(place, wanted) for place in unknown))
        looks = {place: place.looks[wanted] for place in self._living() if wanted in place.looks}
        try:
            _check_image(wanted[0], looks, pull=self._pull)
            _check_dirs(looks)
        except (ImageMissingError, SandboxUnavailableError):
            for place in looks:
                del place.looks[wanted]  # so that it can be mended meanwhile
            raise
        return wanted

    async def _look_at(self, place: Place, wanted: _Wanted) -> None:
        with suppress(SandboxHostLostError):
            place.looks[wanted] = await place.host.ask("look", *wanted)

    def _wanted(self, spec: SandboxSpec) -> _Wanted:
        return spec.image, tuple(sorted(spec.ro_binds.keys() - self._pinned.keys()))

    def _living(self) -> list[Place]:
        """The hosts that are not lost. Raises ``SandboxUnavailableError`` where none is left."""
        living = [place for place in self.places if not place.host.lost]
        if not living:
            raise SandboxUnavailableError(f"no sandbox host is left: {'; '.join(p.host.lost for p in self.places)}")
        return living

    def _lose(self, host: RemoteHost) -> None:
        sandboxes = sum(place.host is host for place, _ in self._sandboxes.values())
        self._tell(f"{host.lost}; what ran in its {sandboxes} sandboxes runs again on other hosts")
        self._wake()

    def _forget(self, sandbox: str) -> None:
        place, _ = self._sandboxes.pop(sandbox, (None, None))
        if place is not None:
            self._give_back(place)

    def _give_back(self, place: Place) -> None:
        place.sandboxes -= 1
        self._wake()

    async def _change(self) -> None:
        """Wait until a place is given back, or a host is lost."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for place in self.places:
                group.create_task(place.backend.close())


def _check_image(image: str, looks: dict[Place, Look], *, pull: bool) -> None:
    """Raise ``ImageMissingError`` where no host has ``image`` and none may fetch it, or two have different ones."""
    ids = {place.host.host_name: look.image_id for place, look in looks.items() if look.image_id is not None}
    if len(set(ids.values())) > 1:
        found = ", ".join(f"{name}: {id[:19]}" for name, id in ids.items())
        raise ImageMissingError(
            f"image {image!r} is not the same on all sandbox hosts ({found}): pull or load the one that is meant on "
            "each, or name it by its digest"
        )
    if looks and not ids and not pull:
        names, why = ", ".join(place.host.host_name for place in looks), next(iter(looks.values())).why
        raise ImageMissingError(f"{why} (so on each of the sandbox hosts {names})")


def _check_dirs(looks: dict[Place, Look]) -> None:
    """Raise ``SandboxUnavailableError`` where some hosts lack a directory that others have. Where all lack it, starting
    the sandbox says so."""
    lacking = {place.host.host_name: look.lacking for place, look in looks.items() if look.lacking}
    if lacking and len(lacking) < len(looks):
        name, directories = next(iter(lacking.items()))
        raise SandboxUnavailableError(
            f"ro_binds: {directories[0]}: no such file or directory on the sandbox host {name}, and others have it: "
            "right "
            "would be the same path on every host, on a shared file system say"
        )
