"""One trainer rank in its own process, with real Ray and real Megatron."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import pytest_asyncio
from rich.console import Console
from support.small_disk import small_disk
from support.train_samples import VOCAB, sample_of, samples

from agent_rl.config import RunConfig
from agent_rl.controller.run_state import RunState
from agent_rl.controller.sft import SftData, SftEvaluator, SftRun, check_same_rows
from agent_rl.errors import ConfigError, TrainerError, UserError
from agent_rl.monitoring.console import Display
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.train.requests import OptimizerSpec
from agent_rl.types import Sample
from scripts.sft import SftConfig, SftProgress, sft

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tiny_moe: Path) -> AsyncIterator[RayTrainer]:
    """One rank, shared by tests that do not depend on its weights."""
    settings = {"device": "cpu", "microbatch_tokens": 64, "lr": 1e-2, "mini_steps": 2, "replay": "r3"}
    config = RunConfig.model_validate({"name": "test", "model": tiny_moe, "train": settings})
    async with RayTrainer(config) as ready:
        yield ready


async def test_replayed_routes_are_used_and_reported(trainer: RayTrainer) -> None:
    metrics = await trainer.step(samples(), measure_without_replay=True)
    assert metrics["r3/router_mismatch"] == metrics["r3/token_mismatch"] == metrics["r3/sequence_mismatch"] == 0
    assert metrics["mismatch_without_replay/router_mismatch"] > 0.5, "random routes are not the model's own"
    assert metrics["r3/coverage"] == 1
    assert metrics["r3/fallback_token_fraction"] == 0
    assert metrics["r3/bytes_per_token"] == 4  # two layers of two experts, a byte each
    assert metrics["train/updates"] == 2
    assert metrics["train/sampled_tokens"] == sum(int(s.loss_mask.sum()) for s in samples())
    assert metrics["mismatch/k3_kl"] != metrics["mismatch_without_replay/k3_kl"]
    assert metrics["train/grad_norm"] > 0


async def test_an_ablation_shows_in_the_router_mismatch(trainer: RayTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def mismatch(ablation: str) -> tuple[float, float]:
        r3 = trainer.config.r3.model_copy(update={"ablation": ablation})
        monkeypatch.setattr(trainer, "config", trainer.config.model_copy(update={"r3": r3}))
        metrics = await trainer.step(samples(), measure_without_replay=False)
        return metrics["r3/router_mismatch"], metrics["r3/router_mismatch_worst_layer"]

    assert await mismatch("none") == await mismatch("old_logprob_only") == (0, 0), "compared in the old-log-prob pass"
    assert (await mismatch("update_only"))[0] > 0.5
    assert (await mismatch("shifted"))[0] > 0.5
    half, worst = await mismatch("alternate_layers")
    assert half == pytest.approx(worst / 2)
    assert worst > 0.5


async def test_missing_rows_fall_back_and_are_counted(trainer: RayTrainer) -> None:
    sample = sample_of(21, seed=1)
    assert sample.routing is not None
    present = sample.routing.present.copy()
    present[3:8] = False
    gappy = replace(sample, routing=replace(sample.routing, present=present))
    metrics = await trainer.step([gappy], measure_without_replay=False)
    assert metrics["r3/coverage"] == pytest.approx(15 / 20)
    assert metrics["r3/fallback_token_fraction"] == pytest.approx(5 / 20)
    assert metrics["r3/router_mismatch"] == 0
    assert "mismatch_without_replay/k3_kl" not in metrics


@pytest.mark.parametrize(
    ("source", "replay"),
    [
        ("rescore", "r3"),
        ("rollout", "off"),
        pytest.param("rollout", "r3", marks=pytest.mark.exhaustive),
        pytest.param("rescore", "off", marks=pytest.mark.exhaustive),
    ],
)
async def test_the_pass_before_the_update_only_measures_where_the_engine_gives_the_old_logprobs(
    trainer: RayTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, replay: str
) -> None:
    """The updates of steps without the pass equal those with it in every bit."""
    data = [replace(one, old_logprobs=(one.logprobs * np.float32(1.03))) for one in samples()]
    changed = {"replay": replay, "old_logprob": {"source": source}, "correction": {"weight": "token"}}
    train = type(trainer.config.train).model_validate(trainer.config.train.model_dump() | changed)
    monkeypatch.setattr(trainer, "config", trainer.config.model_copy(update={"train": train}))
    await trainer.save(tmp_path / "step-000001")

    async def two_steps(*, measured: bool) -> tuple[list[dict[str, float]], object]:
        await trainer.load(tmp_path / "step-000001")
        rows = [await trainer.step(data, measure_without_replay=True, measure_mismatch=measured) for _ in range(2)]
        return [dict(row) for row in rows], await trainer.logprobs(data, replay=replay == "r3")

    with_pass, expected = await two_steps(measured=True)
    without, found = await two_steps(measured=False)
    assert found == expected
    absent = with_pass[1].keys() - without[1].keys()
    assert {name.split("/")[0] for name in absent} == {"mismatch", "mismatch_without_replay", "r3"}
    for row, full in zip(without, with_pass, strict=True):
        assert {name: full[name] for name in row if name[:5] != "time/"} == {
            name: value for name, value in row.items() if name[:5] != "time/"
        }
    await trainer.step(data, measure_without_replay=False, measure_mismatch=True)


async def test_routes_come_with_the_logprobs(trainer: RayTrainer) -> None:
    data = samples()
    replayed = await trainer.routes(data, replay=True)
    logprobs = await trainer.logprobs(data, replay=True)
    native = await trainer.routes(data, replay=False)
    hot = await trainer.routes(data, replay=True, temperature=1e6)
    for values, _ in hot:
        assert values[1:] == pytest.approx(-np.log(VOCAB), abs=1e-3), "at this temperature all tokens are alike"
    for sample, (values, experts), expected, (_, own) in zip(data, replayed, logprobs, native, strict=True):
        assert sample.routing is not None
        assert values.tolist() == expected
        assert experts.dtype == own.dtype == np.uint8
        assert experts.shape == sample.routing.experts.shape == own.shape
        np.testing.assert_array_equal(experts[:-1], sample.routing.experts[:-1])
        assert (own != sample.routing.experts).any()


async def test_entropy_is_that_of_the_policy(trainer: RayTrainer) -> None:
    """Compared with the log-probs of all tokens at each sampled position."""
    base = sample_of(10, seed=6)
    assert base.routing is not None
    variants = []
    for place in np.flatnonzero(base.loss_mask):
        kept = slice(0, int(place) + 1)
        routing = replace(base.routing, experts=base.routing.experts[kept], present=base.routing.present[kept])
        for token in range(VOCAB):
            tokens = np.append(base.tokens[:place], token).astype(np.int32)
            variants.append(Sample(tokens, base.loss_mask[kept], base.logprobs[kept], 0.0, routing))
    found = await trainer.logprobs(variants, replay=True)
    table = np.array([values[-1] for values in found], np.float64).reshape(-1, VOCAB)
    metrics = await trainer.step([base], measure_without_replay=False)
    assert metrics["train/entropy"] == pytest.approx(-(np.exp(table) * table).sum(axis=1).mean(), abs=1e-4)


async def test_nothing_to_learn_makes_no_update(trainer: RayTrainer) -> None:
    one = samples()[:1]
    before = await trainer.logprobs(one, replay=True)
    assert (await trainer.step([], measure_without_replay=True))["train/updates"] == 0
    assert await trainer.logprobs(one, replay=True) == before


async def test_unreachable_engine_is_reported_and_the_trainer_goes_on(trainer: RayTrainer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report = await asyncio.wait_for(trainer.publish([f"http://127.0.0.1:{port}"], "1"), 60)
    (reason,) = report.failures.values()
    assert re.search(f"127.0.0.1:{port}.*no response", reason)
    assert await trainer.logprobs([sample_of(9, 1)], replay=True)


async def test_samples_without_routes_are_refused_under_r3(trainer: RayTrainer) -> None:
    with pytest.raises(TrainerError, match=r"train\.replay is r3"):
        await trainer.step(samples(routes=False), measure_without_replay=False)


async def test_a_full_disk_fails_the_checkpoint_and_the_trainer_goes_on(trainer: RayTrainer, tmp_path: Path) -> None:
    data = samples()
    with small_disk(tmp_path / "small", "256k") as small:
        writing = await trainer.begin_save(small / "step-000001")
        await trainer.logprobs(data, replay=True)
        with pytest.raises(UserError, match=r"the disk is full; free space, set runs_dir, or lower train\.keep"):
            await writing
        assert os.listdir(small) == [], "a partial checkpoint is left"
    await trainer.save(tmp_path / "step-000001", {"run_id": "r"})
    before = await trainer.logprobs(data, replay=True)
    await trainer.step(data, measure_without_replay=False)
    assert (await trainer.load(tmp_path / "step-000001")).run == {"run_id": "r"}
    assert await trainer.logprobs(data, replay=True) == before


async def test_an_update_starts_from_clean_gradients(trainer: RayTrainer) -> None:
    """With a vanishing learning rate the same step has the same gradient again."""
    await trainer.set_optimizer(OptimizerSpec(lr=1e-12))
    steps = [await trainer.step(samples(), measure_without_replay=False) for _ in range(2)]
    assert steps[1]["train/grad_norm"] == pytest.approx(steps[0]["train/grad_norm"], rel=1e-5)


async def test_a_spike_is_scaled_to_its_limit(trainer: RayTrainer) -> None:
    """Scaled to 1e-14 the gradient is lost in Adam's epsilon, so weights hardly move. Without scaling they do."""
    await trainer.set_optimizer(OptimizerSpec(lr=1e-2))
    before = await trainer.logprobs(samples(), replay=False)
    spiked = await trainer.step(samples(), measure_without_replay=False, spike_norm=1e-14)
    assert (spiked["train/spikes"], spiked["train/updates"], spiked["train/skipped_updates"]) == (2, 2, 0)
    assert spiked["train/grad_norm"] > 1e-3, "the reported norm is the one before scaling"
    after = await trainer.logprobs(samples(), replay=False)
    assert all(new == pytest.approx(old, abs=1e-4) for old, new in zip(before, after, strict=True))
    calm = await trainer.step(samples(), measure_without_replay=False, spike_norm=1e6)
    assert (calm["train/spikes"], calm["train/updates"]) == (0, 2)
    moved = await trainer.logprobs(samples(), replay=False)
    assert max(np.abs(np.subtract(new, old)).max() for old, new in zip(before, moved, strict=True)) > 1e-2


