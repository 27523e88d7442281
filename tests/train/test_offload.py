"""An optimizer whose state lies on the host between updates makes the same updates, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch

from agent_rl.config import ParallelConfig
from agent_rl.train.orders import OptimizerSpec

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


def policy(folder: Path, ranks: Any, dtype: str, distributed: bool) -> Any:
    """The model of ``folder``, wrapped for either optimizer."""
    from agent_rl.train.megatron.model import PolicyModel

    width = getattr(torch, dtype)
    built = PolicyModel.build(folder, ParallelConfig(), device=torch.device("cpu"), dtype=width)
    return PolicyModel(built.modules, built.facts, ranks, built.device, folder, distributed_optimizer=distributed)


def optimizer_of(model: Any, dtype: str, *, offload: bool) -> Any:
    from agent_rl.train.optimizer import PolicyOptimizer

    return PolicyOptimizer(model.chunks, replace(SPEC, offload=offload), getattr(torch, dtype))


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
        for state in optimizer._host:
            for one, slots in zip(state.held, state.slots, strict=True):
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


def test_an_adam_that_counts_in_its_groups_counts_each_update_once() -> None:
    """As Transformer Engine's does."""
    from agent_rl.train.offload import Held, HostState

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
    state = HostState(adam, [Held(p, 0, m) for p, m in zip(parameters, masters, strict=True)], ("exp_avg",))
    for expected in (-1.0, -3.0):
        for master in masters:
            master.grad = torch.ones(3)
        state.step()
        assert [parameter.tolist() for parameter in parameters] == [[expected] * 3] * 2
    assert adam.param_groups[0]["step"] == 2
    assert [slots["exp_avg"].tolist() for slots in state.slots] == [[2.0] * 3] * 2


def test_the_rehearsal_counts_memory_that_is_given_back_and_taken_again() -> None:
    from agent_rl.capacity.hardware import GPUS
    from agent_rl.rehearsal.ledger import Ledger

    ledger, tensor = Ledger(GPUS["H100 SXM"]), torch.zeros(1024)
    storage = tensor.untyped_storage()
    with ledger.phase("start"):
        ledger.made(storage)
        assert ledger.held == 4096
        storage.resize_(0)
        ledger.resized(storage)
        assert ledger.held == 0
        storage.resize_(4096)
        ledger.resized(storage)
    assert (ledger.held, ledger.most()["start"].peak) == (4096, 4096)
    del tensor, storage
    assert ledger.held == 0
