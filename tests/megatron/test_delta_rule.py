"""The chunked gated delta rule and its convolution against a token by token reference, and against transformers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.train.megatron.delta_rule import causal_convolution, delta_rule

pytestmark = pytest.mark.megatron
HEADS, KEY, VALUE = 3, 4, 5


def inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    """Queries, unit keys, values, decays from strong to none, and beta, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, HEADS, *shape, generator=generator, dtype=torch.float64)

    decay = -draw().exp() * torch.randint(0, 2, (tokens, HEADS), generator=generator)
    tensors = [draw(KEY), torch.nn.functional.normalize(draw(KEY), dim=-1), draw(VALUE), decay, draw().sigmoid()]
    return [tensor.requires_grad_() for tensor in tensors]


def by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The formula of :func:`delta_rule` for one sequence."""
    state, out = v.new_zeros(HEADS, KEY, VALUE), []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        error = v[t] - (state * k[t][..., None]).sum(1)
        state = state + k[t][..., None] * (beta[t][:, None] * error)[:, None]
        out.append((state * q[t][..., None]).sum(1))
    return torch.stack(out)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), chunk=st.sampled_from((1, 4, 7)), seed=st.integers(0)
)
def test_chunks_equal_the_rule_token_by_token(lengths: list[int], chunk: int, seed: int) -> None:
    tensors = inputs(sum(lengths), seed % 1000)
    out = delta_rule(*tensors, lengths, chunk)
    expected = torch.cat([by_token(*parts) for parts in zip(*(x.split(lengths) for x in tensors), strict=True)])
    torch.testing.assert_close(out, expected)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found, right = (torch.autograd.grad((x * weights).sum(), tensors) for x in (out, expected))
    torch.testing.assert_close(found, right)


def test_delta_rule_equals_transformers_over_several_chunks() -> None:
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

    tensors = [tensor.float() for tensor in inputs(150)]
    query, key, value, decay, beta = (tensor[None] for tensor in tensors)
    expected, _ = torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=beta)
    out = delta_rule(tensors[0] * KEY**-0.5, *tensors[1:], [150])
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), width=st.integers(1, 4))
def test_convolution_sees_only_tokens_before_in_its_sequence(lengths: list[int], width: int) -> None:
    x, weight = torch.randn(sum(lengths), 3), torch.randn(3, width)
    expected = []
    for part in x.split(lengths):
        padded = torch.nn.functional.pad(part, (0, 0, width - 1, 0))
        expected += [(padded[t : t + width] * weight.T).sum(0) for t in range(len(part))]
    torch.testing.assert_close(causal_convolution(x, weight, lengths), torch.stack(expected))
