"""Whole trainers from start to end: learning, resuming, data ranks, failures. Real Ray, real Megatron."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.train_samples import VOCAB, samples

from agent_rl.config import GuardConfig, RunConfig
from agent_rl.controller.advantages import group_advantages
from agent_rl.errors import ConfigError, TrainerDied, TrainerError
from agent_rl.train.ray_session import ray_cluster
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample, TopTokens
from r3.mismatch.report import differing_experts, route_mismatch

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

Config = Callable[..., RunConfig]
LAYOUTS = ("tensor", "pipeline", "context", "expert")


def descendants(pid: int) -> set[int]:
    """All processes below ``pid``."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.mark.long
async def test_rewarded_tokens_become_likely(run_config: Config) -> None:
    """A contextual bandit: after token c, every token congruent to c + 1 modulo 4 is rewarded."""
    contexts, generator = np.arange(8), np.random.default_rng(0)

    def pair(context: int, action: int, advantage: float = 0.0, logprob: float = 0.0) -> Sample:
        tokens, logprobs = np.array([context, action], np.int32), np.array([0, logprob], np.float32)
        return Sample(tokens, np.array([False, True]), logprobs, advantage, None)

    async def policy(trainer: RayTrainer) -> np.ndarray:
        everything = [pair(int(c), a) for c in contexts for a in range(VOCAB)]
        values = np.array(await trainer.logprobs(everything, replay=False))[:, 1]
        return np.exp(values.astype(np.float64)).reshape(len(contexts), VOCAB)

    rewarded = np.arange(VOCAB)[None] % 4 == (contexts[:, None] + 1) % 4
    async with RayTrainer(run_config(replay="r2", lr=5e-3, microbatch_tokens=256, mini_steps=2)) as trainer:
        probabilities = await policy(trainer)
        start = float((probabilities * rewarded).sum(axis=1).mean())
        for _ in range(12):
            batch: list[Sample] = []
            for row, c in enumerate(contexts):
                p = probabilities[row] / probabilities[row].sum()
                actions = generator.choice(VOCAB, size=16, p=p)
                for a, value in zip(actions, group_advantages(rewarded[row, actions].astype(float)), strict=True):
                    batch.append(pair(int(c), int(a), float(value), float(np.log(p[a]))))
            metrics = await trainer.step(batch, measure_without_replay=True)
            assert metrics["mismatch/k3_kl"] < 1e-6, "the rollout was the trainer's own policy"
            assert metrics["mismatch_without_replay/k3_kl"] == metrics["mismatch/k3_kl"]
            probabilities = await policy(trainer)
        end = float((probabilities * rewarded).sum(axis=1).mean())
    assert start < 0.5
    assert end > start + 0.3


def sampled(data: list[Sample], logprobs: Any) -> list[np.ndarray]:
    """Each sample's log-probs of its sampled tokens."""
    return [np.asarray(values, np.float64)[s.loss_mask] for s, values in zip(data, logprobs, strict=True)]


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


async def test_steps_from_a_checkpoint_are_bit_equal(run_config: Config, tmp_path: Path) -> None:
    """With an entropy bonus and a KL to the starting model in the loss, and a learning rate that decays. The reference
    is not the checkpoint."""
    data = samples()
    kl = {"coefficient": 0.1, "estimator": "k3", "k3_limit": None}
    schedule = {"steps": 5, "lr_warmup_steps": 2, "lr_schedule": "linear", "min_lr_ratio": 0.1}
    config = run_config(**schedule, weight_decay=0.1, kl=kl, entropy_coefficient=0.02)

    async with RayTrainer(config) as trainer:
        straight = []
        reference = np.concatenate(sampled(data, await trainer.logprobs(data, replay=True)))
        for step in range(4):
            if step == 2:
                await trainer.save(tmp_path / "step-000002")
            policy = np.concatenate(sampled(data, await trainer.logprobs(data, replay=True)))
            straight.append(numbers(await trainer.step(data, measure_without_replay=True)))
        final = await trainer.logprobs(data, replay=False)
        await trainer.load(tmp_path / "step-000002")
        resumed = [numbers(await trainer.step(data, measure_without_replay=True)) for _ in range(2)]
        assert await trainer.logprobs(data, replay=False) == final
        with pytest.raises(ConfigError, match="not a complete checkpoint"):
            await trainer.load(tmp_path)
    assert os.listdir(tmp_path) == ["step-000002"]
    assert resumed == straight[2:]
    d, last = policy - reference, straight[-1]
    k3 = (np.exp(-d) - 1 + d).mean()
    assert straight[0]["train/kl_reference"] == 0
    assert last["train/kl_reference"] == pytest.approx(k3, rel=1e-4)
    assert k3 > 1e-3
    advantage = np.repeat([sample.advantage for sample in data], [sample.loss_mask.sum() for sample in data]).mean()
    expected = -advantage + 0.1 * k3 - 0.02 * last["train/entropy"]
    assert last["train/loss"] == pytest.approx(expected, rel=1e-4), "on the policy every ratio is 1"
    assert [row["train/lr"] for row in straight] == pytest.approx([5e-3, 1e-2, 7e-3, 4e-3])


