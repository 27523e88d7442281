"""The gated delta rule (Qwen3-Next, Qwen3.5) for SGLang 0.5.23 on a CPU: its own kernels need a GPU or Intel AMX.

Axes: T tokens of all sequences, D columns of the convolution, W its width, H value heads, K and V widths of keys and
values. States are kept per cache slot: ``[slots, D, W - 1]`` of convolutions and ``[slots, H, V, K]`` of the rule.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def install() -> None:
    """Provide the kernels that SGLang's modules for these models import. Before they are imported."""
    functions: tuple[Any, ...] = (
        fused_gdn_gating_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
    )
    for function in functions:
        setattr(torch.ops.sgl_kernel, function.__name__, function)
    mamba: Any = types.ModuleType("sgl_kernel.mamba")
    mamba.causal_conv1d_fn_cpu, mamba.causal_conv1d_update_cpu = causal_conv1d_fn_cpu, causal_conv1d_update_cpu
    mamba.chunk_gated_delta_rule_cpu = chunk_gated_delta_rule_cpu
    sys.modules["sgl_kernel.mamba"] = mamba
    fused: Any = importlib.import_module("sglang.kernels.ops.attention.fla.fused_norm_gate")
    fused.rms_norm_gated = gated_norm
    plain: Any = importlib.import_module("sglang.kernels.ops.attention.fla.layernorm_gated")
    plain.rms_norm_gated = lambda *, x, weight, bias, z, eps, activation, **_options: gated_norm(
        x, z, weight, bias, activation, eps
    )


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, bias: None, activation: str = "swish", eps: float = 1e-6, **_options: Any
) -> Tensor:
    """The norm of ``x`` times ``weight`` and SiLU of the gate."""
    if bias is not None or activation not in ("swish", "silu"):
        raise ValueError(f"a gated norm with activation {activation} or a bias is not supported on a CPU")
    return (_norm(x.float(), eps) * weight.float() * F.silu(gate.reshape(x.shape).float())).to(x.dtype)


def fused_gdn_gating_cpu(decay_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The decay (its logarithm) and beta, each ``[1, T, H]``."""
    decay = -decay_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
    initial_state_indices: Tensor, **_options: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Tokens that extend several sequences; the states of their slots move on. All inputs have a first axis of 1."""
    out = torch.empty(v.shape[1:], dtype=torch.float32)
    q, k = _unit_heads(q[0], k[0], v.shape[2])
    bounds = itertools.pairwise(cu_seqlens.tolist())
    for slot, (start, end) in zip(initial_state_indices.tolist(), bounds, strict=True):
        state = initial_state[slot].float()[None]
        for t in range(start, end):
            out[t] = _step(state, q[None, t], k[None, t], v[0, None, t].float(), g[0, None, t], beta[0, None, t])[0]
        initial_state[slot] = state[0].to(initial_state.dtype)
    return out[None].to(v.dtype), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor, **_options: Any,
) -> Tensor:  # fmt: skip
    """One token of each sequence; ``q``, ``k`` and ``v`` are ``[1, sequences, ...]``."""
    decay, beta = fused_gdn_gating_cpu(A_log, a.view(-1, v.shape[2]), b.view(-1, v.shape[2]), dt_bias)
    slots = initial_state_indices.long()
    state = initial_state_source[slots].float()
    out = _step(state, *_unit_heads(q[0], k[0], v.shape[2]), v[0].float(), decay[0], beta[0])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return out[None].to(v.dtype)


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The outputs of one token of each sequence. ``state`` ``[sequences, H, V, K]`` is changed in place."""
    state *= decay.exp()[..., None, None]
    error = (v - (state @ k[..., None])[..., 0]) * beta[..., None]
    state += error[..., None] * k[..., None, :]
    return (state @ q[..., None])[..., 0]


def _unit_heads(q: Tensor, k: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1 for each value head, queries scaled."""
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    each = value_heads // k.shape[-2]
    return q.repeat_interleave(each, -2) * q.shape[-1] ** -0.5, k.repeat_interleave(each, -2)


def causal_conv1d_fn_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, conv_states: Tensor,
    has_initial_state: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **_options: Any,
) -> Tensor:  # fmt: skip
    """The convolution of the tokens ``x [D, T]`` that extend several sequences."""
    out, before, bounds = torch.empty_like(x), weight.shape[-1] - 1, itertools.pairwise(query_start_loc.tolist())
    sequences = zip(cache_indices.tolist(), has_initial_state.tolist(), bounds, strict=True)
    for slot, has_state, (start, end) in sequences:
        state = conv_states[slot][:, -before:]
        history = state if has_state else torch.zeros_like(state)
        row = torch.cat((history.to(x.dtype), x[:, start:end]), 1)
        convolved = F.conv1d(row[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, start:end] = F.silu(convolved) if activation else convolved
        state.copy_(row[:, -before:])
    return out


def causal_conv1d_update_cpu(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    conv_state_indices: Tensor, **_options: Any,
) -> Tensor:  # fmt: skip
    """The convolution of one token ``x [sequences, D]`` of each sequence."""
    before, slots = weight.shape[-1] - 1, conv_state_indices.long()
    row = torch.cat((conv_state[slots][:, :, -before:].to(x.dtype), x[..., None]), -1)
    conv_state[slots, :, -before:] = row[:, :, 1:].to(conv_state.dtype)
    convolved = (row * weight).sum(-1) + (0 if bias is None else bias)
    return F.silu(convolved) if activation else convolved


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """The output gate of grouped attention, in place."""
    x.mul_(torch.sigmoid(gate))


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, *_sizes: int
) -> tuple[Tensor, Tensor]:
    """The norms of queries and keys by ``1 + weight``, over each head."""
    return _zero_centered(q, q_weight, eps, head_dim), _zero_centered(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, *_sizes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`fused_qk_gemma_rmsnorm_cpu`, where each head's gate follows its query."""
    q, gate = (part.flatten(1) for part in q_gate.unflatten(-1, (-1, 2, head_dim)).unbind(2))
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side, output gates, and the logits of beta and of the decay."""
    gates = value_heads * value_dim
    mixed, z = qkvz.split((2 * key_heads * key_dim + gates, gates), 1)
    b, a = ba.split(value_heads, 1)
    return mixed.contiguous(), z.reshape(len(z), value_heads, value_dim), b.contiguous(), a.contiguous()


def _zero_centered(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    heads = x.reshape(-1, head_dim).float()
    return (_norm(heads, eps) * (1 + weight.float())).to(x.dtype).view(x.shape)


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