def weighted_sequences() -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens of all samples, with weights of 0, 0.5 and 2."""
    weights = [np.random.default_rng(len(s.tokens)).choice([0, 0.5, 2], len(s.tokens)) for s in samples()]
    return [(s.tokens, w.astype(np.float32)) for s, w in zip(samples(), weights, strict=True)]


async def test_the_supervised_loss_is_the_weighted_cross_entropy(trainer: RayTrainer, tmp_path: Path) -> None:
    """Seven sequences in several micro-batches, against loops over floats and against transformers."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sequences = weighted_sequences()
    await trainer.export(tmp_path / "model")
    logprobs = await trainer.logprobs(samples(), replay=False)
    values = await trainer.supervise(sequences)
    total, scale, count = 0.0, 0.0, 0
    for row, (_, weights) in zip(logprobs, sequences, strict=True):
        for logprob, weight in list(zip(row, weights.tolist(), strict=True))[1:]:
            total, scale, count = total - weight * logprob, scale + weight, count + (weight != 0)
    assert values["sft/loss"] == pytest.approx(total / scale, abs=1e-5)
    assert values["train/sampled_tokens"] == count
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(torch.from_numpy(tokens).long()[None]).logits[0, :-1],
                torch.from_numpy(tokens).long()[1:],
                reduction="none",
            )
            for tokens, _ in sequences
        ]
    expected = (
        sum(float(loss @ torch.from_numpy(w[1:])) for loss, (_, w) in zip(losses, sequences, strict=True)) / scale
    )
    assert values["sft/loss"] == pytest.approx(expected, abs=1e-5)


