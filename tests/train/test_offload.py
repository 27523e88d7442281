"""An optimizer whose state lies on the host between updates makes the same updates, bit for bit; one whose moments are
bfloat16 makes nearly the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch

from agent_rl.config import ParallelConfig
from agent_rl.train.requests import OptimizerSpec

pytestmark = pytest.mark.megatron

SPEC = OptimizerSpec(lr=1e-2, weight_decay=0.1, warmup_steps=2, grad_clip=0.5)
KINDS = [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float32", True)]


@pytest.fixture(scope="module")
def world(megatron_shim: None) -> Iterator[Any]:
    """The ranks of a world of one."""
    import socket

    from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    yield init_parallel(
        ParallelConfig(),
        0,
        master_addr="127.0.0.1",
        master_port=port,
        device=torch.device("cpu"),
        listener=listener.detach(),
    )
    destroy_parallel()


def policy(directory: Path, ranks: Any, dtype: str, distributed: bool) -> Any:
    """The model of ``directory``, wrapped for either optimizer."""
    from agent_rl.train.megatron.model import PolicyModel

    width = getattr(torch, dtype)
    built = PolicyModel.build(directory, ParallelConfig(), device=torch.device("cpu"), dtype=width)
    return PolicyModel(
        built.modules, built.model_spec, ranks, built.device, directory, distributed_optimizer=distributed
    )


def optimizer_of(model: Any, dtype: str, *, offload: bool, **changes: Any) -> Any:
    from agent_rl.train.optimizer import PolicyOptimizer

    return PolicyOptimizer(model.chunks, replace(SPEC, offload=offload, **changes), getattr(torch, dtype))


def update(model: Any, optimizer: Any, seed: int) -> float:
    """One update by gradients that the seed draws; the gradient norm."""
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
def test_updates_are_the_same_to_the_bit(tiny_moe: Path, world: Any, dtype: str, distributed: bool) -> None:
    models = [policy(tiny_moe, world, dtype, distributed) for _ in range(2)]
    plain, offloaded = (
        optimizer_of(model, dtype, offload=offload) for model, offload in zip(models, (False, True), strict=True)
    )
    for seed in range(3):
        assert update(models[0], plain, seed) == update(models[1], offloaded, seed)
        assert same(weights(models[0]), weights(models[1])), f"update {seed}"
    assert plain.counts == offloaded.counts == {"updates": 3, "schedule": 3}
    states = [state_of(optimizer) for optimizer in (plain, offloaded)]
    assert states[0].keys() == states[1].keys()
    assert same(list(states[0].values()), list(states[1].values()))


@pytest.mark.parametrize("distributed", [False, True])
def test_between_updates_the_device_has_none_of_it(tiny_moe: Path, world: Any, distributed: bool) -> None:
    model = policy(tiny_moe, world, "bfloat16", distributed)
    optimizer = optimizer_of(model, "bfloat16", offload=True)
    for _ in range(2):
        for state in optimizer._stored_states:
            for one, slots in zip(state.masters, state.slots, strict=True):
                assert one.master.untyped_storage().nbytes() == 4, "a master keeps one element"
                assert slots["master"].numel() == one.master.numel()
                moments = state._inner.state[one.master]
                assert moments["exp_avg"].data_ptr() == slots["exp_avg"].data_ptr(), "the host's"
        update(model, optimizer, 0)


@pytest.mark.parametrize(("dtype", "distributed"), KINDS[1:])
def test_a_state_that_was_saved_goes_on_either_way(tiny_moe: Path, world: Any, dtype: str, distributed: bool) -> None:
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
def test_moments_in_bfloat16_lie_anywhere_and_are_resumed_to_the_bit(
    tiny_moe: Path, tmp_path: Path, world: Any, dtype: str, distributed: bool
) -> None:
    """The third goes on from a checkpoint's file of the second, which has float32 alone."""
    from agent_rl.train.checkpoint.pieces import PieceReader, write_pieces
    from agent_rl.train.checkpoint.state_pieces import StatePieces

    models = [policy(tiny_moe, world, dtype, distributed) for _ in range(3)]
    here, there, resumed = (
        optimizer_of(model, dtype, offload=offload, moments="bfloat16")
        for model, offload in zip(models, (False, True, True), strict=True)
    )
    for seed in range(2):
        assert update(models[0], here, seed) == update(models[1], there, seed)
    kept = state_of(there)
    assert {tensor.dtype for (_, slot), tensor in kept.items() if slot != "master"} == {torch.bfloat16}
    snapshot = StatePieces(models[1], there).snapshot()
    with (tmp_path / "rank.safetensors").open("wb") as file:
        write_pieces(file, snapshot.pieces, snapshot.values)
    StatePieces(models[2], resumed).load(PieceReader([tmp_path / "rank.safetensors"]), snapshot.counts)
    for model, optimizer in zip(models, (here, there, resumed), strict=True):
        update(model, optimizer, 2)
    assert same(weights(models[0]), weights(models[1]))
    assert same(weights(models[0]), weights(models[2]))
    states = [list(state_of(optimizer).values()) for optimizer in (here, there, resumed)]
    assert same(states[0], states[1])
    assert same(states[0], states[2])


