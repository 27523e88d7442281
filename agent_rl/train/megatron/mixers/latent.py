"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with DeepSeek-V3.2's sparse choice of keys.

Axes: S this tensor rank's tokens, T those of all tensor ranks, H this rank's heads, D head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.models.parts import Indexer, Latent
from agent_rl.models.spec import ModelSpec
from agent_rl.train.megatron.attention import PackedAttention
from agent_rl.train.megatron.kernel_choice import Kernels
from agent_rl.train.megatron.mixers.common import ReplicatedLinear, column_linear, core, row_linear
from agent_rl.train.megatron.norm_and_rope import rotate_part, yarn_scale
from agent_rl.train.megatron.norms import RMSNorm
from agent_rl.train.megatron.varlen import Segments

INDEX_EPS = 1e-6
"""The epsilon of the norm of index keys, which no config names."""


class LatentAttention(torch.nn.Module):
    """Causal attention whose keys and values, and mostly queries, are projections of a narrow normalized latent.

    Keys and values are materialized for all heads. Every tensor rank has the projections to latents, and computes the
    latents of its own tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        model_spec: ModelSpec,
        kernels: Kernels,
        lora: LoraConfig | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        spec, latent = model_spec, model_spec.latent
        assert latent is not None
        self.config, self.latent, self._attend = config, latent, kernels.attend
        self.scale = spec.head_dim**-0.5 * softmax_factor(spec)
        if latent.q_rank:
            self.q_down = ReplicatedLinear(config, spec.hidden, latent.q_rank, lora=lora)
            self.q_norm = RMSNorm(config, latent.q_rank, spec.norm_eps)
        self.q_up = column_linear(config, latent.q_rank or spec.hidden, spec.heads * spec.head_dim, lora=lora)
        self.kv_down = ReplicatedLinear(config, spec.hidden, latent.cache_width, lora=lora)
        self.kv_norm = RMSNorm(config, latent.kv_rank, spec.norm_eps)
        expanded = spec.heads * (latent.plain_dim + latent.value_dim)
        self.kv_up = column_linear(config, latent.kv_rank, expanded, lora=lora)
        self.linear_proj = row_linear(config, spec.heads * latent.value_dim, spec.hidden, lora=lora)
        self.indexer = None if spec.indexer is None else LightningIndexer(config, spec.hidden, latent, spec.indexer)

    def forward(
        self, hidden: Tensor, *, packed_seq_params: PackedAttention, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention's output ``[S, 1, hidden]`` and no bias."""
        latent, packed = self.latent, packed_seq_params
        q_latent = self.q_norm(self.q_down(hidden)) if latent.q_rank else hidden
        query = self._heads(self.q_up(q_latent)[0], latent.plain_dim + latent.rotary_dim)
        kv_latent, shared_key = self.kv_down(hidden).split((latent.kv_rank, latent.rotary_dim), dim=-1)
        key_value = self._heads(self.kv_up(self.kv_norm(kv_latent))[0], latent.plain_dim + latent.value_dim)
        if self.config.sequence_parallel:
            shared_key = gather_from_sequence_parallel_region(shared_key, tensor_parallel_output_grad=True)
        visible = None if self.indexer is None else self.indexer(hidden, q_latent, packed)
        attended = core(self.config, partial(self._core, packed, visible), query, key_value, shared_key)
        output, bias = self.linear_proj(attended.flatten(1)[:, None])
        return output, bias

    @staticmethod
    def _heads(projected: Tensor, width: int) -> Tensor:
        """``[T, 1, H * width]`` as ``[T, H, width]``."""
        return projected[:, 0].unflatten(-1, (-1, width))

    def _rotate(self, packed: PackedAttention, x: Tensor) -> Tensor:
        return rotate_part(x, packed.cos, packed.sin, interleaved=self.latent.interleaved)

    def _core(
        self,
        packed: PackedAttention,
        visible: list[Tensor] | None,
        query: Tensor,
        key_value: Tensor,
        shared_key: Tensor,
    ) -> Tensor:
        """The attended values ``[T, H, value]``. ``shared_key`` ``[T, 1, rotary]``: what all heads' keys rotate."""
        latent = self.latent
        key, value = key_value.split((latent.plain_dim, latent.value_dim), dim=-1)
        plain, rotary = query.split((latent.plain_dim, latent.rotary_dim), dim=-1)
        query = torch.cat((plain, self._rotate(packed, rotary)), dim=-1)
        shared = self._rotate(packed, shared_key).expand(-1, key.shape[1], -1)
        key, value = packed.gather(torch.cat((key, shared), dim=-1)), packed.gather(value)
        if visible is None:
            return self._attend(query, key, value, packed.segments, self.scale)
        return masked_attention(query, key, value, packed.segments, visible, self.scale)


