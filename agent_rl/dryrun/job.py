"""The job of a rehearsed rank's process, and its record. Small values without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agent_rl.config import RunConfig
from agent_rl.dryrun.names import Owner


@dataclass(frozen=True, slots=True)
class RankJob:
    """Rank ``rank`` of ``config`` over the model whose config.json is in directory ``model``. Experts of this rank are
    chosen ``skew`` times as often as a rank's mean. ``library``: of :func:`agent_rl.dryrun.fake_device.build_guard`."""

    config: RunConfig
    model: Path
    rank: int
    skew: float
    library: Path

    def dump(self) -> bytes:
        return orjson.dumps(
            {
                "config": self.config.model_dump(mode="json"),
                "model": str(self.model),
                "rank": self.rank,
                "skew": self.skew,
                "library": str(self.library),
            }
        )

    @classmethod
    def load(cls, data: bytes) -> RankJob:
        raw = orjson.loads(data)
        config, library = RunConfig.model_validate(raw["config"]), Path(raw["library"])
        return cls(config, Path(raw["model"]), raw["rank"], raw["skew"], library)


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase's ``peak`` bytes of GPU memory and their ``owners``, ``flops``, the ``seconds`` of its operations, bytes
    ``sent`` and ``calls`` by group, and ``syncs`` of the host."""

    peak: int
    flops: int
    sent: dict[str, int]
    syncs: int
    owners: dict[Owner, int] = field(default_factory=dict)
    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's answer: its phases by name, bytes of weights, gradients and optimizer (``static``), what is still held
    of a step after it (``left``), host memory that is locked (``pinned``), the ranks of each group, and the call that
    would fail on a GPU (``fault``, in one line; None: none was found)."""

    rank: int
    layers: int
    phases: dict[str, PhaseRecord]
    static: int
    left: int
    pinned: int
    groups: dict[str, list[int]]
    seconds: float
    fault: str | None = None

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases.values())

    def dump(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def load(cls, data: bytes) -> RankRecord:
        raw: dict[str, Any] = orjson.loads(data)
        return cls(**raw | {"phases": {name: PhaseRecord(**phase) for name, phase in raw["phases"].items()}})
