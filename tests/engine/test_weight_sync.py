"""Updates that go wrong on their way to the real server: every engine ends whole, on the new version or out of use."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from engine_proxy import Fault, proxy
from server_control import load

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.engine.fleet import Phase
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.response import RequestContext, read_completion
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import expected_shapes
from agent_rl.types import Completion, FinishReason, Sample, SamplingParams
from agent_rl.weight_sync.receivers import WeightReceivers
from r3.routing import SpanKind

torch = pytest.importorskip("torch", reason="needs the trainer environment")
from safetensors.torch import load_file  # noqa: E402

from agent_rl.weight_sync import bucket_sender  # noqa: E402
from agent_rl.weight_sync.buckets import Bucket  # noqa: E402
from agent_rl.weight_sync.digests import (  # noqa: E402
    engine_difference,
    minority_engines,
    rank_difference,
    unchanged_ranks,
)
from agent_rl.weight_sync.logprob_gate import LogprobGate, probe_tokens  # noqa: E402
from agent_rl.weight_sync.publisher import WeightPublisher  # noqa: E402
from agent_rl.weight_sync.requests import PublishReport  # noqa: E402
from agent_rl.weight_sync.shared_buckets import SharedBuckets, shared_buckets  # noqa: E402
from agent_rl.weight_sync.sync import WeightSync  # noqa: E402

TOKENS = [int(token) for token in np.random.default_rng(11).integers(2, 250, 60)]
Weights = list[tuple[str, Any]]


def exported(directory: Path) -> Weights:
    """A checkpoint's tensors in the order in which the trainer exports them: parts of one parameter in a row."""
    weights = load_file(directory / "model.safetensors")
    return [(name, weights[name]) for name in expected_shapes(read_model_spec(directory))]


class Ranks:
    """The ranks of a trainer as threads."""

    def __init__(self, count: int) -> None:
        self._items, self._barrier = [None] * count, threading.Barrier(count, timeout=60)

    def gather(self, rank: int, item: Any) -> list[Any]:
        self._items[rank] = item
        self._barrier.wait()
        items = list(self._items)
        self._barrier.wait()
        return items


def shared_by_ranks(
    sender: WeightPublisher, config: EngineConfig, directory: Path, gpus: Any, weights: Weights, version: str
) -> PublishReport:
    """Share ``weights`` with engines, from one rank for each of the ``gpus``."""
    names = [name for own in gpus for name in own]
    ranks = Ranks(len(names))

    def rank(number: int) -> Any:
        shared, report = SharedBuckets(partial(ranks.gather, number), names[number]), None
        if number == 0:
            report = sender.publish(weights, version, shared=shared, gpus=gpus)
        else:
            spec, cpu = read_model_spec(directory), torch.device("cpu")
            deque(shared_buckets(exported(directory), spec, config, cpu, shared), maxlen=0)
        shared.close()
        return report

    with ThreadPoolExecutor(len(names)) as pool:
        report, *_ = pool.map(rank, range(len(names)))
    return report


class FileTrainer:
    """Stands for a trainer whose weights are those of ``directory``; sends them as the trainer's rank 0 does.

    ``links[i]`` is the publisher of the i-th update, further ones are faultless.
    """

    def __init__(
        self, config: EngineConfig, directory: Path, logprobs: Sequence[float], *links: type[WeightPublisher]
    ) -> None:
        self._config, self.directory, self._logprobs, self._links = config, directory, logprobs, list(links)

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> list[Sequence[float]]:
        return [self._logprobs for _ in samples]

    async def publish(self, engine_urls: Sequence[str], weight_version: str, gpus: Any = ()) -> PublishReport:
        link = self._links.pop(0) if self._links else WeightPublisher
        config, model_spec = (
            self._config.model_copy(update={"weight_bucket_mb": 0.3}),
            read_model_spec(self.directory),
        )
        sender = link(engine_urls, torch.device("cpu"), model_spec, config)
        try:
            send = partial(shared_by_ranks, sender, config, self.directory, gpus) if gpus else sender.publish
            return await asyncio.to_thread(send, exported(self.directory), weight_version)
        finally:
            await asyncio.to_thread(sender.close)  # a proxy in this thread passes its requests on

    async def export(self, directory: Path) -> None:
        shutil.copytree(self.directory, directory)


