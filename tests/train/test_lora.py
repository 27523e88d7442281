"""Whole trainers of adapters: over expert ranks, from a checkpoint, beside a reference. Real Ray, real Megatron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_files import assert_same_tensors

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.train.checkpoint.hf_export import export_checkpoint
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

Config = Callable[..., RunConfig]
Make = Callable[..., Sample]
LORA = {"rank": 8, "alpha": 8}


def samples(make_sample: Make) -> list[Sample]:
    lengths = (10, 20, 30, 40, 15, 17, 33)
    return [make_sample(n, seed=n, advantage=(-1.0) ** n * n / 20) for n in lengths]


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["expert", pytest.param("context", marks=pytest.mark.exhaustive)])
async def test_several_ranks_learn_what_one_rank_learns(
    run_config: Config, make_sample: Make, tiny_moe: Path, tmp_path: Path, kind: str
) -> None:
    """The second step goes on from the one rank's checkpoint."""
    data, saved = samples(make_sample), tmp_path / "step-000001"
    layouts: dict[str, dict[str, int]] = {"one": {}, kind: {"world_size": 2, kind: 2}}
    rows, exports = {}, {}
    for name, parallel in layouts.items():
        async with RayTrainer(run_config(lora=LORA, parallel=parallel, lr=1e-3)) as trainer:
            rows[name] = [await trainer.step(data, measure_without_replay=True)]
            if name == "one":
                await trainer.save(saved)
            else:
                await trainer.load(saved)
            rows[name].append(await trainer.step(data, measure_without_replay=True))
            await trainer.export(tmp_path / name)
            await trainer.save(tmp_path / f"{name}-2/step-000002")
        exports[name] = load_file(tmp_path / name / "model.safetensors")
    base = load_file(tiny_moe / "model.safetensors")
    for one, other in zip(rows["one"], rows[kind], strict=True):
        for metric in ("train/grad_norm", "train/loss", "mismatch/logprob_abs_diff"):
            assert other[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-6), metric
        assert other["r3/router_mismatch"] == 0
    for key, before in base.items():
        np.testing.assert_allclose(exports[kind][key], exports["one"][key], atol=1e-4, err_msg=key)
        assert np.array_equal(exports[kind][key], before) == ("_proj." not in key), key
    adapters = [load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in layouts]
    assert adapters[0].keys() == adapters[1].keys()
    for name in layouts:
        export_checkpoint(tmp_path / f"{name}-2/step-000002", run_config(lora=LORA), tmp_path / f"{name}-offline")
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert_same_tensors(tmp_path / f"{name}-offline" / file, tmp_path / name / file)


@pytest.mark.long
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
            straight.append(numbers(await trainer.step(data, measure_without_replay=True)))
        final = await trainer.logprobs(data, replay=False)
        await trainer.load(tmp_path / "step-000001")
        assert [numbers(await trainer.step(data, measure_without_replay=True)) for _ in range(2)] == straight[1:]
        assert await trainer.logprobs(data, replay=False) == final
    assert straight[0]["train/kl_reference"] == 0
    assert straight[2]["train/kl_reference"] > 1e-4
    written = sum(file.stat().st_size for file in (tmp_path / "step-000001").rglob("*") if file.is_file())
    async with RayTrainer(run_config()) as trainer:
        await trainer.save(tmp_path / "step-000002")
        with pytest.raises(TrainerError, match=r"has no state of model\.embed_tokens\.weight"):
            await trainer.load(tmp_path / "step-000001")
    whole = sum(file.stat().st_size for file in (tmp_path / "step-000002").rglob("*") if file.is_file())
    assert written < whole / 2