@pytest.mark.exhaustive
async def test_everything_beside_the_reward_resumes_bit_for_bit(run_config: Config, tmp_path: Path) -> None:
    """A teacher's most likely tokens, observations, the router shift of RSPO, advantages by turn, and an average of the
    weights, over several updates of a step."""
    distill = {"teacher": "http://t", "top_k": 2, "coefficient": 0.3, "reward": 1.0}
    config = run_config(
        steps=5, mini_steps=2, epochs=2, distill=distill, echo={}, ema={"decay": 0.5}, objective="gmpo",
        correction={"router_shift": 0.5},
    )  # fmt: skip
    generator, data = np.random.default_rng(0), list[Sample]()
    for sample in samples():
        size, count = len(sample.tokens), int(sample.loss_mask.sum())
        top = TopTokens(
            generator.integers(0, VOCAB, (count, 2)).astype(np.int32),
            -1 - generator.random((count, 2)).astype(np.float32),
        )
        data.append(
            replace(
                sample, observed=~sample.loss_mask & (np.arange(size) > 2), teacher_top=top,
                teacher_logprobs=sample.logprobs, advantages=generator.normal(size=size).astype(np.float32),
            )
        )  # fmt: skip
    async with RayTrainer(config) as trainer:
        straight = []
        for step in range(4):
            if step == 2:
                await trainer.save(tmp_path / "step-000002")
            straight.append(numbers(await trainer.step(data, measure_without_replay=False)))
        await trainer.save(tmp_path / "straight")
        await trainer.load(tmp_path / "step-000002")
        resumed = [numbers(await trainer.step(data, measure_without_replay=False)) for _ in range(2)]
        await trainer.save(tmp_path / "resumed")
    assert resumed == straight[2:]
    states = [(tmp_path / name / "rank-00000.safetensors").read_bytes() for name in ("straight", "resumed")]
    assert states[0] == states[1]
    assert b'embed_tokens.weight.ema"' in states[0][:100_000]
    for row in straight:
        assert 0.5 < row["train/router_shift_mean"] < 1
    for name in ("train/observation_loss", "distill/loss_kl"):
        assert straight[-1][name] < straight[0][name], name


async def assert_broken_updates_change_nothing(trainer: RayTrainer, data: list[Sample], directory: Path) -> None:
    """Infinite advantages, one on each of two ranks, then a skipped spike."""
    broken = [replace(data[0], advantage=np.inf), *data[1:-1], replace(data[-1], advantage=-np.inf)]
    await trainer.save(directory)
    before = await trainer.logprobs(data, replay=True)
    lost = await trainer.step(broken, measure_without_replay=False)
    assert (lost["train/updates"], lost["train/skipped_updates"], lost["train/spikes"]) == (0, 2, 0)
    assert "train/grad_norm" not in lost
    half = await trainer.step([*data[:-1], broken[-1]], measure_without_replay=False, spike_norm=1e-9)
    assert (half["train/updates"], half["train/skipped_updates"], half["train/spikes"]) == (0, 2, 1)
    assert np.isfinite(half["train/grad_norm"])
    assert await trainer.logprobs(data, replay=True) == before
    following = await trainer.step(data, measure_without_replay=False)
    await trainer.load(directory)
    again = await trainer.step(data, measure_without_replay=False)
    assert numbers(following) == numbers(again), "moments or schedule have changed"
    assert following["train/updates"] == 2


@pytest.mark.long
async def test_two_data_ranks_equal_one(run_config: Config, tmp_path: Path) -> None:
    """With a KL in the reward, an entropy bonus and a mean over sequences."""
    data = samples()
    kl = {"coefficient": 0.05, "estimator": "k1", "apply_to": "reward"}
    more = {"kl": kl, "entropy_coefficient": 0.02, "aggregation": "sequence"}
    results = []
    with ray_cluster(None, cpus=2):  # both trainers share it
        for world in (1, 2):
            config = run_config(parallel={"world_size": world}, mini_steps=2, lr=1e-3, **more)
            config = config.model_copy(update={"guard": GuardConfig(on_spike="skip")})
            async with RayTrainer(config) as trainer:
                assert trainer.data_size == world
                reference = sampled(data, await trainer.logprobs(data, replay=True))
                metrics = [dict(await trainer.step(data, measure_without_replay=True))]
                policy = sampled(data, await trainer.logprobs(data, replay=True))
                metrics.append(dict(await trainer.step(data, measure_without_replay=True)))
                to_come = [np.cumsum((p - r)[::-1]) for p, r in zip(policy, reference, strict=True)]
                taken = 0.05 * np.concatenate(to_come).mean()
                assert abs(taken) > 1e-3
                assert metrics[0]["train/kl_penalty"] == 0, "the reference is still the policy"
                assert metrics[1]["train/kl_penalty"] == pytest.approx(taken, rel=1e-3)
                results.append((metrics, await trainer.logprobs(data, replay=True)))
                alone = await trainer.step(data[:1], measure_without_replay=True)  # the second rank has no work
                assert alone["mismatch_without_replay/router_mismatch"] > 0
                assert alone["train/updates"] == 1
                if world == 2:
                    await assert_broken_updates_change_nothing(trainer, data, tmp_path / "step-000002")
    (one, logprobs_one), (two, logprobs_two) = results
    for before, after in zip(one, two, strict=True):
        assert before.keys() == after.keys()
        for name in numbers(before):
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-5), name
    for left, right in zip(logprobs_one, logprobs_two, strict=True):
        assert right == pytest.approx(left, abs=1e-5)


