"""Patches for gpt-oss in sglang 0.5.23 on a CPU: attention with sinks and windows, which ``torch_native`` lacks.

Axes: T new tokens of a sequence, K its keys within reach, H heads, G heads of keys and values, D head width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Apply all patches of this file."""
    _attend_with_sinks()
    _accept_torch_native()
    _follow_dtype_of_server()


def _attend_with_sinks() -> None:
    module: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend

    def forward(new_tokens_of: Callable[[Any], list[int]]) -> Callable[..., Tensor]:
        def attend_batch(
            self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any,
            save_kv_cache: bool = True, sinks: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            assert sinks is not None, "every attention of gpt-oss has sinks"
            pool = self.token_to_kv_pool
            if save_kv_cache:
                pool.set_kv_buffer(layer, module.KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
            queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            counts, lengths, outputs = new_tokens_of(batch), batch.seq_lens.tolist(), []
            tables = self.req_to_token_pool.req_to_token[batch.req_pool_indices]
            for new, table, length in zip(queries.split(counts), tables, lengths, strict=True):
                outputs.append(_attend(self, new, table, length, layer, sinks))
            return torch.cat(outputs).flatten(1)

        return attend_batch

    backend.forward_extend = forward(lambda batch: batch.extend_seq_lens.tolist())
    backend.forward_decode = forward(lambda batch: [1] * len(batch.seq_lens))


def _attend(backend: Any, queries: Tensor, table: Tensor, length: int, layer: Any, sinks: Tensor) -> Tensor:
    """The last T of ``length`` tokens: ``queries [T, H, D]`` to ``[T, H, D]``. ``table``: where the sequence's tokens
    are in the cache."""
    first, window = length - len(queries), layer.sliding_window_size  # SGLang does not count a query's own key
    windowed = window is not None and window > -1
    reach = max(0, first - window) if windowed else 0
    entries = table[reach:length].long()
    if windowed and backend.use_sliding_window_kv_pool:
        entries = backend.token_to_kv_pool.translate_loc_from_full_to_swa(entries)
    keys, values = (
        cache(layer.layer_id)[entries].to(queries.dtype)
        for cache in (backend.token_to_kv_pool.get_key_buffer, backend.token_to_kv_pool.get_value_buffer)
    )
    distance = torch.arange(first, length)[:, None] - torch.arange(reach, length)
    hidden = (distance < 0) | (distance > window) if windowed else distance < 0
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = (torch.einsum("tgsd,kgd->gstk", grouped, keys) * layer.scaling).masked_fill(hidden, -torch.inf)
    sink = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(-1, -1, len(queries), 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("gstk,kgd->tgsd", weights, values).flatten(1, 2)


def _accept_torch_native() -> None:
    # SGLang refuses gpt-oss with an attention backend that has no sinks; torch_native has them from here on.
    hook: Any = importlib.import_module("sglang.srt.arg_groups.model_hook")
    backends_of = hook.attention_backends_of
    hook.attention_backends_of = lambda view: tuple("triton" if b == "torch_native" else b for b in backends_of(view))


def _follow_dtype_of_server() -> None:
    # SGLang makes the projections of gpt-oss in the dtype of the config and the sinks in bfloat16, whatever --dtype is.
    layer: Any = importlib.import_module("sglang.srt.models.gpt_oss").GptOssDecoderLayer
    make = layer.__init__

    def in_default_dtype(self: Any, *, config: Any, **options: Any) -> None:
        config.dtype = torch.get_default_dtype()
        make(self, config=config, **options)
        self.self_attn.sinks = torch.nn.Parameter(self.self_attn.sinks.to(config.dtype), requires_grad=False)

    layer.__init__ = in_default_dtype