async def test_a_stopped_sft_run_resumes_bit_for_bit(trainer: RayTrainer, tmp_path: Path) -> None:
    """It stops after a step without a checkpoint. Each run starts from the same weights."""
    sft = {"data": [{"path": "x"}], "epochs": 3, "batch_rows": 3, "validation_every": 2}
    data = SftData(weighted_sequences(), weighted_sequences()[:2], [])
    await trainer.save(tmp_path / "start")

    def begin(name: str, stop: int) -> SftRun:
        changes = {"name": name, "runs_dir": str(tmp_path), "sft": sft, "monitoring": {"sinks": []}}
        settings = {"steps": 9, "lr": 1e-2, "lr_warmup_steps": 2, "lr_schedule": "cosine", "checkpoint_every": 2}
        train = trainer.config.train.model_dump() | settings | {"mini_steps": 1}
        config = RunConfig.model_validate(trainer.config.model_dump() | changes | {"train": train})
        display = Stopping(stop)
        no_evaluations = cast(SftEvaluator, None)  # sft.eval_every is not set
        return SftRun(config, RunState(config), display, trainer, data, no_evaluations)

    async def live(name: str, stop: int = 99) -> None:
        run = begin(name, stop)
        await trainer.set_optimizer(OptimizerSpec.of(run.config.train))
        try:
            await run.run()
        finally:
            await run.close()

    await live("whole")
    expected = await trainer.logprobs(samples(), replay=False)
    await trainer.load(tmp_path / "start")
    with pytest.raises(InterruptedError):
        await live("stopped", 5)
    await live("stopped")
    assert await trainer.logprobs(samples(), replay=False) == expected
    whole, stopped = (read_metrics(tmp_path / name) for name in ("whole", "stopped"))
    assert [numbers(row) for row in whole] == [numbers(row) for row in stopped]
    assert [int(row["step"]) for row in whole] == list(range(1, 10))
    assert [int(row["step"]) for row in whole if "sft/validation_loss" in row] == [2, 4, 6, 8, 9]
    assert whole[-1]["sft/epoch"] == 3
    assert whole[-1]["sft/loss"] < whole[0]["sft/loss"] - 0.1
    assert json.loads((tmp_path / "stopped/state.json").read_text())["resumes"] == [4]
    check_same_rows(tmp_path / "stopped", data.digest)
    with pytest.raises(ConfigError, match=r"sft.data: its rows are not those that .*stopped was started with"):
        check_same_rows(tmp_path / "stopped", "other")
    await trainer.set_optimizer(OptimizerSpec(lr=1e-2))


