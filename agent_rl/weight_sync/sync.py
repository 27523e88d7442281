"""Brings every engine to the trainer's weights, and keeps one that cannot be brought there from being used.

::

    all together, by process group ──▶ one by one ──▶ from disk ──▶ its last good version, and out of use
            │                              │              │
            └──────────────────────────────┴──────────────┴──▶ checksums and log-probs agree ──▶ in use

An arrow to the right is taken by the engines that failed; each way is tried once. One that died meanwhile is out of use
until it comes back; then it gets the weights alone (:meth:`WeightSync.join`). Until an engine has been checked it stays
paused (what only the log-probs can tell comes just after), so no token is sampled from weights that are part old and
part new. What is loaded from disk is the trainer's own current weights, exported when an engine needs them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from agent_rl.config import RunConfig
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.types import EngineInfo
from agent_rl.errors import EngineError, WeightSyncError
from agent_rl.models.spec import ModelSpec
from agent_rl.types import Sample, TokenIds
from agent_rl.weight_sync.digests import DigestKind, RankDigests, differing
from agent_rl.weight_sync.order import PublishReport
from agent_rl.weight_sync.receivers import WeightReceivers

PROBE_TOKENS = 128


def difference_limit(dtype: str, kv_dtype: str) -> float:
    """What engine and trainer may differ by on the fixed sequence, in nats a token, where the engine computes in
    ``dtype`` and keeps keys and values in ``kv_dtype``.

    By rounding to bfloat16 they differ by a mean of about 0.03, and where keys and values are kept in fp8 by 0.14 to
    0.44 in 195 updates (docs/paper-runs); weights that did not arrive, or arrived under wrong names, by whole nats.
    """
    return 1.0 if kv_dtype.startswith("fp8") else {"bfloat16": 0.3, "float32": 0.02}[dtype]


class Trainer(Protocol):
    """The trainer, as far as a weight update needs it."""

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> Sequence[Sequence[float]]:
        """Log-probs of every token given those before it (0 for the first), one list a sample."""
        ...

    async def publish(self, engine_urls: Sequence[str], weight_version: str) -> PublishReport:
        """Send the weights to every engine under ``weight_version``; the report names those that did not take them."""
        ...

    async def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        ...


class Engines(Protocol):
    """The client of the engines in use, as far as a weight update needs it."""

    fleet: Fleet
    facts: ModelSpec
    sleep: EngineSleep

    async def info(self, url: str) -> EngineInfo:
        """What the server at ``url`` reports about itself. Raises EngineError."""
        ...

    async def score(self, tokens: TokenIds, *, url: str) -> Sequence[float]:
        """As :meth:`Trainer.logprobs`, of one sequence by the engine at ``url``. Raises EngineError."""
        ...

    async def lives(self, url: str) -> bool:
        """Whether the server at ``url`` answers at all."""
        ...


@dataclass
class Update:
    """One version on its way: what the trainer's log-probs of the fixed sequence are, and what happened so far."""

    step: int
    logprobs: np.ndarray
    digests: Mapping[DigestKind, RankDigests] = field(default_factory=dict)
    worst: float = 0.0
    retries: int = 0
    disk_loads: int = 0
    first: PublishReport | None = None

    @property
    def version(self) -> str:
        return str(self.step)


