"""The parts of a plan: what a run needs, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.models.spec import ModelSpec
from agent_rl.planner.assumptions import Assumption
from agent_rl.planner.memory_model import RankBytes

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Item:
    """One consumer of memory, disk or network: ``size`` in bytes; ``note`` explains it."""

    what: str
    size: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class PlannedResource:
    """Memory or disk that ``items`` fill. ``count``: equal resources; ``capacity``: bytes, None if unknown."""

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
    """A change of the config: the new ``total`` of a resource that was too small, and whether that is ``enough``."""

    resource: str
    change: str
    total: int
    enough: bool


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """``seconds`` of a phase, and what ``bound`` them."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The duration of a run. A step has ``rollout``, ``training`` and ``sync``; with ``ahead``, rollout and training
    run at once. ``outside`` of the steps: phases of the whole run. ``gpus``: 0 on CPUs."""

    rollout: PhaseTime
    training: tuple[PhaseTime, ...]
    sync: PhaseTime
    ahead: bool
    steps: int
    outside: tuple[PhaseTime, ...]
    gpus: int
    assumptions: tuple[Assumption, ...]

    @property
    def phases(self) -> tuple[PhaseTime, ...]:
        """The phases of a step."""
        return (self.rollout, *self.training, self.sync)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        training = sum(phase.seconds for phase in self.training)
        sampling = self.rollout.seconds
        return (max(sampling, training) if self.ahead else sampling + training) + self.sync.seconds

    @property
    def hours(self) -> float:
        return (self.steps * self.step + sum(phase.seconds for phase in self.outside)) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus


@dataclass(frozen=True, slots=True)
class RunPlan:
    """``rank``: memory of the fullest trainer rank. With ``problems``, the run is impossible on any hardware and
    ``rank`` is None."""

    name: str
    device: str
    model: ModelSpec
    rank: RankBytes | None
    resources: tuple[PlannedResource, ...]
    traffic: tuple[Item, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[Advice, ...] = ()
    time: TimePlan | None = None

    def resource(self, name: str) -> PlannedResource | None:
        return next((resource for resource in self.resources if resource.name == name), None)

    def refusal(self) -> str | None:
        """Returns in one line why the run does not fit and which changes help; None if it fits."""
        if self.problems:
            return self.problems[0]
        for resource in self.resources:
            if not resource.fits and resource.capacity is not None:
                misfit = f"{resource.name}: {gib(resource.total)} do not fit in {gib(resource.capacity)}"
                helps = [f"{each.change} ({gib(each.total)})" for each in self.advice if each.resource == resource.name]
                return f"{misfit}; what helps: {', or '.join(helps[:3])}" if helps else misfit
        return None


def gib(size: float) -> str:
    """Format bytes as GiB, or as MiB below 1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
