"""The request for a weight update and its report. Imports no torch, because the driver uses both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_rl.config import EngineConfig
from agent_rl.weight_sync.digests import DigestKind, RankDigests

PUBLISH_SECONDS = 900.0
"""The longest weight update."""


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Send the weights to the engines at ``urls`` as ``version``, with the settings in ``config``.

    ``gpus``: where engines read the weights on GPUs that they share with the trainer, the names of each engine's GPUs;
    otherwise they receive them by process group. ``headers`` go with every request. They include the API key, which
    workers may lack in their environment, so they are not printed.
    """

    urls: tuple[str, ...]
    version: str
    config: EngineConfig
    gpus: Sequence[Sequence[str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """``failures``: reasons by URL for engines that may lack the version; they stay paused, the others continue.

    ``digests``: by engine kind, the expected checksum of every parameter on each rank; empty where none can be
    predicted (:func:`.digests.predictable`). ``verified``: the share of engines compared with them. ``stale_caches``:
    number of engines that kept prefixes of the old weights (only with ``in_place``). ``seconds``: by phase of the
    update. ``bytes``: sent to each engine, of ``full_bytes`` of all weights where an update may be a delta.
    """

    failures: Mapping[str, str]
    digests: Mapping[DigestKind, RankDigests] = field(default_factory=dict)
    verified: float = 0.0
    stale_caches: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
    full_bytes: int = 0
