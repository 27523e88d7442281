"""Patches for sglang 0.5.23 and 0.5.21 on a CPU-only torch: they make it start, start faster, and run faster.
Imported before sglang."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import shims_delta
import shims_mamba
import shims_sinks
import torch
import xxhash
from cpu_kernels import are_small, attend, is_batched_attention_faster, mix_experts
from shims_latent import serve_latent, serve_sparse

_LIBRARIES: list[torch.library.Library] = []  # an operator exists as long as its library object


def install() -> None:
    """Apply all patches: no compiler, torchvision's operators, no page locking of host buffers, fast hashes, forked
    workers, batched small experts, batched attention, 8-bit keys and values if requested, and what the model's family
    needs."""
    torch.zeros(1).cos()  # as agent_rl/train/megatron/cpu.py does, where the reason is
    _skip_compiler()
    _define_torchvision_operators()
    _skip_page_locking()
    _hash_fast()
    _fork_workers()
    _batch_small_experts()
    _batch_attention()
    if any(argument.endswith("fp8_e4m3") for argument in sys.argv):
        _allow_short_keys()
    if (patch := _BY_MODEL_TYPE.get(_model_type())) is not None:
        patch()


def _model_type() -> str:
    """The ``model_type`` of the checkpoint on the command line."""
    for argument, value in itertools.pairwise(sys.argv):
        if argument == "--model-path":
            return str(json.loads((Path(value) / "config.json").read_text()).get("model_type"))
    return ""


def _skip_compiler() -> None:
    # Importing torch's compiler takes 0.8 s of CPU time. A router of expert groups would be compiled with g++.
    def uncompiled(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    vars(torch)["compile"] = uncompiled


def _define_torchvision_operators() -> None:
    # torchvision registers fake kernels for these on import, but its extension does not load with a CPU torch. With
    # a torch built for CUDA (the package index's default) it loads and defines them.
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _skip_page_locking() -> None:
    # The buffer of captured routes always requests pinned memory, which is a CUDA call.
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def no_page_locking(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
        return None

    common._cuda_host_register = no_page_locking


def _hash_fast() -> None:
    # SHA-256 of all weights takes half of a weight update's CPU time. The prefix names the hash for the receiver
    # (agent_rl/weight_sync/digests.py).
    checker: Any = importlib.import_module("sglang.srt.utils.weight_checker")

    def hashed(tensor: torch.Tensor) -> str:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"

    checker._hash_tensor = hashed
    vars(torch.cuda)["synchronize"] = lambda device=None: None  # SGLang 0.5.21 calls it before it hashes


def _fork_workers() -> None:
    # SGLang spawns its workers, as CUDA requires, and each imports everything again: 8 s of
    # CPU time per worker. Without CUDA they are forked before the server starts compute threads.
    multiprocessing.set_start_method("fork", force=True)

    def keep(method: str | None, force: bool = False) -> None:
        return None

    vars(multiprocessing)["set_start_method"] = keep


def _batch_small_experts() -> None:
    # SGLang loops over the experts in Python, two small products each: most of a decoding step with many experts.
    native: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    mix_in_loop = native.moe_forward_native

    def mix_batched(layer: Any, x: torch.Tensor, routed: Any, config: Any) -> torch.Tensor:
        gates, chosen, _ = routed
        biased = any(getattr(layer, name, None) is not None for name in ("w13_weight_bias", "w2_weight_bias"))
        plain = config.activation == "silu" and config.gemm1_alpha is None and not config.apply_router_weight_on_input
        if biased or not plain or not are_small(layer.w13_weight):
            return cast(torch.Tensor, mix_in_loop(layer, x, routed, config))
        return mix_experts(x, gates, chosen, layer.w13_weight, layer.w2_weight)

    native.moe_forward_native = mix_batched


def _batch_attention() -> None:
    # SGLang loops over the sequences in Python and computes the prefix's queries again.
    module: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # pads the batches of idle data-parallel ranks
    extend, decode = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode

    def is_plain(encoder_lens: torch.Tensor | None, options: Mapping[str, Any]) -> bool:
        return encoder_lens is None and not options["is_cross_attn"] and options["sliding_window_size"] is None

    def attend_batched(
        query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor,
        rows: torch.Tensor, lengths: torch.Tensor, new_tokens: torch.Tensor, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        entries = table[rows, : int(lengths.max())]
        return output.copy_(attend(query, keys, values, entries, lengths, new_tokens, scale))

    def extend_batched(
        self: Any, query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, prefixes: torch.Tensor,
        new_tokens: torch.Tensor, encoder_lens: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        plain = options["causal"] and is_plain(encoder_lens, options)
        if plain and is_batched_attention_faster(lengths, new_tokens, query.shape[1]):
            return attend_batched(query, output, keys, values, table, rows, lengths, new_tokens, options["scaling"])
        arguments = (query, output, keys, values, table, rows, lengths, prefixes, new_tokens, encoder_lens)
        return cast(torch.Tensor, extend(self, *arguments, **options))

    def decode_batched(
        self: Any, query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor,
        encoder_lens: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        new_tokens = torch.ones_like(lengths)
        if is_plain(encoder_lens, options) and is_batched_attention_faster(lengths, new_tokens, query.shape[1]):
            return attend_batched(query, output, keys, values, table, rows, lengths, new_tokens, options["scaling"])
        arguments = (query, output, keys, values, table, rows, lengths, encoder_lens)
        return cast(torch.Tensor, decode(self, *arguments, **options))

    backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode = extend_batched, decode_batched


def _norm_all_heads() -> None:
    # SGLang norms the queries and keys of MiniMax-M2 over all heads with Triton kernels.
    module: Any = importlib.import_module("sglang.srt.models.minimax_m2")

    def sum_squares(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.float().square().sum(-1) for part in (queries, keys)])

    def normed(
        queries: torch.Tensor, keys: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor,
        squares: torch.Tensor, ranks: int = 1, eps: float = 1e-5,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        parts = zip((queries, keys), (query_weight, key_weight), squares[: 2 * len(queries)].chunk(2), strict=True)
        return tuple(
            (x.float() * torch.rsqrt(total / x.shape[1] / ranks + eps)[:, None] * weight.float()).to(x.dtype)
            for x, weight, total in parts
        )

    module.rms_sumsq_serial, module.rms_apply_serial = sum_squares, normed


def _keep_float32_correction_bias() -> None:
    # SGLang holds the correction bias of ERNIE 4.5 in the model's dtype, which would change choices of experts.
    gate: Any = importlib.import_module("sglang.srt.models.ernie4").MoEGate
    make = gate.__init__

    def with_float32_bias(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.e_score_correction_bias = torch.nn.Parameter(self.e_score_correction_bias.float(), requires_grad=False)

    gate.__init__ = with_float32_bias


def _add_shared_expert() -> None:
    # SGLang adds the gated shared expert of Qwen2-MoE with a Triton kernel.
    module: Any = importlib.import_module("sglang.kernels.ops.elementwise.elementwise")

    def add(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, output: torch.Tensor) -> None:
        output += torch.sigmoid(hidden @ gate.to(hidden.dtype)).unsqueeze(-1) * shared

    module.fused_gate_sigmoid_mul_add = add


def _allow_short_keys() -> None:
    # SGLang refuses --kv-cache-dtype fp8_e4m3 without AMX attention, although torch_native also widens it on read.
    configurator: Any = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    configurator.cpu_has_amx_support = lambda: True
    configurator.attention_backends = lambda: ("intel_amx",)


def _serve_delta_hybrid() -> None:
    shims_delta.install()
    _add_shared_expert()


_BY_MODEL_TYPE = {
    "deepseek_v3": serve_latent,
    "deepseek_v32": serve_sparse,
    "ernie4_5_moe": _keep_float32_correction_bias,
    "glm_moe_dsa": serve_sparse,
    "gpt_oss": shims_sinks.install,
    "kimi_k2": serve_latent,
    "minimax_m2": _norm_all_heads,
    "nemotron_h": shims_mamba.install,
    "qwen2_moe": _add_shared_expert,
    "qwen3_5_moe": _serve_delta_hybrid,
    "qwen3_5_moe_text": _serve_delta_hybrid,
    "qwen3_next": _serve_delta_hybrid,
}
