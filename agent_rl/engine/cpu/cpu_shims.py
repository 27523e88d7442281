"""What sglang 0.5.23 needs to start on a CPU-only torch, to start soon, and to hash fast. Imported before anything of
sglang."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
import xxhash
from padded_attention import are_attended_at_once, attend
from small_experts import are_small, mix_experts

_LIBRARIES: list[torch.library.Library] = []  # an operator lives as long as the library object that defined it


def install() -> None:
    """Define torchvision's operators, take CUDA's page locking out of the host buffers, hash fast, fork the workers,
    multiply small experts and attend to small batches at once, allow keys and values of 8 bits."""
    torch.zeros(1).cos()  # as agent_rl/train/megatron/cpu.py does, where the reason is
    _define_torchvision_operators()
    _skip_page_locking()
    _hash_fast()
    _fork_workers()
    _multiply_small_experts()
    _attend_at_once()
    if any(argument.endswith("fp8_e4m3") for argument in sys.argv):
        _allow_short_keys()


def _define_torchvision_operators() -> None:
    # torchvision registers fake kernels for these on import, and its own extension does not load with a CPU torch. With
    # a torch built for CUDA, which the package index serves unasked, it does, and defines them.
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _skip_page_locking() -> None:
    # The buffer of captured routes always asks for pinned memory, which is a CUDA call.
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def no_page_locking(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
        return None

    common._cuda_host_register = no_page_locking


def _hash_fast() -> None:
    # SHA-256 of all weights takes half of a weight update's processor time. What begins with the hash's name is known
    # to be of another one (agent_rl/weight_sync/digests.py).
    checker: Any = importlib.import_module("sglang.srt.utils.weight_checker")

    def hashed(tensor: torch.Tensor) -> str:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"

    checker._hash_tensor = hashed


def _fork_workers() -> None:
    # SGLang starts its workers afresh ("spawn"), as CUDA wants it, and each imports everything once more: 8 s of
    # processor time a worker. Without CUDA they are forked, before the server has started a thread that computes.
    multiprocessing.set_start_method("fork", force=True)

    def keep(method: str | None, force: bool = False) -> None:
        return None

    vars(multiprocessing)["set_start_method"] = keep


def _multiply_small_experts() -> None:
    # SGLang goes through the experts in Python, two small products each: most of a decoding step where there are many.
    native: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    one_by_one = native.moe_forward_native

    def multiplied(layer: Any, x: torch.Tensor, routed: Any, config: Any) -> torch.Tensor:
        gates, chosen, _ = routed
        biased = any(getattr(layer, name, None) is not None for name in ("w13_weight_bias", "w2_weight_bias"))
        plain = config.activation == "silu" and config.gemm1_alpha is None and not config.apply_router_weight_on_input
        if biased or not plain or not are_small(layer.w13_weight):
            return cast(torch.Tensor, one_by_one(layer, x, routed, config))
        return mix_experts(x, gates, chosen, layer.w13_weight, layer.w2_weight)

    native.moe_forward_native = multiplied


def _attend_at_once() -> None:
    # SGLang goes through the sequences in Python, and computes a prefix's queries again beside the new ones'.
    module: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend
    extend, decode = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode

    def is_plain(encoder_lens: torch.Tensor | None, options: Mapping[str, Any]) -> bool:
        return encoder_lens is None and not options["is_cross_attn"] and options["sliding_window_size"] is None

    def attended(
        query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor,
        rows: torch.Tensor, lengths: torch.Tensor, asked: torch.Tensor, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        places = table[rows, : int(lengths.max())]
        return output.copy_(attend(query, keys, values, places, lengths, asked, scale))

    def extend_at_once(
        self: Any, query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, prefixes: torch.Tensor, asked: torch.Tensor,
        encoder_lens: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        plain = options["causal"] and is_plain(encoder_lens, options)
        if plain and are_attended_at_once(lengths, asked, query.shape[1]):
            return attended(query, output, keys, values, table, rows, lengths, asked, options["scaling"])
        given = (query, output, keys, values, table, rows, lengths, prefixes, asked, encoder_lens)
        return cast(torch.Tensor, extend(self, *given, **options))

    def decode_at_once(
        self: Any, query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor,
        encoder_lens: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        asked = torch.ones_like(lengths)
        if is_plain(encoder_lens, options) and are_attended_at_once(lengths, asked, query.shape[1]):
            return attended(query, output, keys, values, table, rows, lengths, asked, options["scaling"])
        given = (query, output, keys, values, table, rows, lengths, encoder_lens)
        return cast(torch.Tensor, decode(self, *given, **options))

    backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode = extend_at_once, decode_at_once


def _allow_short_keys() -> None:
    # --kv-cache-dtype fp8_e4m3 is refused without AMX's attention, though torch_native's, too, widens what it reads.
    configurator: Any = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    configurator.cpu_has_amx_support = lambda: True
    configurator.attention_backends = lambda: ("intel_amx",)