def numbers(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(("time/", "goodput/"))}


class Stopping(Display):
    """Raises InterruptedError once ``stop`` is shown."""

    def __init__(self, stop: int) -> None:
        super().__init__("sft", Console(quiet=True))
        self._stop = stop

    def step(self, step: int, values: Mapping[str, float]) -> None:
        super().step(step, values)
        if step == self._stop:
            raise InterruptedError


@pytest.mark.long
async def test_supervised_training_learns_and_reports(trainer: RayTrainer) -> None:
    """On sequences that count up."""
    weights = np.where(np.arange(30) < 4, 0.2, 1).astype(np.float32)
    sequences = [(((start + np.arange(30)) % VOCAB).astype(np.int32), weights) for start in range(24)]
    seen: list[SftProgress] = []
    await sft(trainer, sequences, SftConfig(steps=60, batch=8, warmup_steps=5), seen.append)
    assert [progress.step for progress in seen] == list(range(1, 61))
    assert seen[0].loss > 3
    assert np.mean([progress.loss for progress in seen[-6:]]) < 0.5
    assert seen[4].lr == pytest.approx(3e-3)
    assert seen[-1].lr == pytest.approx(3e-4)


async def test_stopped_supervised_training_resumes_exactly(trainer: RayTrainer, tmp_path: Path) -> None:
    """It stops after an update without a checkpoint, and makes that update again."""
    sequences = [(sample.tokens, np.ones(len(sample.tokens), np.float32)) for sample in samples()]
    config, start = SftConfig(steps=5, batch=3, checkpoint_every=2), tmp_path / "start"
    await trainer.save(start)
    whole: list[SftProgress] = []
    await sft(trainer, sequences, config, whole.append)
    expected = await trainer.logprobs(samples(), replay=False)
    await trainer.load(start)

    def stop(progress: SftProgress) -> None:
        if progress.step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await sft(trainer, sequences, config, stop, tmp_path / "checkpoints")
    rest: list[SftProgress] = []
    await sft(trainer, sequences, config, rest.append, tmp_path / "checkpoints")
    assert [progress.step for progress in rest] == [3, 4, 5]
    assert [progress.loss for progress in rest] == [progress.loss for progress in whole[2:]]
    assert await trainer.logprobs(samples(), replay=False) == expected
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
