"""RSPO's router-shift ratio: the gates of both passes against loops over floats, with and without recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_tiny as tiny
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.config import ParallelConfig, RunConfig, TrainConfig
from agent_rl.train.loss.policy_loss import LossCounts, PolicyLoss, policy_loss
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.parallel_checks import layout_problems

pytestmark = pytest.mark.megatron


def logits_of_routers(model: Any) -> list[list[Tensor]]:
    """Collects the logits of every run of each layer's router."""
    seen: list[list[Tensor]] = []
    for layer in model.modules[0].decoder.layers:
        runs: list[Tensor] = []
        seen.append(runs)

        def watch(router: Any, inputs: Any, _output: Any, runs: list[Tensor] = runs) -> None:
            runs.append(torch.nn.functional.linear(inputs[0].detach().flatten(0, -2), router.weight.detach()))

        layer.mlp.router.register_forward_hook(watch)
    return seen


def by_loops(old: list[Tensor], new: list[Tensor], experts: Tensor, present: Tensor) -> list[float]:
    """log gamma of the token after each row."""
    found = []
    for row in range(len(experts)):
        distance = 0.0
        for layer, (before, after) in enumerate(zip(old, new, strict=True)):
            logs = [
                [value - math.log(sum(map(math.exp, logits))) for value in logits]
                for logits in (before[row].double().tolist(), after[row].double().tolist())
            ]
            used = experts[row, layer].tolist()
            moved = sum(abs(logs[1][expert] - logs[0][expert]) for expert in used) / len(used)
            distance += moved / len(old) if present[row] else 0.0
        found.append(-distance)
    return [found[-1], *found[:-1]]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shift_equals_loops_over_floats(build: Callable[..., Any], recompute: str) -> None:
    model, batch = build(recompute=recompute), tiny.packed()
    given = tiny.random_routes(len(batch))
    routes = [PackedRoutes(given, torch.arange(len(batch)) % 4 != 0)]
    logits = logits_of_routers(model)
    (old,) = model.forward_logprobs([batch], routes, gates=True)
    assert old.gates is not None
    assert model.forward_logprobs([batch], routes)[0].gates is None
    before = [runs[0] for runs in logits]
    found: list[Tensor] = []

    def loss(logprobs: Tensor, _entropy: Tensor | None, item: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        found.append(item.extras["router_shift"])
        assert not found[-1].requires_grad
        return logprobs.sum(), {}

    watched = replace(batch, extras={"gates": old.gates})
    model.train_microbatches([watched], routes, loss)
    assert found[0].tolist() == [0.0] * len(batch), "the policy has not moved"
    for runs in logits:
        runs.clear()
    draw = torch.Generator().manual_seed(0)
    for layer in model.modules[0].decoder.layers:
        weight = layer.mlp.router.weight
        weight.data += torch.randn(weight.shape, generator=draw) * 0.1
    model.train_microbatches([watched], routes, loss)
    after = [runs[0] for runs in logits]
    expected = by_loops(before, after, given, routes[0].present)
    assert min(expected) < -1e-3
    torch.testing.assert_close(found[1], torch.tensor(expected), rtol=1e-4, atol=1e-6)
    plain: list[bool] = []

    def unwatched(logprobs: Tensor, _entropy: Tensor | None, item: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        plain.append("router_shift" in item.extras)
        return logprobs.sum(), {}

    model.train_microbatches([batch], routes, unwatched)
    assert plain == [False]


def test_the_ratio_is_multiplied_before_the_clip() -> None:
    """For an unclipped and a clipped objective, with a floor. Values at tokens that were not sampled have no effect."""
    old, new = torch.tensor([-1.0, -2.0, -1.0, -0.5]), torch.tensor([-0.9, -1.5, -1.0, -0.5])
    mask, advantages = torch.tensor([True, True, True, False]), torch.tensor([1.0, 1.0, -2.0, 1.0])
    shift = torch.tensor([-0.05, -0.1, -3.0, math.nan])
    gammas = [math.exp(-0.05), math.exp(-0.1), 0.6]

    def result(train: dict[str, Any], shift_T: Tensor | None) -> PolicyLoss:
        chosen = TrainConfig.model_validate({"correction": {"router_shift": 0.6}, **train})
        return policy_loss(
            new, old, torch.ones(4), advantages, mask, torch.zeros(4, dtype=torch.int64), entropy_T=torch.zeros(4),
            weights_T=torch.ones(4), train=chosen, length=4, counts=LossCounts(3, 1, 3.0), shift_T=shift_T,
        )  # fmt: skip

    ratios = [math.exp(float(new[t] - old[t])) * gammas[t] for t in range(3)]
    expected = -sum(ratio * float(advantages[t]) for t, ratio in enumerate(ratios)) / 3
    found = result({"objective": "reinforce"}, shift)
    assert found.loss.item() == pytest.approx(expected)
    assert found.router_shift.item() == pytest.approx(sum(gammas))
    assert found.approx_kl == result({"objective": "reinforce"}, None).approx_kl
    terms = [min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratios, advantages.tolist(), strict=False)]
    clipped = result({"objective": "grpo", "eps_low": 0.2, "eps_high": 0.2}, shift)
    assert clipped.loss.item() == pytest.approx(-sum(terms) / 3)


def test_what_has_not_all_gates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router_shift compares the gates of replayed experts: set train\.replay"):
        TrainConfig.model_validate({"correction": {"router_shift": 0.8}, "replay": "off"})
    data = {"name": "t", "model": ".", "train": {"correction": {"router_shift": 0.8}}}
    config = RunConfig.model_validate(data)
    assert layout_problems(config) == []
    for layout in ({"tensor": 2}, {"pipeline": 2}, {"context": 2}):
        parallel = ParallelConfig(world_size=2, **layout)
        changed = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
        assert "train.correction.router_shift requires" in layout_problems(changed)[-1]
