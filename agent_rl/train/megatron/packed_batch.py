"""Packed micro-batches, the input of the model, and the output of a pass. Imports torch, not megatron.

A worked example, two sequences of 3 and 2 tokens (T = 5)::

    tokens        a b c x y
    position_ids  0 1 2 0 1
    cu_seqlens    0 3 5
    sample_ids    0 1            each sequence's index in the global batch
    logprobs      0 b c 0 y      log-prob of the token given those before it; 0 for the first of a sequence
    routes        a b c x y      row i: the experts used with token i as the input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from r3.balance import LayerPlan
from r3.kept_tokens import KeptTokens
from r3.shard import RouteShard


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Sequences concatenated without padding.

    ``tokens`` and ``position_ids`` int64 ``[T]``, ``cu_seqlens`` int32 ``[n + 1]`` from 0 to T. ``sample_ids`` ``[n]``
    identify the sequences in route checks. ``extras``: tensors of the loss function by name; the model only moves them
    to its device. ``kept``: the kept tokens of all T tokens, on the host, or None. ``candidates`` int32 ``[T, k]``: ids
    whose log-probs in place of each token a loss function gets, as ``extras["candidates"]`` ``[T, k]``; None: none.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    sample_ids: tuple[int, ...]
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    kept: KeptTokens | None = None
    candidates: Tensor | None = None

    def __post_init__(self) -> None:
        lengths = self.cu_seqlens.diff()
        if self.tokens.ndim != 1 or self.tokens.shape != self.position_ids.shape:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)} and position_ids {tuple(self.position_ids.shape)} must both be [T]"
            )
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != len(self.tokens) or bool((lengths <= 0).any()):
            raise ValueError(f"cu_seqlens {self.cu_seqlens.tolist()} must rise from 0 to {len(self.tokens)}")
        if self.kept is not None and len(self.kept.counts) != len(self.tokens):
            raise ValueError(f"{len(self.kept.counts)} rows of kept tokens for {len(self.tokens)} tokens")
        if len(self.sample_ids) != len(lengths):
            raise ValueError(f"{len(self.sample_ids)} sample_ids for {len(lengths)} sequences")

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[Sequence[int] | Tensor], extras: Mapping[str, Tensor] | None = None
    ) -> PackedBatch:
        """Concatenate ``sequences`` of token ids; their sample ids are 0, 1, .... ``extras`` are packed, ``[T,
        ...]``."""
        parts = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
        lengths = torch.tensor([0, *(len(part) for part in parts)], dtype=torch.int32)
        positions = torch.cat([torch.arange(len(part)) for part in parts])
        bounds = lengths.cumsum(0, dtype=torch.int32)
        return cls(torch.cat(parts), positions, bounds, tuple(range(len(parts))), dict(extras or {}))

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on ``device``."""
        return PackedBatch(
            self.tokens.to(device),
            self.position_ids.to(device),
            self.cu_seqlens.to(device),
            self.sample_ids,
            {name: tensor.to(device) for name, tensor in self.extras.items()},
            self.kept,
            None if self.candidates is None else self.candidates.to(device),
        )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRoutes:
    """Routes of a full packed batch: integers ``experts`` ``[T, moe_layers, top_k]``, bool ``present`` ``[T]``.

    Every rank takes its shard from them. Routes that were sharded before come as :class:`r3.shard.RouteShard`.
    """

    experts: Tensor
    present: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """The output of a forward pass: ``logprobs``, ``entropy`` and ``values`` float32 ``[T]``, and ``routes``.

    Entry i belongs to the distribution of token i; it is 0 for the first token of a sequence.
    ``entropy`` is detached. ``routes``: the experts that this rank's routers used, ``[rows, columns, top_k]`` on
    the CPU, uint8 for up to 256 experts, else int32; rows and columns as in :class:`r3.shard.RouteShard` (padding
    included); a single rank has those of the full batch. ``values``: of the states before the tokens, from the model's
    value head, or None. ``gates`` float32 ``[T, L, K]`` on the CPU: the router's log-probabilities of the experts used,
    or None.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    routes: Tensor | None = None
    values: Tensor | None = None
    gates: Tensor | None = None


Routes = PackedRoutes | RouteShard
"""Routes of one batch: full, or this rank's shard."""

PassPlans = Sequence[Mapping[int, LayerPlan]]
"""Which ranks borrow which experts: for each micro-batch a plan per column of this rank's routes, the same on all ranks
of an expert group. Micro-batches beyond the end have no plan."""

LossFn = Callable[[Tensor, Tensor | None, PackedBatch], tuple[Tensor, dict[str, Any]]]
"""``(logprobs, entropy, batch) -> (loss, metrics)``; losses are summed over micro-batches and data ranks. With a value
head the values are among the batch's extras."""