class OneBitOff(WeightPublisher):
    """Changes the last bit of one weight in the second bucket, after it was hashed."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2:
            bucket = replace(bucket, data=bucket.data.clone())
            bucket.data[0] ^= 1
        return super()._send(bucket, version)


class OneSharedBitOff(WeightPublisher):
    """Changes the last bit of one weight in the memory of the first bucket, after it was hashed."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        self._hashing.submit(int).result()
        if bucket.handles:
            bucket.data[0] ^= 1
        return super()._send(bucket, version)


class WrongHandle(WeightPublisher):
    """Sends a handle that no engine can open."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        return super()._send(replace(bucket, handles=[pickle.dumps(1) for _ in bucket.handles]), version)


class Loses(WeightPublisher):
    """Sends one bucket less and calls the one before the last."""

    def _update(self, parts: Any, *rest: Any) -> int:
        *kept, last, _ = parts
        return super()._update(iter([*kept, replace(last, last=True)]), *rest)


class DiesMidway(WeightPublisher):
    """Announces the second bucket and is gone before it is sent."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        if getattr(self, "sent", False):
            dtypes = [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes]
            self._receivers.receive(bucket.names, dtypes, bucket.shapes, weight_version="x", group=self._name)
            raise WeightSyncError("the sender died")
        self.sent = True
        return super()._send(bucket, version)


class Setting:
    """Engines to publish to, and what the fixed sequence gives with the old and with the new weights."""

    def __init__(self, config: RunConfig, other_model: Path, directory: Path, old: Any, new: Any) -> None:
        self.config, self.other_model, self.directory, self.old, self.new = config, other_model, directory, old, new
        self.notes: list[str] = []

    def sync(self, engine: SGLangEngine, *links: type[WeightPublisher], gpus: Sequence[str] = ()) -> WeightSync:
        """``gpus``: those that the engine's ranks share with the trainer."""
        self.trainer = FileTrainer(self.config.engine, self.other_model, self.new, *links)
        config = self.config.engine.model_copy(update={"colocate": bool(gpus)})
        engine.sleep.gpus = lambda urls: [gpus] * len(urls)  # type: ignore[method-assign]
        return WeightSync(config, self.config.model, engine, self.trainer, self.directory, self.notes.append)

    async def holds(self, engine: SGLangEngine, weights: Any, version: str) -> None:
        """All engines in use compute and say so."""
        for url in engine.urls:
            np.testing.assert_allclose(await engine.score(PROBE, url=url), weights, atol=1e-6)
            assert (await engine.info(url)).weight_version == version


PROBE = list(range(128))


@asynccontextmanager
async def setting_of(
    server: str, model: Path, other_model: Path, engine_config: EngineConfig, directory: Path
) -> AsyncIterator[Setting]:
    """A setting on the server at ``server``, which has the weights of ``model`` before and after."""
    config = RunConfig.model_validate({"name": "test", "model": model, "engine": engine_config.model_dump()})
    async with SGLangEngine(server, read_model_spec(model), engine_config) as engine:
        with WeightReceivers([server]) as receivers:
            load(receivers, other_model, "disk")
            new = await engine.score(PROBE)
            load(receivers, model, "default")
            old = await engine.score(PROBE)
        yield Setting(config, other_model, directory, old, new)
        with WeightReceivers([server]) as receivers:
            load(receivers, model, "default")


@pytest.fixture(autouse=True)
def short_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that waits for a dead sender's broadcast cannot reply, so leaving it takes the whole limit."""
    monkeypatch.setattr(bucket_sender, "_LEAVE_SECONDS", 1.0)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "first", "limit"),
    [
        ("float32", "auto", 1e-5, 0.01),
        ("bfloat16", "auto", 0.02, 0.08),
        ("bfloat16", "auto", 0.4, 1.0),
        ("bfloat16", "fp8_e4m3", 0.14, 0.56),
    ],
)
def test_the_first_difference_sets_the_limit(dtype: str, kv_dtype: str, first: float, limit: float) -> None:
    gate = LogprobGate(dtype)
    assert first < gate.limit(kv_dtype) < 2, "weights that are missing differ by whole nats"
    gate.measure(kv_dtype, first)
    gate.measure(kv_dtype, limit / 2)
    assert gate.limit(kv_dtype) == pytest.approx(limit), "later differences do not move it"


def test_the_prompt_is_the_runs_own_or_all_small_ids() -> None:
    assert probe_tokens([5, 6, 7], 64).tolist() == [5, 6, 7]
    assert probe_tokens((), 64).tolist() == list(range(64))
    assert (len(probe_tokens((), 1000)), len(probe_tokens(range(1000), 1000))) == (128, 512)


