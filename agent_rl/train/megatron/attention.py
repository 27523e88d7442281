"""The attention inputs of packed sequences, each of which attends to itself.

Axes: T tokens of this rank, D head width.

Under context parallelism every rank has two chunks of each sequence, one from either end, which balances the causal
work. Keys and values are gathered. Each chunk is a segment of queries with all keys up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from agent_rl.train.megatron.norm_and_rope import Rotary, rotary_tables
from agent_rl.train.megatron.token_sharding import Layout
from agent_rl.train.megatron.varlen import Segments


@dataclass
class PackedAttention(PackedSeqParams):
    """The attention inputs of a micro-batch that all layers share."""

    layout: Layout = field(default=None)  # type: ignore[assignment]
    cos: Tensor = field(default=None)  # type: ignore[assignment]
    sin: Tensor = field(default=None)  # type: ignore[assignment]
    segments: Segments = field(default=None)  # type: ignore[assignment]

    @classmethod
    def build(cls, layout: Layout, rotary: Rotary, device: torch.device) -> PackedAttention:
        """Rotary tables ``[T, 1, D]`` for the positions of this rank's tokens."""
        cos, sin = rotary_tables(layout.positions.to(device), rotary)
        return cls(qkv_format="thd", layout=layout, cos=cos, sin=sin, segments=_segments(layout, device))

    def gather(self, rows: Tensor) -> Tensor:
        """The keys (or values) of all segments, concatenated, from this rank's ``rows [T, ...]``. Collective."""
        layout = self.layout
        if layout.context_size == 1:
            return rows
        full, pieces = layout.gather_context(rows), []
        starts = accumulate((length * layout.context_size for length in layout.lengths), initial=0)
        key_counts = iter(self.segments.keys)
        for start, _ in zip(starts, layout.lengths, strict=False):
            pieces += [full[start : start + next(key_counts)] for _ in layout.chunks]
        return torch.cat(pieces)


def _segments(layout: Layout, device: torch.device) -> Segments:
    if layout.context_size == 1:
        return Segments.build(layout.lengths, layout.lengths, device)
    halves = [length // 2 for length in layout.lengths]
    queries = [half for half in halves for _ in layout.chunks]
    keys = [(chunk + 1) * half for half in halves for chunk in layout.chunks]
    return Segments.build(queries, keys, device)
