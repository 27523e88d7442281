"""Fake of SGLang's CUDA kernel package, which has no CPU wheel.

One function is used on a CPU with the ``torch_native`` attention backend. The others are imported by name by the
server's modules and never called; they raise if called.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__version__ = "0.4.10"  # the release that sglang 0.5.23 requires


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's slice of ``out_cache_loc`` into ``[start, end)`` of its row of ``req_to_token``."""
    del pool_len  # the CUDA kernel's stride; a tensor has its own
    offset = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def _unavailable(name: str) -> Any:
    def raise_unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU; the CPU server should never call it")

    raise_unavailable.__name__ = name
    return raise_unavailable


copy_all_layer_kv_cache_cpu = _unavailable("copy_all_layer_kv_cache_cpu")
build_tree_kernel_efficient_cpu = _unavailable("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _unavailable("verify_tree_greedy_cpu")
assign_draft_cache_locs_contiguous_cpu = _unavailable("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _unavailable("assign_extend_cache_locs_cpu")
fill_accept_out_cache_loc_cpu = _unavailable("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _unavailable("fill_bonus_tokens_cpu")