class Announces(Fault):
    """Changes the names of the first bucket that holds enough of them, once."""

    def __init__(self, change: Callable[[list[str]], list[str]]) -> None:
        self._change, self._done = change, False

    def control(self, path: str, body: bytes) -> bytes | None:
        if path != "/update_weights_from_distributed" or self._done:
            return body
        self._done = True
        request = orjson.loads(body)
        return orjson.dumps(request | {"names": self._change(request["names"])})


def swap(names: list[str]) -> list[str]:
    """Two experts' down projections, which have one shape, for each other."""
    first, second = (next(i for i, name in enumerate(names) if f"experts.{e}.down_proj" in name) for e in (0, 1))
    names[first], names[second] = names[second], names[first]
    return names


def rename(names: list[str]) -> list[str]:
    return [name.replace("embed_tokens", "embedtokens") for name in names]


@pytest.mark.sglang
@pytest.mark.slow
class TestOneEngine:
    async def test_a_faultless_update_is_compared_byte_for_byte(self, setting: Setting, engine: SGLangEngine) -> None:
        metrics = await setting.sync(engine).publish(3)
        await setting.holds(engine, setting.new, "3")
        assert metrics["weight_sync/verified"] == metrics["weight_sync/engines"] == 1
        assert metrics["weight_sync/retries"] == metrics["weight_sync/disk_loads"] == 0
        assert metrics["weight_sync/bytes"] == sum(tensor.nbytes for _, tensor in exported(setting.other_model))
        assert not setting.notes
        assert not setting.directory.exists()

    async def test_shared_memory_equals_the_process_group(self, setting: Setting, engine: SGLangEngine) -> None:
        """As on GPUs that trainer and engine share, where the handles are those of CUDA IPC."""
        metrics = await setting.sync(engine, gpus=["0"]).publish(3)
        with WeightReceivers(engine.urls) as receivers:
            shared = receivers.checksums()
        assert metrics["weight_sync/verified"] == 1
        assert metrics["weight_sync/retries"] == metrics["weight_sync/disk_loads"] == 0
        assert metrics["weight_sync/bytes"] == sum(tensor.nbytes for _, tensor in exported(setting.other_model))
        await setting.sync(engine).publish(4)
        await setting.holds(engine, setting.new, "4")
        with WeightReceivers(engine.urls) as receivers:
            assert receivers.checksums() == shared
        assert not setting.notes

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (OneSharedBitOff, r"updated to version 3, does not hold the bytes that were sent: model\."),
            (WrongHandle, r"update_weights_from_tensor .*rank 0: TypeError"),
        ],
    )
    async def test_where_sharing_fails_weights_travel_by_process_group(
        self, setting: Setting, engine: SGLangEngine, fault: type[WeightPublisher], reason: str
    ) -> None:
        sync = setting.sync(engine, fault, gpus=["0"])
        metrics = await sync.publish(3)
        await setting.holds(engine, setting.new, "3")
        assert (metrics["weight_sync/retries"], metrics["weight_sync/disk_loads"]) == (1, 0)
        failed, fallback = setting.notes
        assert re.search(reason, failed)
        assert fallback == f"{engine.urls[0]} took the weights through host memory: all engines do from now on"
        assert (await sync.publish(4))["weight_sync/retries"] == 0

    async def test_an_engine_that_computes_otherwise_is_refused_by_what_was_measured_first(
        self, setting: Setting, engine: SGLangEngine
    ) -> None:
        """All bytes are right in each update."""
        sync, exact = setting.sync(engine), np.array(setting.new)
        setting.trainer._logprobs = exact + 0.05
        metrics = await sync.publish(3)
        assert metrics["weight_sync/logprob_abs_diff"] == pytest.approx(0.05, abs=1e-4)
        assert metrics["weight_sync/logprob_limit"] == pytest.approx(0.2, abs=1e-3)
        setting.trainer._logprobs = exact + 0.15
        assert (await sync.publish(4))["weight_sync/retries"] == 0
        setting.trainer._logprobs = exact + 0.25
        with pytest.raises(WeightSyncError, match=r"differs from the trainer by 0\.250 nats .* more than 0\.2"):
            await sync.publish(5)

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (OneBitOff, r"updated to version 3, does not hold the bytes that were sent: model\."),
            (Loses, r"does not hold the bytes that were sent: model\.norm\.weight|and \d+ more"),
            (DiesMidway, "the sender died"),
        ],
    )
    async def test_a_transient_fault_is_repaired_by_sending_again(
        self, setting: Setting, engine: SGLangEngine, fault: type[WeightPublisher], reason: str
    ) -> None:
        metrics = await setting.sync(engine, fault).publish(3)
        await setting.holds(engine, setting.new, "3")
        assert (metrics["weight_sync/retries"], metrics["weight_sync/disk_loads"]) == (1, 0)
        assert len(setting.notes) == 1
        assert re.search(reason, setting.notes[0])

    async def test_a_lasting_fault_is_repaired_from_disk(self, setting: Setting, engine: SGLangEngine) -> None:
        sync = setting.sync(engine, OneBitOff, DiesMidway)
        metrics = await sync.publish(3)
        await setting.holds(engine, setting.new, "3")
        assert (metrics["weight_sync/retries"], metrics["weight_sync/disk_loads"]) == (2, 1)
        assert [path.name for path in setting.directory.iterdir()] == ["step-000003"]
        await sync.publish(4)  # and goes on by process group
        await setting.holds(engine, setting.new, "4")

    async def test_an_engine_that_accepts_nothing_keeps_its_last_good_weights(
        self, setting: Setting, engine: SGLangEngine
    ) -> None:
        sync = setting.sync(engine, OneBitOff, OneBitOff)
        setting.trainer.directory = setting.config.model  # what is exported is not what the log-probs are of
        with pytest.raises(WeightSyncError, match="the last good version, 'start', again, and there is no other"):
            await sync.publish(3)
        await setting.holds(engine, setting.old, "start")

    @pytest.mark.parametrize("change", [swap, rename])
    async def test_a_mislabelled_bucket_is_found(
        self, setting: Setting, server: str, connect: Any, change: Callable[[list[str]], list[str]]
    ) -> None:
        """Two tensors of the same shape under each other's names, and one under a name that the engine drops."""
        async with proxy(server, Announces(change)) as url, connect(url) as engine:
            metrics = await setting.sync(engine).publish(3)
            assert metrics["weight_sync/retries"] == 1
            assert "does not hold the bytes that were sent" in setting.notes[-1]
            await setting.holds(engine, setting.new, "3")

    @pytest.mark.parametrize(
        "mode", [None, *(pytest.param(mode, marks=pytest.mark.long) for mode in ("retract", "in_place"))]
    )
    async def test_pause_modes_decide_what_becomes_of_a_running_request(
        self, setting: Setting, engine: SGLangEngine, connect: Any, mode: str | None, model: Path
    ) -> None:
        """In the default mode (None) the rows of its tokens are those that it was sampled with."""
        if mode:
            changed = setting.config.engine.model_copy(update={"pause_mode": mode})
            setting.config = setting.config.model_copy(update={"engine": changed})
        got, metrics, before = await over_an_update(setting, engine, 600)
        await setting.holds(engine, setting.new, "3")
        assert metrics["weight_sync/stale_caches"] == (mode == "in_place")
        assert (got.finish is FinishReason.ABORT) == (mode is None)
        assert (len(got.tokens) == 600) == bool(mode)
        assert [span.version for span in got.versions] == (["default", "3"] if mode else ["default"])

        with WeightReceivers(engine.urls) as receivers:
            load(receivers, model, "default")
        greedy = SamplingParams(temperature=0.0, max_new_tokens=1)
        prompt = [*TOKENS, *got.tokens[:before]]
        async with connect(*engine.urls) as other:  # it accepts any version
            reference = await other.generate(prompt, greedy, routes_from=0, session="s")
        assert got.routing is not None
        assert reference.routing is not None
        rows = len(TOKENS) + before - 1
        sets, expected = (np.sort(routing.experts[:rows]) for routing in (got.routing, reference.routing))
        differing = (sets != expected).any(axis=2)
        sampled = [(span.stop, span.weight_version) for span in got.routing.spans if span.kind is SpanKind.SAMPLED]
        assert got.retractions == (mode == "retract")
        if mode == "retract":
            assert differing.mean() > 0.05
            assert not sampled, "rows that were computed again are not called sampled"
        else:
            assert differing.sum() == 0
            assert sampled[0] == (rows, "default")


