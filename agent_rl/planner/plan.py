"""What a run will take: a plan's parts, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.models.spec import ModelSpec
from agent_rl.planner.memory_model import RankBytes

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes room: ``size`` in bytes, ``note`` says what it is made of."""

    what: str
    size: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """Where items lie. ``count`` places are alike; ``capacity`` in bytes, None where none is known."""

    name: str
    items: tuple[Item, ...]
    capacity: int | None = None
    count: int = 1

    @property
    def total(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the config and what it does to a place that is too small."""

    place: str
    change: str
    total: int
    enough: bool


@dataclass(frozen=True, slots=True)
class RunPlan:
    """``rank`` is the fullest trainer rank's memory; ``problems`` forbid the run on any hardware, and leave it out."""

    name: str
    device: str
    model: ModelSpec
    rank: RankBytes | None
    places: tuple[PlannedPlace, ...]
    traffic: tuple[Item, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[Advice, ...] = ()

    def place(self, name: str) -> PlannedPlace | None:
        return next((place for place in self.places if place.name == name), None)

    def refusal(self) -> str | None:
        """Why this can't run, in one line, with what would help; None where it can."""
        if self.problems:
            return self.problems[0]
        for place in self.places:
            if not place.fits and place.capacity is not None:
                misfit = f"{place.name}: {gib(place.total)} do not fit in {gib(place.capacity)}"
                help_ = [f"{one.change} ({gib(one.total)})" for one in self.advice if one.place == place.name]
                return f"{misfit}; what helps: {', or '.join(help_[:3])}" if help_ else misfit
        return None


def gib(size: float) -> str:
    """Bytes for people: GiB, or MiB below one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
