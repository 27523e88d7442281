"""Whole trainers of adapters: over expert ranks, from a checkpoint, beside a reference. Real Ray, real Megatron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

Config = Callable[..., RunConfig]
Make = Callable[..., Sample]
LORA = {"rank": 8, "alpha": 8}


def samples(make_sample: Make) -> list[Sample]:
    lengths = (10, 20, 30, 40, 15, 17, 33)
    return [make_sample(n, seed=n, advantage=(-1.0) ** n * n / 20) for n in lengths]


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


async def test_expert_ranks_learn_what_one_rank_learns(
    run_config: Config, make_sample: Make, tiny_moe: Path, tmp_path: Path
) -> None:
    data, rows = samples(make_sample), []
    for world in (1, 2):
        parallel = {"world_size": world, "expert": world}
        async with RayTrainer(run_config(lora=LORA, parallel=parallel, mini_steps=2)) as trainer:
            rows.append([numbers(await trainer.step(data, measure_native=True)) for _ in range(2)])
            await trainer.export(tmp_path / str(world))
    for one, two in zip(*rows, strict=True):
        assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-3)
        assert one["r3/router_mismatch"] == two["r3/router_mismatch"] == 0
    weights, base = (
        [load_file(tmp_path / f"{world}/model.safetensors") for world in (1, 2)],
        load_file(tiny_moe / "model.safetensors"),
    )
    for name, before in base.items():
        np.testing.assert_allclose(weights[1][name], weights[0][name], atol=2e-4, err_msg=name)
        assert np.array_equal(weights[0][name], before) == ("_proj." not in name), name
    adapters = [load_file(tmp_path / f"{world}/adapter/adapter_model.safetensors") for world in (1, 2)]
    assert adapters[0].keys() == adapters[1].keys()


async def test_adapters_from_a_checkpoint_go_on_bit_for_bit(
    run_config: Config, make_sample: Make, tmp_path: Path
) -> None:
    """The reference of the KL is the model without adapters."""
    data = samples(make_sample)
    config = run_config(lora=LORA, lr_warmup_steps=3, weight_decay=0.1, kl={"coefficient": 0.1})
    async with RayTrainer(config) as trainer:
        straight = []
        for step in range(3):
            if step == 1:
                await trainer.save(tmp_path / "step-000001")
            straight.append(numbers(await trainer.step(data, measure_native=True)))
        final = await trainer.logprobs(data, replay=False)
        await trainer.load(tmp_path / "step-000001")
        assert [numbers(await trainer.step(data, measure_native=True)) for _ in range(2)] == straight[1:]
        assert await trainer.logprobs(data, replay=False) == final
    assert straight[0]["train/kl_reference"] == 0
    assert straight[2]["train/kl_reference"] > 1e-4
    written = sum(file.stat().st_size for file in (tmp_path / "step-000001").rglob("*") if file.is_file())
    async with RayTrainer(run_config()) as trainer:
        await trainer.save(tmp_path / "step-000002")
        with pytest.raises(TrainerError, match=r"has no state of model\.embed_tokens\.weight: it is another model"):
            await trainer.load(tmp_path / "step-000001")
    whole = sum(file.stat().st_size for file in (tmp_path / "step-000002").rglob("*") if file.is_file())
    assert written < whole / 2