async def over_an_update(
    setting: Setting, engine: SGLangEngine, tokens: int
) -> tuple[Completion, dict[str, float], int]:
    """A greedy request of ``tokens`` tokens over an update to version 3: its answer, the update's metrics, and how many
    tokens the weights before sampled."""
    options = {"temperature": 0.0, "return_logprob": True, "return_routed_experts": True}
    async with streamed(engine.urls[0], tokens, **options) as answers:
        async for answer in answers:
            if answer["meta_info"]["completion_tokens"] >= 100:
                break
        metrics = await setting.sync(engine).publish(3)
        *_, last = [answer async for answer in answers]
    context = RequestContext("r", "s", engine.urls[0], len(TOKENS), 0, engine.model_spec.layout)
    before = int(last["meta_info"]["weight_versions"][0]["end"])
    assert 100 <= before < tokens
    return read_completion(orjson.dumps(last), context, 0.0), metrics, before


@asynccontextmanager
async def streamed(url: str, tokens: int, **options: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The answers of one streaming request, as they come. ``options``: of the request, or of its sampling."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": options.pop("temperature", 1.0)}
    body = {"input_ids": TOKENS, "sampling_params": sampling, "stream": True, **options}
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream("POST", f"{url}/generate", json=body) as response,
    ):
        lines = (line async for line in response.aiter_lines() if line.startswith("data: {"))
        yield (orjson.loads(line.removeprefix("data: ")) async for line in lines)


