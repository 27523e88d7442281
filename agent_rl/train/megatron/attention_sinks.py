"""Causal attention with windows and sinks over segments of packed tokens (gpt-oss, arXiv 2508.10925).

A query sees at most the last ``window`` keys, its own included (0: all). Each head has a sink, a learned score z beside
the scores s_j of the keys, which has no value (arXiv 2309.17453):

    o = sum_j exp(s_j) v_j / (exp(z) + sum_j exp(s_j))

Axes as in :mod:`agent_rl.train.megatron.varlen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agent_rl.train.megatron.varlen import Segments

SinkAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Segments, float, int], Tensor]
"""``attend(query [Q, H, D], key [K, G, D], value [K, G, D], sinks [H], segments, scale, window)`` of packed segments
returns ``[Q, H, D]``."""

_BLOCK = 256
"""Queries of a block. A block of a layer with windows reads only the keys within reach."""


def reference_sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, segments: Segments, scale: float, window: int
) -> Tensor:
    """All weights in memory, the reference for the other kernels."""
    inputs = (query.split(segments.queries), key.split(segments.keys), value.split(segments.keys))
    parts = [_attend(q, k, v, sinks, scale, window, len(k) - len(q)) for q, k, v in zip(*inputs, strict=True)]
    return torch.cat(parts)


def attend_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, segments: Segments, scale: float, window: int
) -> Tensor:
    """Block after block of queries in plain torch operations; the backward pass computes each block's weights again."""
    parts = []
    for block in _blocks(segments, window):
        q, k, v = query[block.queries], key[block.keys], value[block.keys]
        parts.append(checkpoint(_attend, q, k, v, sinks, scale, window, block.shift, use_reentrant=False))
    return torch.cat(parts)


def flash_sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, segments: Segments, scale: float, window: int
) -> Tensor:
    """torch's flash attention on a GPU, then the sinks."""
    return attend_with_log_sum(FlashLogSum(segments, scale, window), query, key, value, sinks)


class _Block(NamedTuple):
    """Query i of the block sees keys up to ``i + shift``."""

    queries: slice
    keys: slice
    shift: int


def _blocks(segments: Segments, window: int) -> Iterator[_Block]:
    query_start = key_start = 0
    for queries, keys in zip(segments.queries, segments.keys, strict=True):
        for first in range(0, queries, _BLOCK):
            last = min(first + _BLOCK, queries)
            earlier = keys - queries
            seen = max(0, first + earlier - window + 1) if window else 0
            yield _Block(
                slice(query_start + first, query_start + last),
                slice(key_start + seen, key_start + last + earlier),
                first + earlier - seen,
            )
        query_start, key_start = query_start + queries, key_start + keys


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int, shift: int) -> Tensor:
    """One block with all weights in memory, in at least float32."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(shift)
    if window:
        seen = seen.triu(shift - window + 1)
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qgsd,kgd->gsqk", grouped, k) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~seen, -torch.inf)
    sink = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(-1, -1, len(q), 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1].to(v.dtype)
    return torch.einsum("gsqk,kgd->qgsd", weights, v).flatten(1, 2)


class LogSumKernel(Protocol):
    """An attention without sinks that also gives the log-sum L of every query's scores ``[H, Q]`` in float32, and its
    gradients from output and log-sum."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attend_with_log_sum(kernel: LogSumKernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """The output of ``kernel`` times sigmoid(L - z), which is the attention with sinks.

    The kernel's own backward pass computes weights as exp(s - L). With the output of the attention with sinks and
    log(exp(L) + exp(z)) in place of L it returns the gradients of the attention with sinks.
    """
    output: Tensor = _WithLogSum.apply(query, key, value, sinks, kernel)
    return output


class _WithLogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: LogSumKernel) -> Tensor:
        plain, log_sum = kernel.forward(query, key, value)
        with_sink = torch.logaddexp(log_sum, sinks.to(log_sum.dtype)[:, None])
        output = (plain * (log_sum - with_sink).exp().T[..., None]).to(plain.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, output, with_sink)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, with_sink = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_inputs = ctx.kernel.backward(gradient, query, key, value, output, with_sink)
        share = (sinks.to(with_sink.dtype)[:, None] - with_sink).exp()
        towards = (gradient.to(share.dtype) * output.to(share.dtype)).sum(-1)
        return *of_inputs, -(share * towards.T).sum(1).to(sinks.dtype), None


@dataclass(frozen=True, slots=True)
class FlashLogSum:
    """torch's flash attention over packed segments on a GPU."""

    segments: Segments
    scale: float
    window: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`LogSumKernel`."""
        flash: Any = torch.ops.aten._flash_attention_forward
        output, log_sum, *_ = flash(query, key, value, *self._lengths, False, **self._options)
        return output, log_sum

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`LogSumKernel`."""
        flash: Any = torch.ops.aten._flash_attention_backward
        inputs = (gradient, query, key, value, output, log_sum, *self._lengths)
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout, which is 0
        gradients: tuple[Tensor, Tensor, Tensor] = flash(*inputs, random_state, query.new_empty(0), **self._options)
        return gradients

    @property
    def _lengths(self) -> tuple[Any, ...]:
        """Ends and lengths of segments, dropout, and whether the mask is only causal."""
        segments = self.segments
        longest = max(segments.queries), max(segments.keys)
        return segments.query_ends, segments.key_ends, *longest, 0.0, not self.window

    @property
    def _options(self) -> dict[str, Any]:
        left = self.window - 1 if self.window else -1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}
