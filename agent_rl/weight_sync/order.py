"""What is asked of a weight update and what came of it. Imports no torch: the driver uses both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_rl.weight_sync.digests import RankDigests


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """Send the weights to the engines at ``urls`` in ``dtype`` and call them ``version``.

    ``pause_mode`` is SGLang's (see docs/weight-sync.md); ``timeout`` in seconds bounds each call, rendezvous and
    broadcast. The weights travel in pieces of about ``bucket_bytes``.
    """

    urls: tuple[str, ...]
    version: str
    dtype: str
    pause_mode: str = "abort"
    timeout: float = 120.0
    bucket_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class PublishReport:
    """``failures``: why, by URL, of the engines that may not hold the version; they are left paused, the others sample.

    ``digests``: by an engine's number of tensor ranks, SGLang's checksum of every parameter as each rank should have
    it, from the bytes sent; empty where no engine's can be predicted (:func:`.digests.predictable`). ``verified``: the
    share of engines compared with them. ``stale_caches``: engines that kept prefixes of the old weights (only under
    ``in_place``). ``seconds`` and ``bytes`` of the update by stage.
    """

    failures: Mapping[str, str]
    digests: Mapping[int, RankDigests] = field(default_factory=dict)
    verified: float = 0.0
    stale_caches: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
