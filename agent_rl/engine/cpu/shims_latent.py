"""Patches of sglang 0.5.23 for latent attention on a CPU, dense and with DeepSeek-V3.2's sparse choice of keys."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Masks = list[Tensor]
"""For each sequence of a batch, bool ``[new tokens, tokens]``: the keys that each new token sees."""


def serve_latent() -> None:
    """Latent attention on torch_native."""
    _rotate_as_on_gpus()
    _absorb_projections()


def serve_sparse() -> None:
    """As :func:`serve_latent`, with an indexer in torch. SGLang's own is for GPUs, and so are its cache of index keys
    and its attention, so that everything else takes the model for a dense one."""
    serve_latent()
    _take_for_dense()
    _add_indexers()
    _attend_to_masks()


def _rotate_as_on_gpus() -> None:
    # SGLang's rotation for CPUs supports YaRN only, which it computes in an operator of its extension.
    factory: Any = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")

    def get_rope(*arguments: Any) -> Any:
        return factory.get_rope(*arguments[:8])

    factory.get_rope_cpu = get_rope


def _absorb_projections() -> None:
    # Without a handler, torch_native gets triton's, which attends to a prompt without its cached prefix.
    handler: Any = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    handler.AttentionBackendRegistry.register("torch_native", lambda attention, batch: handler.AttnForwardMethod.MLA)


def _take_for_dense() -> None:
    importlib.import_module("sglang.srt.models.deepseek_v2")
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang.")]:
        if hasattr(module, "is_deepseek_dsa"):
            vars(module)["is_deepseek_dsa"] = lambda config: False


def _add_indexers() -> None:
    module: Any = importlib.import_module("sglang.srt.models.deepseek_v2")
    attention = module.DeepseekV2AttentionMLA
    make: Callable[..., None] = attention.__init__

    def make_sparse(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        rotary = {name: options[name] for name in ("rope_theta", "rope_scaling", "max_position_embeddings")}
        self.indexer, self.use_dsa = TorchIndexer(options["config"], **rotary), True

    attention.__init__ = make_sparse


class TorchIndexer(torch.nn.Module):
    """Chooses the ``index_topk`` keys that each token sees; the names of the weights are those of SGLang's indexer."""

    def __init__(self, config: Any, rope_theta: float, rope_scaling: Any, max_position_embeddings: int) -> None:
        super().__init__()
        factory: Any = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")
        self.heads, self.width, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.rotated = config.qk_rope_head_dim
        self.wq_b = torch.nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.wk = torch.nn.Linear(config.hidden_size, self.width, bias=False)
        self.weights_proj = torch.nn.Linear(config.hidden_size, self.heads, bias=False)
        self.k_norm = torch.nn.LayerNorm(self.width, eps=1e-6, dtype=torch.float32)
        self.interleaved = bool(getattr(config, "indexer_rope_interleave", False))
        sizes = (self.rotated, self.rotated, max_position_embeddings)
        self.rotary = factory.get_rope(*sizes, rope_theta, not self.interleaved, rope_scaling)
        self.keys = torch.empty(0, self.width)
        self.requires_grad_(False)

    def forward(self, x: Tensor, q_lora: Tensor, positions: Tensor, forward_batch: Any, **_: Any) -> Masks | None:
        """The keys that each new token sees; None while every sequence is at most ``top_k`` tokens long."""
        context: Any = importlib.import_module("sglang.srt.model_executor.forward_context")
        query = self.wq_b(q_lora).unflatten(-1, (self.heads, self.width))
        key = F.layer_norm(self.wk(x).float(), (self.width,), self.k_norm.weight, self.k_norm.bias, self.k_norm.eps)
        query, key = (self._rotate(positions, part) for part in (query, key.to(x.dtype).unsqueeze(1)))
        self._keep(key.squeeze(1), forward_batch.out_cache_loc, context.get_token_to_kv_pool())
        if int(forward_batch.seq_lens.max()) <= self.top_k:
            return None
        weight = F.linear(x.float(), self.weights_proj.weight.float()) * (self.heads * self.width) ** -0.5
        table = context.get_attn_backend().req_to_token_pool.req_to_token
        counts = _new_tokens(forward_batch)
        parts = zip(query.split(counts), weight.split(counts), _entries(forward_batch, table), strict=True)
        return [self._mask(*part) for part in parts]

    def _rotate(self, positions: Tensor, x: Tensor) -> Tensor:
        """``x [T, heads, D]`` with its first dimensions rotated. Pairs become halves, of queries and keys alike."""
        cos, sin = self.rotary.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        turned, plain = x.split((self.rotated, self.width - self.rotated), dim=-1)
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*(part.to(x.dtype) for part in rotated), plain), dim=-1)

    def _keep(self, key: Tensor, entries: Tensor, pool: Any) -> None:
        if not len(self.keys):
            self.keys = key.new_zeros(pool.size + pool.page_size + 1, self.width)
        self.keys[entries] = key

    def _mask(self, query: Tensor, weight: Tensor, entries: Tensor) -> Tensor:
        scores = torch.einsum("qhd,kd->qhk", query.float(), self.keys[entries].float()).relu_()
        scores = torch.einsum("qh,qhk->qk", weight, scores)
        causal = torch.ones_like(scores, dtype=torch.bool).tril(scores.shape[1] - scores.shape[0])
        best = scores.masked_fill_(~causal, -torch.inf).topk(min(self.top_k, scores.shape[1]), dim=-1).indices
        return torch.zeros_like(causal).scatter_(-1, best, True) & causal


def _new_tokens(batch: Any) -> list[int]:
    counts: list[int] = [1] * len(batch.seq_lens) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
    return counts


def _entries(batch: Any, table: Tensor) -> list[Tensor]:
    """The cache entries of each sequence."""
    rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    return [table[row, :length].long() for row, length in rows]


def _attend_to_masks() -> None:
    module: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend

    def wrapped(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(
            self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
            save_kv_cache: bool = True, topk_indices: Masks | None = None,
        ) -> Tensor:  # fmt: skip
            if topk_indices is None:
                return attend(self, q, k, v, layer, forward_batch, save_kv_cache)
            pool = self.token_to_kv_pool
            pool.set_kv_buffer(layer, module.KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(_new_tokens(forward_batch))
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            entries = _entries(forward_batch, self.req_to_token_pool.req_to_token)
            parts = zip(query, entries, topk_indices, strict=True)
            return torch.cat([_attend(q, keys[e], values[e], mask, layer.scaling) for q, e, mask in parts]).flatten(1)

        return forward

    backend.forward_extend, backend.forward_decode = wrapped(backend.forward_extend), wrapped(backend.forward_decode)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """All heads ``query`` ``[Q, H, D]`` share ``key`` ``[K, 1, D]`` and ``value`` ``[K, 1, Dv]``."""
    query, key, value = (part.transpose(0, 1).to(query.dtype)[None] for part in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)
