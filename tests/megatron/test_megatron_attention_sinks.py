"""Attention with windows and sinks: against all weights in memory, transformers, and float64, with gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron import attention_sinks
from agent_rl.train.megatron.attention_sinks import SinkAttention
from agent_rl.train.megatron.varlen import Segments

pytestmark = pytest.mark.megatron

HEADS, SHARED, WIDTH, SCALE = 4, 2, 16, 0.3
CPU = torch.device("cpu")
SEGMENTS = (((600, 1, 30), (600, 1, 30)), ((300, 17), (700, 17)))
"""Longer than a block, of one token, and with more keys than queries."""


class CpuLogSum:
    """The flash attention of a CPU for one segment with as many keys as queries."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, log_sum = flash(*map(batched, (query, key, value)), 0.0, True, scale=SCALE)
        return output[0].transpose(0, 1), log_sum[0]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, ...]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        inputs = map(batched, (gradient, query, key, value, output))
        return tuple(part[0].transpose(0, 1) for part in flash(*inputs, log_sum[None], 0.0, True, scale=SCALE))


def batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None].contiguous()


def drawn(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, HEADS, WIDTH), (keys, SHARED, WIDTH), (keys, SHARED, WIDTH), (HEADS,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def with_gradients(attend: SinkAttention, leaves: list[Tensor], segments: Segments, window: int) -> list[Tensor]:
    output = attend(*leaves, segments, SCALE, window)
    gradient = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output, *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("window", [0, 1, 7, 300])
@pytest.mark.parametrize(("queries", "keys"), SEGMENTS)
def test_blocks_of_queries_equal_all_weights_in_memory(
    queries: tuple[int, ...], keys: tuple[int, ...], window: int
) -> None:
    leaves, segments = drawn(sum(queries), sum(keys)), Segments.build(queries, keys, CPU)
    expected = with_gradients(attention_sinks.reference_sink_attention, leaves, segments, window)
    for got, want in zip(
        with_gradients(attention_sinks.attend_by_blocks, leaves, segments, window), expected, strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_block_of_a_window_reads_no_keys_out_of_reach() -> None:
    blocks = list(attention_sinks._blocks(Segments.build((4000, 5), (6000, 5), CPU), 128))
    assert sum(block.queries.stop - block.queries.start for block in blocks) == 4005
    assert max(block.keys.stop - block.keys.start for block in blocks) == attention_sinks._BLOCK + 127


def test_a_kernel_that_returns_the_log_sum_gives_all_gradients() -> None:
    leaves, segments = drawn(70, 70), Segments.build((70,), (70,), CPU)

    def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, *_: object) -> Tensor:
        wide = (part.repeat_interleave(HEADS // SHARED, dim=1) for part in (key, value))
        return attention_sinks.attend_with_log_sum(CpuLogSum(), query, *wide, sink)

    expected = with_gradients(attention_sinks.reference_sink_attention, leaves, segments, 0)
    for got, want in zip(with_gradients(attend, leaves, segments, 0), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_attention_equals_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    query, key, value, sink = drawn(50, 50)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = HEADS // SHARED, torch.nn.Parameter(sink.detach())  # type: ignore[assignment]
    distance = torch.arange(50)[:, None] - torch.arange(50)
    mask = torch.zeros(50, 50, dtype=torch.float64).masked_fill((distance < 0) | (distance >= 9), -torch.inf)
    expected, _ = eager_attention_forward(module, *map(batched, (query, key, value)), mask, SCALE)
    got = attention_sinks.attend_by_blocks(query, key, value, sink, Segments.build((50,), (50,), CPU), SCALE, 9)
    torch.testing.assert_close(got, expected[0], rtol=0, atol=1e-12)


def test_sixteen_bits_keep_scores_in_float32() -> None:
    leaves, segments = drawn(300, 300, torch.bfloat16), Segments.build((300,), (300,), CPU)
    got = with_gradients(attention_sinks.attend_by_blocks, leaves, segments, 40)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for part, want in zip(
        got, with_gradients(attention_sinks.reference_sink_attention, exact, segments, 40), strict=True
    ):
        assert (part.double() - want).abs().max() < 0.03 * want.abs().max()
