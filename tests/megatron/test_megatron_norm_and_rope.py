"""Hand-written backward passes compared with autograd's, on the formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron.norm_and_rope import Rotary, rms_norm, rotary_tables, rotate, rotate_part

pytestmark = pytest.mark.megatron
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def norm_written_out(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotation_written_out(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def same(ours: Callable[..., Tensor], reference: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    """Values and gradients agree, relative to the largest entry."""
    got, wanted = ours(*leaves), reference(*leaves)
    assert got.dtype == wanted.dtype
    gradient = torch.randn_like(wanted)
    with_gradients = [(out, *torch.autograd.grad(out, leaves, gradient)) for out in (got, wanted)]
    for mine, theirs in zip(*with_gradients, strict=True):
        assert mine.dtype == theirs.dtype
        error = (mine.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < TOLERANCE[leaves[0].dtype]


def leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


@dtypes
@pytest.mark.parametrize("shape", [(50, 1, 24), (7, 1, 3, 16)], ids=["hidden", "heads"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])  # at the smallest, eps is as large as the mean square
def test_norm_equals_the_formula(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    leaves = [leaf(*shape, dtype=dtype, scale=scale), leaf(shape[-1], dtype=dtype)]
    same(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: norm_written_out(x, w, 1e-6), leaves)


def test_norm_of_zeros_is_zero() -> None:
    x = torch.zeros(3, 1, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-6).sum().backward()
    assert torch.isfinite(x.grad).all()


@dtypes
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rotation_equals_the_formula(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    frequencies = 1.0 / 1e6 ** (torch.arange(0, 16, 2) / 16)
    positions = torch.tensor([0, 1, 2, 0, 1, 70_000])
    cos, sin = rotary_tables(positions, Rotary(frequencies, scale))
    angles = (positions[:, None] * frequencies)[:, None, :]
    x = [leaf(len(positions), 3, 16, dtype=dtype)]
    same(lambda x: rotate(x, cos, sin), lambda x: scale * rotation_written_out(x, angles), x)


def test_rotated_neighbors_give_the_products_of_transformers() -> None:
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import apply_rotary_pos_emb

    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 3, 24)
    cos, sin = rotary_tables(torch.arange(5), Rotary(1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)))
    tables = (part[None, :, 0] for part in (cos, -sin))
    rotated = apply_rotary_pos_emb(query[None, ..., :16], key[None, ..., :16], *tables, unsqueeze_dim=2)
    wanted_query, wanted_key = (
        torch.cat((part[0], plain[..., 16:]), -1) for part, plain in zip(rotated, (query, key), strict=True)
    )
    got_query, got_key = (rotate_part(part, cos, sin, interleaved=True) for part in (query, key))
    products = torch.einsum("qhd,khd->hqk", got_query, got_key)
    torch.testing.assert_close(products, torch.einsum("qhd,khd->hqk", wanted_query, wanted_key))
