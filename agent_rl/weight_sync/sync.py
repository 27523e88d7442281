"""Bring every engine to the trainer's weights, and exclude engines where that fails.

::

    all together ──▶ one by one ──▶ from disk ──▶ restore the last good version, retire
         │               │              │
         └───────────────┴──────────────┴──▶ checksums and log-probs agree ──▶ in use

Engines that fail move one step to the right; each method is tried once. Weights travel by process group; colocated
engines first try to read them on their own GPU. A dead engine is out of use until it returns, and then gets the weights
alone (:meth:`WeightSync.join`). An engine stays paused until its checksums are verified (log-probs are compared just
after), so it never samples from a mixture of old and new weights. The weights on disk are the trainer's current ones,
exported when an engine needs them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import EngineConfig
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.types import EngineInfo, Scores
from agent_rl.errors import EngineError, WeightSyncError
from agent_rl.types import Sample
from agent_rl.weight_sync.digests import DigestKind, RankDigests, engine_difference
from agent_rl.weight_sync.logprob_gate import LogprobGate, probe_sample, probe_tokens
from agent_rl.weight_sync.receivers import WeightReceivers
from agent_rl.weight_sync.requests import PublishReport


class Trainer(Protocol):
    """The part of the trainer that a weight update uses."""

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> Sequence[Sequence[float]]:
        """Log-probs of every token given those before it (0 for the first), one list per sample."""
        ...

    async def publish(
        self, engine_urls: Sequence[str], weight_version: str, gpus: Sequence[Sequence[str]] = ()
    ) -> PublishReport:
        """Send the weights to every engine as ``weight_version``; the report names those that failed. ``gpus``: by
        engine, those on which it reads the weights of the trainer; none where it receives them by process group."""
        ...

    async def stage(self, engine_urls: Sequence[str], weight_version: str) -> Mapping[str, str]:
        """Send what changed to the engines before they pause; the reasons of those that need all weights."""
        ...

    async def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        ...


@dataclass
class WeightUpdate:
    """One version being published, and the results so far."""

    step: int
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

    ``directory``: exports for loading from disk (``step-NNNNNN``; only the newest is kept). ``note`` receives a line
    for each failed attempt and each engine put out of use. ``prompt`` returns the tokens whose log-probs of trainer and
    engine are compared; it is called at the first update.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Path,
        engine: SGLangEngine,
        trainer: Trainer,
        directory: Path,
        note: Callable[[str], None],
        prompt: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._config, self._engine, self._trainer = config, engine, trainer
        self._directory, self._note = directory, note
        self._gate = LogprobGate(config.dtype)
        self._prompt = prompt
        self._last: WeightUpdate | None = None
        self._shares = config.colocate  # whether engines read the weights on the trainer's GPUs
        # The newest complete version on disk; an engine cannot take the weights of a quantized checkpoint.
        self._good = None if engine.model_spec.quantized else (model, "start")
        # An earlier start may have gone on beyond our checkpoint.
        shutil.rmtree(directory, ignore_errors=True)

    @cached_property
    def _tokens(self) -> NDArray[np.int32]:
        return probe_tokens(self._prompt(), self._engine.model_spec.vocab_size)

    async def publish(self, step: int) -> dict[str, float]:
        """Publish the trainer's weights to every engine in use as version ``step``; returns metrics ``weight_sync/*``.

        An engine that fails is put out of use. Raises WeightSyncError if it was the last one, except for a dead engine,
        which may return.
        """
        self._last = update = WeightUpdate(step)
        self._engine.fleet.publishing(update.version)
        await self._deliver(update, self._engine.fleet.in_use)
        self._engine.fleet.settled()
        return self._metrics(update)

    async def stage(self, step: int) -> None:
        """Send what changed to the engines in use, which prove it while they sample (``engine.weight_sync: delta``).
        Call it just before :meth:`publish`."""
        for url, reason in (await self._trainer.stage(self._engine.fleet.in_use, str(step))).items():
            self._note(f"weights {step}: {url} receives all weights: {reason}")

    async def join(self, url: str) -> None:
        """Give an engine that has started or returned the last published version. It then serves, or is out of use. The
        trainer must still have those weights."""
        assert self._last is not None, "no version was published"
        await self._deliver(replace(self._last, worst=0.0), (url,))

    async def _deliver(self, update: WeightUpdate, urls: Sequence[str]) -> None:
        gpus = self._engine.sleep.gpus(urls) if self._shares else ()
        failures = await self._publish_to(update, urls, gpus) if urls else {}
        for retry in (self._publish_alone, self._from_disk):
            for url, reason in tuple(failures.items()):
                self._note(f"weights {update.version}: {reason}")
                update.retries += 1
                failures |= await retry(update, url)
                if failures[url] == "":
                    del failures[url]
        for url in urls:
            if url not in failures:
                self._engine.fleet.published(url)
        for url, reason in failures.items():
            await self._exclude(url, reason)

    async def _publish_to(
        self, update: WeightUpdate, urls: Sequence[str], gpus: Sequence[Sequence[str]] = ()
    ) -> dict[str, str]:
        """Publish to ``urls`` together. Returns the reason by URL of each engine that failed."""
        report = await self._trainer.publish(urls, update.version, gpus)
        update.first = update.first or report
        update.digests = report.digests or update.digests
        updated = [url for url in urls if url not in report.failures]
        return {**report.failures, **await self._compare(update, updated)}

    async def _publish_alone(self, update: WeightUpdate, url: str) -> dict[str, str]:
        reasons = {url: "", **await self._publish_to(update, [url])}
        if self._shares and not reasons[url]:
            self._shares = False
            self._note(f"{url} took the weights through host memory: all engines do from now on")
        return reasons

    async def _from_disk(self, update: WeightUpdate, url: str) -> dict[str, str]:
        try:
            with self._receiver(url) as receiver:
                await asyncio.to_thread(receiver.pause, self._config.sglang_pause_mode)  # also checks that it responds
                directory = await self._exported(update.step)
                await asyncio.to_thread(self._load, receiver, directory, update.version, update.digests)
        except WeightSyncError as error:
            return {url: str(error)}
        update.disk_loads += 1
        if reasons := await self._compare(update, [url]):
            return reasons
        self._keep(directory, update.version)
        return {url: ""}

    async def _exported(self, step: int) -> Path:
        directory = self._directory / f"step-{step:06d}"
        if not directory.exists():
            await self._trainer.export(directory)
        return directory

    def _load(
        self, receiver: WeightReceivers, directory: Path, version: str, digests: Mapping[DigestKind, RankDigests]
    ) -> None:
        """Load the checkpoint in ``directory`` into one paused engine and resume it. Raises WeightSyncError."""
        receiver.load_from_disk(directory, version, flush_cache=self._config.pause_mode != "in_place")
        actual = receiver.checksums()[0].ranks
        if (expected := digests.get(DigestKind.of(actual))) and (wrong := engine_difference(expected, actual)):
            raise WeightSyncError(f"{receiver.urls[0]}, after loading {directory}, {wrong}")
        receiver.resume()

    def _keep(self, directory: Path, version: str) -> None:
        before, self._good = self._good, (directory, version)
        if before is not None and before[0].parent == self._directory and before[0] != directory:
            shutil.rmtree(before[0])

    async def _compare(self, update: WeightUpdate, urls: Sequence[str]) -> dict[str, str]:
        """Compare log-probs with the trainer's, which uses each engine's experts. Returns the reason by URL of each
        engine that differs; it is paused."""
        found = dict(zip(urls, await asyncio.gather(*(self._score(update, url) for url in urls)), strict=True))
        reasons = {url: answer for url, answer in found.items() if isinstance(answer, str)}
        scored = {url: answer for url, answer in found.items() if not isinstance(answer, str)}
        samples = [probe_sample(self._tokens, scores, self._engine.model_spec) for _, scores in scored.values()]
        replayed = any(sample.routing is not None for sample in samples)
        logprobs = await self._trainer.logprobs(samples, replay=replayed) if samples else ()
        for (url, (info, scores)), own in zip(scored.items(), logprobs, strict=True):
            difference = float(np.abs(np.asarray(scores.logprobs)[1:] - np.asarray(own)[1:]).mean())
            if difference < (limit := self._gate.limit(info.kv_dtype)):
                self._gate.measure(info.kv_dtype, difference)
                update.worst = max(update.worst, difference)
                continue
            with self._receiver(url) as receiver:
                await asyncio.to_thread(receiver.pause, self._config.sglang_pause_mode)
            reasons[url] = (
                f"{url}, updated to version {update.version}, differs from the trainer by {difference:.3f} nats a "
                f"token on a fixed sequence, more than {limit:.3g}"
            )
        return reasons

    async def _score(self, update: WeightUpdate, url: str) -> tuple[EngineInfo, Scores] | str:
        """The engine's log-probs of the fixed sequence, with routes where it captures them; or why there are none."""
        try:
            await self._engine.sleep.resume_cache(url)
            info = await self._engine.info(url)
            if info.weight_version != update.version:
                return f"{url} answers with weights {info.weight_version!r}, not {update.version!r}"
            routes = info.captures_routes and bool(self._engine.model_spec.moe_layer_ids)
            return info, await self._engine.scores(self._tokens.tolist(), url=url, routes=routes)
        except EngineError as error:
            return str(error)

    async def _exclude(self, url: str, reason: str) -> None:
        """Exclude an engine that failed: permanently, on its last good version if it accepts that, or until it returns
        if it is dead."""
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
        """Load the last good version into an engine. Returns a phrase about its weights."""
        if self._good is None:
            return "it holds no version of this run"
        directory, version = self._good
        with self._receiver(url) as receiver:
            try:
                receiver.pause(self._config.sglang_pause_mode)
                receiver.stop_requests()
                self._load(receiver, directory, version, {})
            except WeightSyncError:
                return "what it holds is unknown"
        return f"it holds the last good version, {version!r}, again"

    def _receiver(self, url: str) -> WeightReceivers:
        return WeightReceivers([url], timeout=self._config.weight_sync_timeout, headers=self._config.headers)

    def _metrics(self, update: WeightUpdate) -> dict[str, float]:
        first = update.first or PublishReport({})  # no engine was alive
        values = {
            "logprob_abs_diff": update.worst,
            "logprob_limit": max(self._gate.allowed.values(), default=0.0),
            "retries": update.retries,
            "disk_loads": update.disk_loads,
            "engines": len(self._engine.fleet.in_use),
            "verified": first.verified,
            "stale_caches": first.stale_caches,
            "bytes": first.bytes,
            **({"delta_ratio": first.bytes / first.full_bytes} if first.full_bytes else {}),
            **{f"{stage}_seconds": seconds for stage, seconds in first.seconds.items()},
        }
        return {f"weight_sync/{name}": float(value) for name, value in values.items()}