class WeightSync:
    """Publishes the trainer's weights to the engines in use.

    ``directory`` holds the exports that engines are given from disk (``step-NNNNNN``, the newest kept). ``note`` is
    called with a line for each update that an engine did not take, and for each engine put out of use.
    """

    def __init__(
        self, config: RunConfig, engine: Engines, trainer: Trainer, directory: Path, note: Callable[[str], None]
    ) -> None:
        self._config, self._engine, self._trainer, self._directory, self._note = (
            config,
            engine,
            trainer,
            directory,
            note,
        )
        self._tokens = np.arange(min(PROBE_TOKENS, engine.facts.vocab_size), dtype=np.int32)
        self._last: Update | None = None
        self._good = (config.model, "start")  # the newest version on disk that is known to be whole
        shutil.rmtree(
            directory, ignore_errors=True
        )  # of an earlier start, which may have gone on beyond our checkpoint

    async def publish(self, step: int) -> dict[str, float]:
        """Bring every engine in use to the trainer's weights as version ``step``; metrics ``weight_sync/*``.

        An engine that cannot be brought there is put out of use. Raises WeightSyncError where it was the last, unless
        it died: it may come back, and be waited for.
        """
        probe = Sample(self._tokens, np.ones(len(self._tokens), bool), np.zeros(len(self._tokens), "f4"), 0.0, None)
        (logprobs,) = await self._trainer.logprobs([probe], replay=False)
        self._last = update = Update(step, np.asarray(logprobs))
        self._engine.fleet.publishing(update.version)
        await self._bring(update, self._engine.fleet.in_use)
        self._engine.fleet.settled()
        return self._metrics(update)

    async def join(self, url: str) -> None:
        """Bring an engine that came up, or came back, to the version that was published last; it serves then, or is out
        of use. The trainer must still have those weights."""
        assert self._last is not None, "an engine waits only for what was published"
        await self._bring(replace(self._last, worst=0.0), (url,))

    async def _bring(self, update: Update, urls: Sequence[str]) -> None:
        failures = await self._by_group(update, urls) if urls else {}
        for way in (self._alone, self._from_disk):
            for url, reason in tuple(failures.items()):
                self._note(f"weights {update.version}: {reason}")
                update.retries += 1
                failures |= await way(update, url)
                if failures[url] == "":
                    del failures[url]
        for url in urls:
            if url not in failures:
                self._engine.fleet.published(url)
        for url, reason in failures.items():
            await self._put_out_of_use(url, reason)

    async def _by_group(self, update: Update, urls: Sequence[str]) -> dict[str, str]:
        """Publish to ``urls`` together; the reason by URL where an engine failed."""
        report = await self._trainer.publish(urls, update.version)
        update.first = update.first or report
        update.digests = report.digests or update.digests
        taken = [url for url in urls if url not in report.failures]
        reasons = await asyncio.gather(*(self._compare(update, url) for url in taken))
        return {**report.failures, **{url: reason for url, reason in zip(taken, reasons, strict=True) if reason}}

    async def _alone(self, update: Update, url: str) -> dict[str, str]:
        return {url: "", **await self._by_group(update, [url])}

    async def _from_disk(self, update: Update, url: str) -> dict[str, str]:
        try:
            with self._receiver(url) as receiver:
                await asyncio.to_thread(receiver.pause, self._config.engine.server_pause)  # does it live?
                directory = await self._exported(update.step)
                await asyncio.to_thread(self._load, receiver, directory, update.version, update.digests)
        except WeightSyncError as error:
            return {url: str(error)}
        update.disk_loads += 1
        reason = await self._compare(update, url)
        if not reason:
            self._keep(directory, update.version)
        return {url: reason}

    async def _exported(self, step: int) -> Path:
        directory = self._directory / f"step-{step:06d}"
        if not directory.exists():
            await self._trainer.export(directory)
        return directory

    def _load(
        self, receiver: WeightReceivers, directory: Path, version: str, digests: Mapping[DigestKind, RankDigests]
    ) -> None:
        """Give one paused engine the checkpoint in ``directory`` and let it go on. Raises WeightSyncError."""
        receiver.load_from_disk(directory, version, flush_cache=self._config.engine.pause_mode != "in_place")
        held = receiver.checksums()[0].ranks
        if (expected := digests.get(DigestKind.of(held))) and (wrong := differing(expected, held)):
            raise WeightSyncError(f"{receiver.urls[0]}, given {directory}, {wrong}")
        receiver.resume()

    def _keep(self, directory: Path, version: str) -> None:
        before, _ = self._good
        self._good = (directory, version)
        if before.parent == self._directory and before != directory:
            shutil.rmtree(before)

    async def _compare(self, update: Update, url: str) -> str:
        """Why the engine at ``url`` does not compute what the trainer computes, or "". One that does not is paused."""
        try:
            await self._engine.sleep.ready(url)
            info = await self._engine.info(url)
            if info.weight_version != update.version:
                return f"{url} answers with weights {info.weight_version!r}, not {update.version!r}"
            scores = await self._engine.score(self._tokens.tolist(), url=url)
        except EngineError as error:
            return str(error)
        difference = float(np.abs(np.asarray(scores)[1:] - update.logprobs[1:]).mean())
        limit = difference_limit(self._config.engine.dtype, info.kv_dtype)
        if difference < limit:
            update.worst = max(update.worst, difference)
            return ""
        with self._receiver(url) as receiver:
            await asyncio.to_thread(receiver.pause, self._config.engine.server_pause)
        return (
            f"{url}, updated to version {update.version}, differs from the trainer by {difference:.3f} nats a token on "
            f"a fixed sequence, more than {limit}"
        )

    async def _put_out_of_use(self, url: str, reason: str) -> None:
        """Take an engine out of use that could not be brought to the new weights: for good, on its last good ones if it
        takes them, or until it comes back where it is dead."""
        fleet = self._engine.fleet
        if (member := fleet.find(url)) is None:
            return
        if not await self._engine.lives(url):
            fleet.died(member.name, reason)
            if (lost := fleet.lost) is not None:
                raise WeightSyncError(f"no engine is left: {lost}")
            return
        holds = await asyncio.to_thread(self._restore, url)
        if fleet.in_use == (url,):
            raise WeightSyncError(f"{reason}; {holds}, and there is no other engine")
        fleet.retire(member.name, reason)
        self._note(f"{url} is out of use, {holds}: {reason}")

    def _restore(self, url: str) -> str:
        """Give an engine its last good version; what it holds then, in words."""
        directory, version = self._good
        with self._receiver(url) as receiver:
            try:
                receiver.pause(self._config.engine.server_pause)
                receiver.stop_requests()
                self._load(receiver, directory, version, {})
            except WeightSyncError:
                return "what it holds is unknown"
        return f"it holds the last good version, {version!r}, again"

    def _receiver(self, url: str) -> WeightReceivers:
        engine = self._config.engine
        return WeightReceivers([url], timeout=engine.weight_sync_timeout, headers=engine.headers)

    def _metrics(self, update: Update) -> dict[str, float]:
        first = update.first or PublishReport({})  # no engine lived
        values = {
            "logprob_abs_diff": update.worst,
            "retries": update.retries,
            "disk_loads": update.disk_loads,
            "engines": len(self._engine.fleet.in_use),
            "verified": first.verified,
            "stale_caches": first.stale_caches,
            "bytes": first.bytes,
            **{f"{stage}_seconds": seconds for stage, seconds in first.seconds.items()},
        }
        return {f"weight_sync/{name}": float(value) for name, value in values.items()}
