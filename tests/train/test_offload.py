"""Updates of an optimizer with its state on the host, which are bit-identical, and with bfloat16 moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from support.megatron_world import world_of_one

from agent_rl.config import ParallelConfig
from agent_rl.train.requests import OptimizerSpec

pytestmark = pytest.mark.megatron

SPEC = OptimizerSpec(lr=1e-2, weight_decay=0.1, warmup_steps=2, grad_clip=0.5)
KINDS = [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float32", True)]


@pytest.fixture(scope="module")
def world(megatron_shim: None) -> Iterator[Any]:
    """The ranks of a world of one."""
    with world_of_one() as ranks:
        yield ranks


def policy(directory: Path, ranks: Any, dtype: str, distributed: bool) -> Any:
    """The model of ``directory`` for a replicated or a distributed optimizer."""
    from agent_rl.train.megatron.model import PolicyModel

    built = PolicyModel.build(directory, ParallelConfig(), device=torch.device("cpu"), dtype=getattr(torch, dtype))
    parts = (built.modules, built.model_spec, ranks, built.device, directory)
    return PolicyModel(*parts, distributed_optimizer=distributed)


def optimizer_of(model: Any, dtype: str, *, offload: bool, **changes: Any) -> Any:
    from agent_rl.train.optimizer import PolicyOptimizer

    return PolicyOptimizer(model.chunks, replace(SPEC, offload=offload, **changes), getattr(torch, dtype))


def update(model: Any, optimizer: Any, seed: int) -> float:
    """One update with random gradients; returns the gradient norm."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.module.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    norm: float = optimizer.step().grad_norm
    return norm


def weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for module in model.modules for parameter in module.parameters()]