class LightningIndexer(torch.nn.Module):
    """Chooses the keys that each query sees, by ``sum_h w_h relu(q_h k)`` in float32 (DeepSeek-V3.2, Eq. 1).

    Its weights are buffers, because no gradient reaches them. While no sequence has more than ``top_k`` tokens, all
    keys are visible and nothing is computed.
    """

    query: Tensor
    key: Tensor
    head_weight: Tensor
    key_norm_weight: Tensor
    key_norm_bias: Tensor

    def __init__(self, config: TransformerConfig, hidden: int, latent: Latent, indexer: Indexer) -> None:
        super().__init__()
        self.indexer, self._gathers = indexer, config.sequence_parallel
        device, narrow, wide = torch.cuda.current_device(), config.params_dtype, torch.float32
        shapes = {
            "query": ((indexer.heads * indexer.head_dim, latent.q_rank), narrow),
            "key": ((indexer.head_dim, hidden), narrow),
            "head_weight": ((indexer.heads, hidden), narrow),
            "key_norm_weight": ((indexer.head_dim,), wide),
            "key_norm_bias": ((indexer.head_dim,), wide),
        }
        for name, (shape, dtype) in shapes.items():
            weight = torch.empty(shape, dtype=dtype, device=device)
            self.register_buffer(name, weight.normal_(std=config.init_method_std) if len(shape) > 1 else weight.zero_())

    @torch.no_grad()
    def forward(self, hidden: Tensor, q_latent: Tensor, packed: PackedAttention) -> list[Tensor] | None:
        """For each segment, bool ``[queries, keys]``; None: every key is visible. ``hidden`` and ``q_latent`` are
        ``[S, 1, width]``."""
        # Every rank of a context group has the same longest sequence, and takes part in gathering keys or does not.
        if max(packed.layout.lengths) * packed.layout.context_size <= self.indexer.top_k:
            return None
        if self._gathers:
            hidden, q_latent = (gather_from_sequence_parallel_region(part) for part in (hidden, q_latent))
        query = F.linear(q_latent, self.query)[:, 0].unflatten(-1, (self.indexer.heads, -1))
        key = self._normed(F.linear(hidden, self.key))
        interleaved = self.indexer.interleaved
        query, key = (rotate_part(part, packed.cos, packed.sin, interleaved=interleaved) for part in (query, key))
        weight = F.linear(hidden[:, 0].float(), self.head_weight.float())
        weight = weight * (self.indexer.heads * self.indexer.head_dim) ** -0.5
        segments = packed.segments
        parts = (query.split(segments.queries), weight.split(segments.queries), packed.gather(key).split(segments.keys))
        return [self._visible(*part) for part in zip(*parts, strict=True)]

    def _normed(self, key: Tensor) -> Tensor:
        width = (self.indexer.head_dim,)
        return F.layer_norm(key.float(), width, self.key_norm_weight, self.key_norm_bias, INDEX_EPS).to(key.dtype)

    def _visible(self, query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
        """The keys ``[K, 1, D]`` that each query ``[Q, heads, D]`` sees."""
        scores = torch.einsum("qhd,kd->qhk", query.float(), key[:, 0].float()).relu_()
        scores = torch.einsum("qh,qhk->qk", weight, scores).masked_fill_(~causal(query, key), -torch.inf)
        best = scores.topk(min(self.indexer.top_k, len(key)), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & causal(query, key)


def softmax_factor(spec: ModelSpec) -> float:
    """DeepSeek-V3's change of the softmax scale under YaRN: the square of its factor with ``mscale_all_dim``."""
    yarn = spec.rope_scaling or {}
    return yarn_scale(yarn.get("factor", 1.0), yarn.get("mscale_all_dim", 0.0)) ** 2


def causal(query: Tensor, key: Tensor) -> Tensor:
    """Bool ``[Q, K]``: the last query sees the last key."""
    return torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(len(key) - len(query))


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, visible: list[Tensor], scale: float
) -> Tensor:
    """Attention of each segment's queries ``[Q, H, D]`` to the keys that they see."""
    parts = (query.split(segments.queries), key.split(segments.keys), value.split(segments.keys), visible)
    return torch.cat([_masked(q, k, v, mask, scale) for q, k, v, mask in zip(*parts, strict=True)])


def _masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)[0].transpose(0, 1)