class Refuses(Fault):
    """Refuses some endpoints; ``kill`` is killed when the first of them is called."""

    def __init__(self, *paths: str, kill: int | None = None) -> None:
        self._paths, self._kill = paths, kill

    def control(self, path: str, body: bytes) -> bytes | None:
        if path.strip("/") not in self._paths:
            return body
        if self._kill is not None:
            os.killpg(self._kill, signal.SIGKILL)
            return body
        return None


DISTRIBUTED, DISK = "update_weights_from_distributed", "update_weights_from_disk"


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "killed", "left", "disk_loads", "reason"),
    [
        ((), False, 2, 0, None),
        ((DISTRIBUTED,), False, 2, 1, None),
        ((DISTRIBUTED, DISK), False, 1, 0, "what it holds is unknown"),
        ((DISTRIBUTED,), True, 1, 0, None),
    ],
    ids=["no fault", "loads from disk", "takes nothing", "dies"],
)
async def test_one_of_two_engines_fails(
    setting: Setting, server: str, second_server: EngineServer, connect: Any,
    refused: tuple[str, ...], killed: bool, left: int, disk_loads: int, reason: str | None,
) -> None:  # fmt: skip
    fault = Refuses(*refused, kill=second_server.pid if killed else None)
    async with proxy(second_server.url, fault) as second, connect(server, second) as engine:
        metrics = await setting.sync(engine).publish(3)
        assert engine.urls == (server, second)[:left]
        assert (metrics["weight_sync/engines"], metrics["weight_sync/disk_loads"]) == (left, disk_loads)
        await setting.holds(engine, setting.new, "3")
        assert (engine.fleet[second].phase is Phase.DEAD) == killed, "it may come back"
        assert (engine.fleet[second].phase is Phase.RETIRED) == (reason is not None)
        if reason:
            assert setting.notes[-1].startswith(f"{second} is out of use, {reason}: ")
        assert await engine.generate(TOKENS, SamplingParams(max_new_tokens=1), routes_from=None, session="s")


def test_a_difference_of_checksums_names_the_parameter() -> None:
    expected = {"a": "1", "b": "2", "lm_head.weight": "3"}
    assert rank_difference(expected, {"a": "1", "b": "2"}) is None
    assert rank_difference(expected, {"a": "1", "b": "9"}) == "does not hold the bytes that were sent: b"
    assert rank_difference(expected, {"a": "1"}) == "has no parameter: b"
    several = rank_difference(expected, expected | {"c": "4", "a": "5"})
    assert several == "does not hold the bytes that were sent: a and 1 more"


def test_a_rank_that_an_update_did_not_reach_is_named() -> None:
    old, new = {"a": "1"}, {"a": "2"}
    assert engine_difference((new, new), (new, new)) is None
    assert engine_difference((new, new), (new, old)) == "does not hold the bytes that were sent: a (its rank 1 of 2)"
    assert engine_difference((new, new), (new,)) == "has 1 ranks, not 2"
    assert unchanged_ranks((old, old), (new, new)) is None
    assert unchanged_ranks((old, old), (old, old)) is None, "the same weights again"
    assert unchanged_ranks((old, old), (new, old)) == "changed on only 1 of its 2 ranks (not on rank 1)"


def test_the_minority_of_engines_differs() -> None:
    assert minority_engines({"x": "1"}) == []
    assert minority_engines({"x": "1", "y": "1", "z": "2"}) == ["z"]
    assert minority_engines({"x": "1", "y": "2"}) == ["x", "y"]