def state_of(optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {(one.name, slot): tensor.clone() for one in optimizer.shards() for slot, tensor in one.slots.items()}


def same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize(("dtype", "distributed"), KINDS)
def test_offloaded_updates_are_bit_identical(tiny_moe: Path, world: Any, dtype: str, distributed: bool) -> None:
    models = [policy(tiny_moe, world, dtype, distributed) for _ in range(2)]
    plain, offloaded = (optimizer_of(models[offload], dtype, offload=bool(offload)) for offload in (0, 1))
    for seed in range(3):
        assert update(models[0], plain, seed) == update(models[1], offloaded, seed)
        assert same(weights(models[0]), weights(models[1])), f"update {seed}"
    assert plain.counts == offloaded.counts == {"updates": 3, "schedule": 3}
    states = [state_of(optimizer) for optimizer in (plain, offloaded)]
    assert states[0].keys() == states[1].keys()
    assert same(list(states[0].values()), list(states[1].values()))


@pytest.mark.parametrize("distributed", [False, True])
def test_the_device_holds_no_state_between_updates(tiny_moe: Path, world: Any, distributed: bool) -> None:
    model = policy(tiny_moe, world, "bfloat16", distributed)
    optimizer = optimizer_of(model, "bfloat16", offload=True)
    for _ in range(2):
        for state in optimizer._stored_states:
            for one, slots in zip(state.masters, state.slots, strict=True):
                assert one.master.untyped_storage().nbytes() == 4, "a master keeps one element"
                assert slots["master"].numel() == one.master.numel()
                moments = state._inner.state[one.master]
                assert moments["exp_avg"].data_ptr() == slots["exp_avg"].data_ptr(), "the moments are the host's"
        update(model, optimizer, 0)


@pytest.mark.parametrize(("dtype", "distributed"), KINDS[1:])
def test_saved_state_resumes_with_and_without_offloading(
    tiny_moe: Path, world: Any, dtype: str, distributed: bool
) -> None:
    first = policy(tiny_moe, world, dtype, distributed)
    begun = optimizer_of(first, dtype, offload=True)
    update(first, begun, 0)
    saved, counts = state_of(begun), begun.counts
    update(first, begun, 1)
    for offload in (False, True):
        model = policy(tiny_moe, world, dtype, distributed)
        resumed = optimizer_of(model, dtype, offload=offload)
        resumed.load(lambda one: {slot: saved[one.name, slot] for slot in one.slots}, counts)
        update(model, resumed, 1)
        assert same(weights(model), weights(first))
        assert resumed.counts == begun.counts


@pytest.mark.parametrize(("dtype", "distributed"), KINDS)
def test_bfloat16_moments_are_offloaded_and_resumed_bit_for_bit(
    tiny_moe: Path, tmp_path: Path, world: Any, dtype: str, distributed: bool
) -> None:
    """The third optimizer resumes from a checkpoint of the second, whose file has float32 only."""
    from agent_rl.train.checkpoint.piece_files import PieceReader, write_pieces
    from agent_rl.train.checkpoint.rank_state import StatePieces

    models = [policy(tiny_moe, world, dtype, distributed) for _ in range(3)]
    options = [(model, dtype, model is not models[0]) for model in models]
    here, there, resumed = (optimizer_of(m, d, offload=offload, moments="bfloat16") for m, d, offload in options)
    for seed in range(2):
        assert update(models[0], here, seed) == update(models[1], there, seed)
    kept = state_of(there)
    kinds = {(slot == "master", tensor.dtype) for (_, slot), tensor in kept.items()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    snapshot, path = StatePieces(models[1], there).snapshot(), tmp_path / "rank.safetensors"
    with path.open("wb") as file:
        write_pieces(file, snapshot.pieces, snapshot.values)
    StatePieces(models[2], resumed).load(PieceReader([path]), snapshot.counts)
    for model, optimizer in zip(models, (here, there, resumed), strict=True):
        update(model, optimizer, 2)
    for model, optimizer in zip(models[1:], (there, resumed), strict=True):
        assert same(weights(models[0]), weights(model))
        assert same(list(state_of(here).values()), list(state_of(optimizer).values()))


class Trained:
    """A parameter of 2,048 numbers whose moments are kept in ``precision``."""

    def __init__(self, precision: torch.dtype) -> None:
        from agent_rl.train.optimizer_offload import MasterShard, StoredState

        self.weight = torch.nn.Parameter(torch.zeros(2048))
        adam = torch.optim.AdamW([self.weight], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, foreach=False)
        masters, moments = [MasterShard(self.weight, 0, self.weight)], ("exp_avg", "exp_avg_sq")
        self._state = StoredState(adam, masters, moments, precision=precision)
        self.slots = self._state.slots[0]

    def update(self, updates: int, gradient: torch.Tensor) -> None:
        self.weight.grad = gradient.clone()
        self._state.step(updates)


def trained_like_float32(updates: int = 800) -> tuple[float, float, float]:
    """Of moments in bfloat16 over those in float32, at a beta2 of 0.999, after gradients of sizes from 1e-9 to 1e3
    that become a tenth after half of the updates: the second moment's mean, and how far it is off at most; and how far
    the weights are off, over how far they went (root mean square)."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (12 * torch.rand(2048, generator=generator) - 9)
    exact, short = Trained(torch.float32), Trained(torch.bfloat16)
    for done in range(updates):
        gradient = torch.randn(2048, generator=generator) * size * (1.0 if done < updates / 2 else 0.1)
        for one in (exact, short):
            one.update(done, gradient)
    ratio = short.slots["exp_avg_sq"].double() / exact.slots["exp_avg_sq"].double()
    ends = [one.weight.detach() for one in (exact, short)]
    off = (ends[1] - ends[0]).square().mean().sqrt() / ends[0].square().mean().sqrt()
    return float(ratio.mean()), float((ratio - 1).abs().max()), float(off)


def test_bfloat16_moments_train_like_float32_moments() -> None:
    mean, furthest, weights_off = trained_like_float32()
    assert mean == pytest.approx(1, abs=0.02)
    assert furthest < 0.15
    assert weights_off < 0.01


def test_a_second_moment_rounded_to_nearest_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_rl.train import optimizer_offload as offload

    monkeypatch.setattr(offload, "_rounded", lambda wide, dtype, updates: wide.to(dtype))
    mean, furthest, weights_off = trained_like_float32()
    assert mean > 1.3, "it does not fall when gradients do"
    assert furthest > 0.15
    assert weights_off > 0.01


def test_an_adam_that_counts_in_its_groups_counts_each_update_once() -> None:
    """Like Transformer Engine's."""
    from agent_rl.train.optimizer_offload import MasterShard, StoredState

    class CountingAdam(torch.optim.Optimizer):
        def step(self) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    self.state[parameter]["exp_avg"] += parameter.grad
                    parameter.data -= group["step"] * parameter.grad

    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    masters = [torch.nn.Parameter(torch.zeros(3)) for _ in parameters]
    adam = CountingAdam(masters, {})
    state = StoredState(adam, [MasterShard(p, 0, m) for p, m in zip(parameters, masters, strict=True)], ("exp_avg",))
    for expected in (-1.0, -3.0):
        for master in masters:
            master.grad = torch.ones(3)
        state.step(0)
        assert [parameter.tolist() for parameter in parameters] == [[expected] * 3] * 2
    assert adam.param_groups[0]["step"] == 2
    assert [slots["exp_avg"].tolist() for slots in state.slots] == [[2.0] * 3] * 2
