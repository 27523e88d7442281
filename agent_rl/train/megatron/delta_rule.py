"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), the state space of Mamba-2 (arXiv 2405.21060), and their
short convolution over packed sequences: in torch, and by the kernels of others.

Axes: T tokens of all sequences, one after the other, H heads, G groups of heads, K and V widths of keys and values, C
tokens of a chunk, N chunks of all sequences.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.models.mixer_costs import CHUNK

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""As :func:`delta_rule`."""
StateSpace = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""As :func:`state_space`."""
_MAMBA_CHUNK = 128
"""The chunk of Mamba's kernels, as Nemotron-3 has it. The result does not depend on it."""


def causal_convolution(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each column of ``x [T, D]`` convolved over a token and those before it in its sequence; ``weight [D, width]``."""
    width = weight.shape[1]
    places, total = _places(lengths, before=width - 1)
    places = places.to(x.device)
    padded = x.new_zeros(total, x.shape[1]).index_copy(0, places, x)
    convolved = F.conv1d(padded.T[None], weight[:, None], groups=len(weight))[0].T
    return convolved[places - (width - 1)]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int], chunk: int = CHUNK
) -> Tensor:
    """The outputs ``o_t = S_t^T q_t`` ``[T, H, V]`` of the states ``S_t [K, V]``, at first zero in each sequence::

        S_t = exp(decay_t) S_(t-1) + k_t (beta_t (v_t - exp(decay_t) S_(t-1)^T k_t))^T

    ``query``, ``key`` ``[T, H, K]``, ``value`` ``[T, H, V]``, ``decay`` (at most 0) and ``beta`` ``[T, H]``, float32.

    Computed by chunks (section 3.3 of the paper). Within a chunk the values that are written solve a triangular system,
    for all chunks at once; the state is carried from chunk to chunk. Padding has beta 0 and decay 0.
    """
    places, total = _places(lengths, multiple=chunk)
    places = places.to(query.device)
    q, k, v, since, beta = (_chunked(x, places, total, chunk) for x in (query, key, value, decay, beta))
    since = since.cumsum(-1)  # the decay from the chunk's start to each token
    between = _decay_between(since)
    weighted = beta[..., None] * k
    system = (weighted @ k.mT * between).tril(-1)
    sides = torch.cat((beta[..., None] * v, since.exp()[..., None] * weighted), dim=-1)
    written, read = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), dim=-1
    )
    last = since[..., -1:, None]
    out = _carry(
        written,
        read,
        since.exp()[..., None] * q,
        q @ k.mT * between,
        ((last - since[..., None]).exp() * k).mT,
        last.exp(),
        [-(-length // chunk) for length in lengths],
    )
    return out.movedim(1, 2).flatten(0, 1)[places]


def fla_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int]
) -> Tensor:
    """:func:`delta_rule` by the kernels of flash-linear-attention (package fla), which multiply in bfloat16."""
    kernels: Any = importlib.import_module("fla.ops.gated_delta_rule")
    narrow = (part.bfloat16()[None] for part in (query, key, value))
    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0)
    out: Tensor = kernels.chunk_gated_delta_rule(*narrow, decay[None], beta[None], scale=1.0, cu_seqlens=ends)[0]
    return out[0].float()


def mamba_state_space(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor, lengths: Sequence[int]
) -> Tensor:
    """:func:`state_space` by the kernels of Mamba-2 (package mamba_ssm), which multiply in bfloat16."""
    kernels: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    query, key, value = (part.bfloat16()[None] for part in (query, key, value))
    sizes = torch.tensor(lengths, device=query.device)
    sequence = torch.arange(len(lengths), device=query.device, dtype=torch.int32).repeat_interleave(sizes)[None]
    out: Tensor = kernels.mamba_chunk_scan_combined(
        value, step[None], rate, key, query, chunk_size=_MAMBA_CHUNK, seq_idx=sequence
    )
    return out[0].float()


def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    lengths: Sequence[int],
    chunk: int = CHUNK,
) -> Tensor:
    """The outputs ``o_t = S_t^T q_t`` ``[T, H, V]`` of the states ``S_t [K, V]``, at first zero in each sequence::

        S_t = exp(rate step_t) S_(t-1) + k_t (step_t v_t)^T

    ``query``, ``key`` ``[T, G, K]``, ``value`` ``[T, H, V]``, ``step`` ``[T, H]``, ``rate`` (negative) ``[H]``,
    float32. The state space of Mamba-2 (arXiv 2405.21060, section 6), by chunks.
    """
    each = value.shape[1] // key.shape[1]
    query, key = (part.repeat_interleave(each, dim=1) for part in (query, key))
    value, decay = step[..., None] * value, rate * step
    places, total = _places(lengths, multiple=chunk)
    places = places.to(query.device)
    q, k, v, since = (_chunked(x, places, total, chunk) for x in (query, key, value, decay))
    since = since.cumsum(-1)  # the decay from the chunk's start to each token
    between = _decay_between(since)
    last = since[..., -1:, None]
    out = _carry(
        v,
        None,
        since.exp()[..., None] * q,
        q @ k.mT * between,
        ((last - since[..., None]).exp() * k).mT,
        last.exp(),
        [-(-length // chunk) for length in lengths],
    )
    return out.movedim(1, 2).flatten(0, 1)[places]


def _decay_between(since: Tensor) -> Tensor:
    """From each token ``[..., C, 1]`` back to each ``[..., 1, C]`` of its chunk, 0 for later ones."""
    upper = torch.ones(since.shape[-1], since.shape[-1], dtype=torch.bool, device=since.device).triu(1)
    return (since[..., :, None] - since[..., None, :]).masked_fill(upper, -torch.inf).exp()


def _chunked(x: Tensor, places: Tensor, total: int, chunk: int) -> Tensor:
    """``x`` ``[T, H, ...]`` at its ``places`` of ``total``, by chunks: ``[N, H, C, ...]``. Contiguous, because products
    would otherwise store a copy for the backward pass, as ``index_copy`` would store ``x``."""
    padded = x.new_zeros(total, *x.shape[1:]).index_put((places,), x)
    return padded.unflatten(0, (-1, chunk)).movedim(2, 1).contiguous()


def _carry(
    written: Tensor,
    read: Tensor | None,
    query: Tensor,
    weights: Tensor,
    key: Tensor,
    decay: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """The outputs ``[N, H, C, V]`` of all chunks, ``counts`` of them in each sequence. Chunks have the values
    ``written - read S`` if their state is S at first."""
    reads = [None] * len(written) if read is None else read.unbind(0)
    out, chunks = [], zip(reads, *(x.unbind(0) for x in (written, query, weights, key, decay)), strict=True)
    for count in counts:
        state = written.new_zeros(written.shape[1], key.shape[-2], written.shape[-1])
        for _ in range(count):
            w, u, q, a, k, d = next(chunks)
            new = u if w is None else u - w @ state
            out.append(q @ state + a @ new)
            state = d * state + k @ new
    return torch.stack(out)


def _places(lengths: Sequence[int], *, before: int = 0, multiple: int = 1) -> tuple[Tensor, int]:
    """Where each token comes if every sequence has ``before`` rows of padding before it and fills a ``multiple`` of
    rows, and the number of rows."""
    sizes = torch.tensor(lengths)
    rows = before + -(-sizes // multiple) * multiple
    starts = rows.cumsum(0) - rows + before - (sizes.cumsum(0) - sizes)
    return torch.arange(sum(lengths)) + starts.repeat_interleave(sizes), int(rows.sum())
