"""What one trainer rank answers: real Ray, real Megatron, a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError, UserError
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.train.requests import OptimizerSpec
from agent_rl.types import Sample
from scripts.sft import SftConfig, SftProgress, sft

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

Config = Callable[..., RunConfig]
Make = Callable[..., Sample]
VOCAB = 64
LENGTHS = (10, 20, 30, 40, 15, 17, 33)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def trainer(runner: asyncio.Runner, tiny_moe: Path) -> Iterator[RayTrainer]:
    """One rank, shared by the tests that don't mind its weights."""
    settings = {"device": "cpu", "microbatch_tokens": 64, "lr": 1e-2, "mini_steps": 2, "replay": "r3"}
    config = RunConfig.model_validate({"name": "test", "model": tiny_moe, "train": settings})
    ready = RayTrainer(config)
    runner.run(ready.start())
    yield ready
    runner.run(ready.close())


def samples(make_sample: Make, *, routes: bool = True) -> list[Sample]:
    return [make_sample(n, seed=n, advantage=(-1.0) ** n * n / 20, routes=routes) for n in LENGTHS]


def test_replayed_routes_are_used_and_reported(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    metrics = runner.run(trainer.step(samples(make_sample), measure_without_replay=True))
    assert metrics["r3/router_mismatch"] == metrics["r3/token_mismatch"] == metrics["r3/sequence_mismatch"] == 0
    assert metrics["mismatch_without_replay/router_mismatch"] > 0.5, "random routes are not the model's own"
    assert metrics["r3/coverage"] == 1
    assert metrics["r3/fallback_token_fraction"] == 0
    assert metrics["r3/bytes_per_token"] == 4  # two layers of two experts, a byte each
    assert metrics["train/updates"] == 2
    assert metrics["train/sampled_tokens"] == sum(int(s.loss_mask.sum()) for s in samples(make_sample))
    assert metrics["mismatch/k3_kl"] != metrics["mismatch_without_replay/k3_kl"]
    assert metrics["train/grad_norm"] > 0


def test_an_ablation_shows_in_what_the_routers_used(
    runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random routes are hardly ever the model's own, nor those of the token before."""

    def mismatch(ablation: str) -> tuple[float, float]:
        r3 = trainer.config.r3.model_copy(update={"ablation": ablation})
        monkeypatch.setattr(trainer, "config", trainer.config.model_copy(update={"r3": r3}))
        metrics = runner.run(trainer.step(samples(make_sample), measure_without_replay=False))
        return metrics["r3/router_mismatch"], metrics["r3/router_mismatch_worst_layer"]

    assert mismatch("none") == mismatch("old_logprob_only") == (0, 0), "the old-log-prob pass is what is compared"
    native, shifted, (half, worst) = mismatch("update_only"), mismatch("shifted"), mismatch("alternate_layers")
    assert native[0] > 0.5
    assert shifted[0] > 0.5
    assert half == pytest.approx(worst / 2)
    assert worst > 0.5


def test_missing_rows_fall_back_and_are_counted(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    sample = make_sample(21, seed=1)
    assert sample.routing is not None
    present = sample.routing.present.copy()
    present[3:8] = False
    gappy = replace(sample, routing=replace(sample.routing, present=present))
    metrics = runner.run(trainer.step([gappy], measure_without_replay=False))
    assert metrics["r3/coverage"] == pytest.approx(15 / 20)
    assert metrics["r3/fallback_token_fraction"] == pytest.approx(5 / 20)
    assert metrics["r3/router_mismatch"] == 0
    assert "mismatch_without_replay/k3_kl" not in metrics


def test_routes_come_with_the_logprobs(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    data = samples(make_sample)
    replayed = runner.run(trainer.routes(data, replay=True))
    logprobs = runner.run(trainer.logprobs(data, replay=True))
    native = runner.run(trainer.routes(data, replay=False))
    hot = runner.run(trainer.routes(data, replay=True, temperature=1e6))
    assert all(values[1:] == pytest.approx(-np.log(VOCAB), abs=1e-3) for values, _ in hot), "hot enough, all are alike"
    for sample, (values, experts), expected, (_, own) in zip(data, replayed, logprobs, native, strict=True):
        assert sample.routing is not None
        assert values.tolist() == expected
        assert experts.dtype == own.dtype == np.uint8
        assert experts.shape == sample.routing.experts.shape == own.shape
        np.testing.assert_array_equal(experts[:-1], sample.routing.experts[:-1])
        assert (own != sample.routing.experts).any()


def test_logprobs_are_aligned_with_the_tokens(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    """Each token's log-prob is a function of those before it and itself alone, and sums to 1 over the vocabulary."""
    base = make_sample(12, seed=4, routes=False)

    def with_token(index: int, token: int) -> Sample:
        tokens = base.tokens.copy()
        tokens[index] = token
        return replace(base, tokens=tokens)

    variants = [with_token(7, token) for token in range(VOCAB)]
    table = np.array(runner.run(trainer.logprobs(variants, replay=False)))
    assert (table[:, 0] == 0).all()
    assert np.ptp(table[:, :7], axis=0).max() < 1e-5, "a later token changed an earlier log-prob"
    assert np.exp(table[:, 7]).sum() == pytest.approx(1, abs=1e-4)
    assert np.ptp(table[:, 8]) > 1e-3, "the next token's log-prob depends on this one"


def test_entropy_is_that_of_the_policy(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    """Against the log-probs of all tokens that could have stood at each sampled place."""
    base = make_sample(10, seed=6)
    assert base.routing is not None
    variants = []
    for place in np.flatnonzero(base.loss_mask):
        kept = slice(0, int(place) + 1)
        routing = replace(base.routing, experts=base.routing.experts[kept], present=base.routing.present[kept])
        for token in range(VOCAB):
            tokens = np.append(base.tokens[:place], token).astype(np.int32)
            variants.append(Sample(tokens, base.loss_mask[kept], base.logprobs[kept], 0.0, routing))
    found = runner.run(trainer.logprobs(variants, replay=True))
    table = np.array([values[-1] for values in found], np.float64).reshape(-1, VOCAB)
    metrics = runner.run(trainer.step([base], measure_without_replay=False))
    assert metrics["train/entropy"] == pytest.approx(-(np.exp(table) * table).sum(axis=1).mean(), abs=1e-4)


def test_nothing_to_learn_makes_no_update(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    one = samples(make_sample)[:1]
    before = runner.run(trainer.logprobs(one, replay=True))
    assert runner.run(trainer.step([], measure_without_replay=True))["train/updates"] == 0
    assert runner.run(trainer.logprobs(one, replay=True)) == before


def test_unreachable_engine_is_reported_and_the_trainer_goes_on(
    runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report = runner.run(asyncio.wait_for(trainer.publish([f"http://127.0.0.1:{port}"], "1"), 60))
    (reason,) = report.failures.values()
    assert re.search(f"127.0.0.1:{port}.*no answer", reason)
    assert runner.run(trainer.logprobs([make_sample(9, 1)], replay=True))


def test_samples_without_routes_are_refused_under_r3(
    runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make
) -> None:
    with pytest.raises(TrainerError, match=r"train\.replay is r3"):
        runner.run(trainer.step(samples(make_sample, routes=False), measure_without_replay=False))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_checkpoint_that_cannot_be_written_leaves_the_trainer_alive(
    runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make, tmp_path: Path
) -> None:
    small, data = tmp_path / "small", samples(make_sample)
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")

    async def save_beside_training() -> None:
        writing = await trainer.begin_save(small / "step-000001")
        await trainer.logprobs(data, replay=True)
        await writing

    try:
        with pytest.raises(UserError, match=r"the disk is full; free space, set runs_dir, or lower train\.keep"):
            runner.run(save_beside_training())
        assert os.listdir(small) == [], "a part of it was left"
    finally:
        subprocess.run(["umount", small], check=True)
    runner.run(trainer.save(tmp_path / "step-000001", {"run_id": "r"}))
    before = runner.run(trainer.logprobs(data, replay=True))
    runner.run(trainer.step(data, measure_without_replay=False))
    assert runner.run(trainer.load(tmp_path / "step-000001")).run == {"run_id": "r"}
    assert runner.run(trainer.logprobs(data, replay=True)) == before


def test_an_update_starts_from_clean_gradients(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    """With a vanishing learning rate the same step has the same gradient again, whatever was left in the buffers."""
    runner.run(trainer.set_optimizer(OptimizerSpec(lr=1e-12)))
    steps = [runner.run(trainer.step(samples(make_sample), measure_without_replay=False)) for _ in range(2)]
    assert steps[1]["train/grad_norm"] == pytest.approx(steps[0]["train/grad_norm"], rel=1e-5)


def test_a_spike_is_scaled_to_its_limit(runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make) -> None:
    """A gradient this small is lost in Adam's epsilon: nearly nothing moves, and unscaled much would."""
    runner.run(trainer.set_optimizer(OptimizerSpec(lr=1e-2)))
    before = runner.run(trainer.logprobs(samples(make_sample), replay=False))
    spiked = runner.run(trainer.step(samples(make_sample), measure_without_replay=False, spike_norm=1e-14))
    assert (spiked["train/spikes"], spiked["train/updates"], spiked["train/skipped_updates"]) == (2, 2, 0)
    assert spiked["train/grad_norm"] > 1e-3, "the norm is told as it was"
    after = runner.run(trainer.logprobs(samples(make_sample), replay=False))
    assert all(new == pytest.approx(old, abs=1e-4) for old, new in zip(before, after, strict=True))
    calm = runner.run(trainer.step(samples(make_sample), measure_without_replay=False, spike_norm=1e6))
    assert (calm["train/spikes"], calm["train/updates"]) == (0, 2)
    moved = runner.run(trainer.logprobs(samples(make_sample), replay=False))
    assert max(np.abs(np.subtract(new, old)).max() for old, new in zip(before, moved, strict=True)) > 1e-2


def test_supervised_training_learns_and_reports(runner: asyncio.Runner, trainer: RayTrainer) -> None:
    """Sequences that count up: after some updates the next token is known."""
    starts = np.arange(24)
    sequences = [
        (((start + np.arange(30)) % VOCAB).astype(np.int32), np.where(np.arange(30) < 4, 0.2, 1).astype(np.float32))
        for start in starts
    ]
    seen: list[SftProgress] = []
    result = runner.run(sft(trainer, sequences, SftConfig(steps=60, batch=8, warmup_steps=5), seen.append))
    assert [progress.step for progress in seen] == list(range(1, 61))
    assert seen[0].loss > 3
    assert result["sft/loss"] < 0.5
    assert seen[4].lr == pytest.approx(3e-3)
    assert seen[-1].lr == pytest.approx(3e-4)
    assert result["sft/tokens"] == 60 * 8 * 30


def test_supervised_training_that_was_stopped_ends_in_the_same_weights(
    runner: asyncio.Runner, trainer: RayTrainer, make_sample: Make, tmp_path: Path
) -> None:
    """Stopped after an update without a checkpoint: that update is made again."""
    sequences = [(sample.tokens, np.ones(len(sample.tokens), np.float32)) for sample in samples(make_sample)]
    config, start = SftConfig(steps=5, batch=3, checkpoint_every=2), tmp_path / "start"
    runner.run(trainer.save(start))
    whole: list[SftProgress] = []
    runner.run(sft(trainer, sequences, config, whole.append))
    expected = runner.run(trainer.logprobs(samples(make_sample), replay=False))
    runner.run(trainer.load(start))

    def stop(progress: SftProgress) -> None:
        if progress.step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        runner.run(sft(trainer, sequences, config, stop, tmp_path / "checkpoints"))
    rest: list[SftProgress] = []
    totals = runner.run(sft(trainer, sequences, config, rest.append, tmp_path / "checkpoints"))
    assert [progress.step for progress in rest] == [3, 4, 5]
    assert [progress.loss for progress in rest] == [progress.loss for progress in whole[2:]]
    assert totals["sft/tokens"] == whole[-1].tokens
    assert runner.run(trainer.logprobs(samples(make_sample), replay=False)) == expected
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