class Trained:
    """A parameter of 2,048 numbers whose moments are kept in some precision, and what float32 makes of it."""

    def __init__(self, precision: torch.dtype) -> None:
        from agent_rl.train.optimizer_offload import MasterShard, StoredState

        self.weight = torch.nn.Parameter(torch.zeros(2048))
        adam = torch.optim.AdamW([self.weight], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, foreach=False)
        self._state = StoredState(
            adam, [MasterShard(self.weight, 0, self.weight)], ("exp_avg", "exp_avg_sq"), precision=precision
        )
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


def test_moments_in_bfloat16_train_as_those_in_float32_do() -> None:
    mean, furthest, weights_off = trained_like_float32()
    assert mean == pytest.approx(1, abs=0.02)
    assert furthest < 0.15
    assert weights_off < 0.01


def test_a_second_moment_that_is_rounded_to_the_nearest_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_rl.train import optimizer_offload as offload

    monkeypatch.setattr(offload, "_rounded", lambda wide, dtype, updates: wide.to(dtype))
    mean, furthest, weights_off = trained_like_float32()
    assert mean > 1.3, "it does not fall when gradients do"
    assert furthest > 0.15
    assert weights_off > 0.01


def test_rounding_takes_nothing_away_and_leaves_what_bfloat16_has() -> None:
    from agent_rl.train.optimizer_offload import _rounded

    wide = torch.tensor([0.0, 1.0, -2.5, 1 + 2**-10, -1 - 3 * 2**-10])
    rounded = torch.stack([_rounded(wide.clone(), torch.bfloat16, updates) for updates in range(1024)]).double()
    assert (rounded[:, :3] == wide[:3]).all()
    torch.testing.assert_close(
        rounded.mean(0), wide.double(), rtol=0, atol=1e-4
    )  # a number of bfloat16 is 8e-3 from the next


def test_an_adam_that_counts_in_its_groups_counts_each_update_once() -> None:
    """As Transformer Engine's does."""
    from agent_rl.train.optimizer_offload import MasterShard, StoredState

    class CountingAdam:
        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
            self.state: dict[Any, dict[str, Any]] = {parameter: {} for parameter in parameters}

        def step(self) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    self.state[parameter]["exp_avg"] += parameter.grad
                    parameter.data -= group["step"] * parameter.grad

    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    masters = [torch.nn.Parameter(torch.zeros(3)) for _ in parameters]
    adam = CountingAdam(masters)
    state = StoredState(adam, [MasterShard(p, 0, m) for p, m in zip(parameters, masters, strict=True)], ("exp_avg",))
    for expected in (-1.0, -3.0):
        for master in masters:
            master.grad = torch.ones(3)
        state.step(0)
        assert [parameter.tolist() for parameter in parameters] == [[expected] * 3] * 2
    assert adam.param_groups[0]["step"] == 2
    assert [slots["exp_avg"].tolist() for slots in state.slots] == [[2.0] * 3] * 2


def test_the_dry_run_counts_freed_and_reallocated_memory() -> None:
    from agent_rl.dryrun.usage import UsageRecorder
    from agent_rl.planner.hardware import GPUS

    usage, tensor = UsageRecorder(GPUS["H100 SXM"]), torch.zeros(1024)
    storage = tensor.untyped_storage()
    with usage.phase("start"):
        usage.track_storage(storage)
        assert usage.allocated == 4096
        storage.resize_(0)
        usage.update_size(storage)
        assert usage.allocated == 0
        storage.resize_(4096)
        usage.update_size(storage)
    assert (usage.allocated, usage.peaks()["start"].peak) == (4096, 4096)
    del tensor, storage
    assert usage.allocated == 0
