"""The job and the record of a dry-run rank's process, and the names of phases and groups. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from agent_rl.config import RunConfig

ENGINE_GROUP = "engines"
"""Name of the process group that sends weights to engines."""

STEP_PHASES = ("rest of a step", "old log-probs", "reference", "update", "step")
"""Phases of a global step; the first covers what runs between the others."""
WEIGHT_PHASES = ("export", "publish", "refused publish", "shared publish", "refused shared publish")
"""Phases that send weights: to a directory, to engines, and to engines of which one refuses; the last two only with
``engine.colocate``, through memory that the engines share with the trainer."""

Owner = Literal["weights", "gradients", "optimizer", "activations", "temporaries", "copies", "other state"]
"""Owner of GPU memory. ``activations`` are kept for a backward pass, ``copies`` are weights on their way out,
``temporaries`` have no other owner."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """Rank ``rank`` of ``config`` with the model whose config.json is in directory ``model``. The experts of this rank
    are chosen ``skew`` times as often as those of the mean rank. ``library``: see
    :func:`agent_rl.dryrun.fake_device.build_device_guard`."""

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
    """A phase's ``peak`` bytes of GPU memory by ``owners``, ``flops`` and those of ``attention``, ``seconds`` of its
    operations at the GPU's peak speed, ``sent`` bytes and ``calls`` by group, and ``syncs`` of the host with the
    GPU."""

    peak: int
    flops: int
    sent: dict[str, int]
    syncs: int
    owners: dict[Owner, int] = field(default_factory=dict)
    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    attention: int = 0


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The result of a rank: phases by name, bytes of weights, gradients and optimizer (``static``), bytes of a step
    still allocated after it (``retained``), pinned host memory (``pinned``), the ranks of each group, and the call that
    would fail on a GPU (``fault``, one line; None: no such call)."""

    rank: int
    layers: int
    phases: dict[str, PhaseRecord]
    static: int
    retained: int
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