@pytest.mark.exhaustive
async def test_supervised_updates_are_equal_in_every_layout(run_config: Config) -> None:
    """Two updates each; adapters, which begin as zeros, have the same first loss."""
    data = samples()
    sequences = [(sample.tokens, sample.loss_mask * np.float32(0.5 + n % 2)) for n, sample in enumerate(data)]
    layouts: list[dict[str, object]] = [{}, *({"parallel": {"world_size": 2, name: 2}} for name in LAYOUTS)]
    layouts += [{"parallel": {"world_size": 2}}, {"lora": {"rank": 8}}]
    results = []
    with ray_cluster(None, cpus=2):
        for layout in layouts:
            async with RayTrainer(run_config(replay="off", **layout)) as trainer:
                results.append([await trainer.supervise(sequences) for _ in range(2)])
    one, *others, adapters = results
    for other, layout in zip(others, layouts[1:], strict=False):
        for before, after in zip(one, other, strict=True):
            for name in ("sft/loss", "train/grad_norm", "train/sampled_tokens"):
                assert after[name] == pytest.approx(before[name], rel=1e-4), (layout, name)
    assert one[1]["sft/loss"] < one[0]["sft/loss"]
    assert adapters[0]["sft/loss"] == pytest.approx(one[0]["sft/loss"], rel=1e-5)
    assert adapters[1]["sft/loss"] < adapters[0]["sft/loss"]


@pytest.mark.long
async def test_ranks_replay_and_report_their_own_share_of_the_routes(run_config: Config) -> None:
    """Two pipeline stages of one layer each. A cancelled ``close`` returns when the ranks have ended."""
    data = samples()
    given = [sample.routing for sample in data if sample.routing is not None]
    config = run_config(parallel={"world_size": 2, "pipeline": 2}, replay="r3", mini_steps=2)
    before = descendants(os.getpid())
    trainer = await RayTrainer(config).start()
    try:
        replayed = await trainer.routes(data, replay=True)
        native = await trainer.routes(data, replay=False)
        metrics = await trainer.step(data, measure_without_replay=True)
    finally:
        closing = asyncio.create_task(trainer.close())
        await asyncio.sleep(0)  # the task runs up to its first await
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert not descendants(os.getpid()) - before
    differ = []
    for routing, (_, used), (_, own) in zip(given, replayed, native, strict=True):
        np.testing.assert_array_equal(used[:-1], routing.experts[:-1])
        differ.append(differing_experts(routing, replace(routing, experts=own)))
    expected = route_mismatch(np.concatenate(differ), np.repeat(np.arange(len(differ)), [len(d) for d in differ]), 2)
    assert metrics["mismatch_without_replay/router_mismatch"] == pytest.approx(expected.router)
    assert metrics["mismatch_without_replay/token_mismatch"] == pytest.approx(expected.token)
    assert metrics["mismatch_without_replay/sequence_mismatch"] == pytest.approx(expected.sequence)
    assert metrics["r3/router_mismatch"] == 0
    assert metrics["r3/coverage"] == 1
    assert metrics["train/updates"] == 2


async def test_a_dead_rank_ends_the_trainer_with_a_reason(run_config: Config) -> None:
    before = descendants(os.getpid())
    trainer = await RayTrainer(run_config(parallel={"world_size": 2})).start()
    try:
        ranks = [pid for pid in descendants(os.getpid()) - before if "WorkerActor" in command_line(pid)]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TrainerDied, match="a trainer rank died"):
            await trainer.step(samples(), measure_without_replay=False)
        assert time.monotonic() - started < 60
        with pytest.raises(TrainerDied, match="a trainer rank died"):
            await trainer.logprobs(samples(), replay=False)
    finally:
        await trainer.close()
    await trainer.close()
    with pytest.raises(TrainerError):
        await trainer.step(samples(), measure_without_replay=False)
    assert not descendants(os.getpid()) - before, "close left processes"


async def test_a_cancelled_start_leaves_nothing(run_config: Config) -> None:
    before = descendants(os.getpid())
    starting = asyncio.create_task(RayTrainer(run_config()).start())
    await asyncio.to_thread(wait_until, lambda: bool(descendants(os.getpid()) - before))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not descendants(os.getpid()) - before
