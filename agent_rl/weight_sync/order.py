"""What is asked of a weight update and what came of it. Imports no torch: the driver uses both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_rl.config import EngineConfig
from agent_rl.weight_sync.digests import DigestKind, RankDigests


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Send the weights to the engines at ``urls``, as ``config`` says, and call them ``version``.

    ``headers`` go with every request: the key, which the ranks' environment may lack, is among them, so not printed.
    """

    urls: tuple[str, ...]
    version: str
    config: EngineConfig
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """``failures``: why, by URL, of the engines that may not hold the version; they are left paused, the others sample.

    ``digests``: by the kind of an engine, the checksum of every parameter as each of its ranks should have it, from the
    bytes sent; empty where no engine's can be predicted (:func:`.digests.predictable`). ``verified``: the
    share of engines compared with them. ``stale_caches``: engines that kept prefixes of the old weights (only under
    ``in_place``). ``seconds`` and ``bytes`` of the update by stage.
    """

    failures: Mapping[str, str]
    digests: Mapping[DigestKind, RankDigests] = field(default_factory=dict)
    verified: float = 0.0
    stale_caches: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
