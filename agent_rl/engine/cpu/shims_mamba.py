"""Mamba-2 and experts with squared ReLU (Nemotron-H) for SGLang 0.5.23 on a CPU: its own kernels need a GPU.

Axes: T tokens of all sequences, H heads, P a head's width, G groups, N width of the state. States are kept per cache
slot: ``[slots, H, P, N]``; those of convolutions are as in ``shims_delta``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import shims_delta
import torch
from cpu_kernels import mix_experts, square_positive
from torch import Tensor
from torch.nn import functional as F

_LIBRARIES: list[torch.library.Library] = []  # an operator exists as long as its library object


def install() -> None:
    """Apply all patches of this file. Before SGLang's modules for this model are imported."""
    shims_delta.install()
    _provide_kernels()
    _mix_squared_experts()
    _multiply_into_float32()


def _provide_kernels() -> None:
    mixer: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    mixer.causal_conv1d_fn_triton = shims_delta.causal_conv1d_fn_cpu
    mixer.causal_conv1d_update_triton = shims_delta.causal_conv1d_update_cpu
    mixer.mamba_chunk_scan_combined = scan_states
    mixer.selective_state_update = update_states
    compose = mixer.composed_weight_loader

    # Rounded once from float64, so that agent_rl/weight_sync/digests.py can predict the bits.
    def compose_exact(load: Callable[..., None], _function: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        return compose(load, lambda decay_log: -decay_log.double().exp())  # type: ignore[no-any-return]

    mixer.composed_weight_loader = compose_exact


def _mix_squared_experts() -> None:
    # SGLang's loop over experts knows no experts without a gate, and leaves the scale of gates to its GPU runners.
    native: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")

    def mix(layer: Any, x: Tensor, routed: Any, config: Any) -> Tensor:
        gates, chosen, _ = routed
        scaled = gates * (config.routed_scaling_factor or 1.0)
        return mix_experts(x, scaled, chosen, layer.w13_weight, layer.w2_weight, square_positive)

    native.moe_forward_native = mix


def _multiply_into_float32() -> None:
    # The router asks for a product of another dtype than its factors, which torch has on GPUs only.
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, out_dtype: torch.mm(a.to(out_dtype), b.to(out_dtype)), "CPU")
    _LIBRARIES.append(library)


def scan_states(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor, dt_bias: Tensor, cu_seqlens: Tensor,
    initial_states: Tensor | None, out: Tensor, state_dtype: torch.dtype, **_options: Any,
) -> tuple[None, Tensor, None]:  # fmt: skip
    """Tokens that extend several sequences: ``x`` ``[1, T, H, P]``, ``dt`` ``[1, T, H]``, ``B`` and ``C`` ``[1, T, G,
    N]``. Writes the outputs to ``out`` and returns each sequence's last state."""
    heads, width = x.shape[2:]
    inputs, outputs = _each_head(B[0], heads), _each_head(C[0], heads)
    step = F.softplus(dt[0].float() + dt_bias.float())
    states = x.new_zeros(len(cu_seqlens) - 1, heads, width, B.shape[-1], dtype=torch.float32)
    if initial_states is not None:
        states.copy_(initial_states)
    for state, (start, end) in zip(states, itertools.pairwise(cu_seqlens.tolist()), strict=True):
        for t in range(start, end):
            out[0, t] = _step(state[None], x[0, None, t], step[None, t], A, inputs[None, t], outputs[None, t], D)[0]
    return None, states.to(state_dtype), None


def update_states(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *,
    dt_bias: Tensor, state_batch_indices: Tensor, out: Tensor, **_options: Any,
) -> None:  # fmt: skip
    """One token of each sequence: ``x`` ``[sequences, H, P]``, ``B`` and ``C`` ``[sequences, G, N]``. SGLang repeats
    ``dt``, ``A``, ``D`` and ``dt_bias`` over a head's other axes."""
    slots = state_batch_indices.long()
    step = F.softplus(dt[..., 0].float() + dt_bias[:, 0].float())
    states = state[slots].float()
    inputs, outputs = _each_head(B, x.shape[1]), _each_head(C, x.shape[1])
    out.copy_(_step(states, x, step, A[:, 0, 0], inputs, outputs, D[:, 0]))
    state[slots] = states.to(state.dtype)


def _step(
    state: Tensor, x: Tensor, step: Tensor, decay: Tensor, inputs: Tensor, outputs: Tensor, skip: Tensor
) -> Tensor:
    """The outputs of one token of each sequence. ``state`` ``[sequences, H, P, N]`` is changed in place."""
    x = x.float()
    state *= (step * decay).exp()[..., None, None]
    state += (step[..., None] * x)[..., None] * inputs[..., None, :]
    return (state @ outputs[..., None])[..., 0] + skip.float()[:, None] * x


def _each_head(groups: Tensor, heads: int) -> Tensor:
    return groups.float().repeat_interleave(heads // groups.shape[-2], -2)
