"""Small experts as our CPU servers multiply them, against a product an expert without padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from agent_rl.engine.cpu.cpu_kernels import are_small, mix_experts

pytestmark = pytest.mark.megatron


def layer(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weights = torch.randn(experts, 2 * inner, hidden) / 16, torch.randn(experts, hidden, inner) / 16
    return weights[0].bfloat16(), weights[1].bfloat16()


def one_by_one(x: Tensor, gates: Tensor, chosen: Tensor, up_and_gate: Tensor, down: Tensor) -> Tensor:
    rows, inner = x.new_empty(*chosen.shape, x.shape[1]), down.shape[2]
    for number in chosen.unique().tolist():
        token, slot = (chosen == number).nonzero(as_tuple=True)
        made = F.linear(x[token], up_and_gate[number])
        rows[token, slot] = F.linear(F.silu(made[..., :inner]) * made[..., inner:], down[number])
    return (rows.float() * gates.unsqueeze(-1)).sum(1).bfloat16()


@pytest.mark.parametrize(("experts", "top_k", "inner"), [(8, 2, 128), (128, 8, 16)])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 700])
@pytest.mark.parametrize("popular", [0.0, 3.0], ids=["even", "uneven"])
def test_mixed_experts_equal_one_product_per_expert(
    experts: int, top_k: int, inner: int, count: int, popular: float
) -> None:
    up_and_gate, down = layer(experts, 128, inner)
    x = torch.randn(count, 128).bfloat16()
    gates, chosen = (torch.randn(count, experts) + popular * torch.randn(experts)).softmax(-1).topk(top_k)
    found = mix_experts(x, gates, chosen, up_and_gate, down)
    torch.testing.assert_close(found, one_by_one(x, gates, chosen, up_and_gate, down), rtol=2**-6, atol=2**-8)


def test_large_experts_are_left_to_sglang() -> None:
    assert are_small(layer(128, 128, 16)[0])
    assert not are_small(torch.empty(128, 2 * 768, 2048, device="meta"))
