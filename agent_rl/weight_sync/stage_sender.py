"""The sender of weights in a pipeline stage that is not the first; see :mod:`.stage_turns`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import Tensor

from agent_rl.errors import WeightSyncError
from agent_rl.weight_sync.bucket_sender import BucketSender, PhaseTimer, UpdateProgress
from agent_rl.weight_sync.digests import DigestKind, Digests
from agent_rl.weight_sync.stage_turns import StagePart, StageTurns


class StageSender(BucketSender):
    """Sends the weights of one stage; :class:`.publisher.WeightPublisher` of rank 0 does the rest of an update."""

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: str, turns: StageTurns) -> Mapping[str, str]:
        """Send the stage's ``weights`` (Hugging Face names) when it is its turn. Returns the failures that rank 0
        reports (:class:`.requests.PublishReport`)."""
        timer, connected = PhaseTimer(), False
        with suppress(WeightSyncError):  # rank 0 reports it
            if not all(turns.gather(self._group is not None)):
                turns.run(self._connect)
            connected = True
        kinds: frozenset[DigestKind] = turns.gather(frozenset())[0]
        progress = UpdateProgress(Digests(self._model_spec, kinds))
        stage_buckets = self._weight_buckets(weights, progress, turns)
        if connected:
            with suppress(WeightSyncError):
                self._send_in_turn(stage_buckets, version, timer, turns)
        for _ in stage_buckets:  # after a failure: a later load from disk needs the checksums of unsent buckets
            pass
        turns.gather(StagePart(progress.bytes, progress.expected(), timer.seconds))
        failures: Mapping[str, str] = turns.gather({})[0]
        return failures

    def _connect(self) -> None:
        if self._group is None:
            self._receivers.query_info()
            self._join()
