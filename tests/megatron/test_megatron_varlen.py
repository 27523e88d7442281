"""Attention over runs: against the formula written out, and what the GPU kernels are given, with their doubles."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron import varlen
from agent_rl.train.megatron.varlen import Segments, sdpa_per_segment

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
QUERIES, KEYS = (3, 2, 1, 4), (3, 7, 1, 9)
HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(sum(QUERIES), HEADS, WIDTH, dtype=dtype)
    key, value = (torch.randn(sum(KEYS), KEY_HEADS, WIDTH, dtype=dtype) for _ in range(2))
    return query, key, value


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Any, key_ends: Any, scale: float
) -> Tensor:
    """Query i of a run of q queries and k keys sees the keys up to k - q + i; a pair of heads shares a key head."""
    out = torch.empty_like(query)
    for run in range(len(query_ends) - 1):
        first, last, start, stop = query_ends[run], query_ends[run + 1], key_ends[run], key_ends[run + 1]
        for place in range(first, last):
            seen = slice(start, stop - (last - first) + (place - first) + 1)
            for head in range(query.shape[1]):
                shared = head * key.shape[1] // query.shape[1]
                weights = torch.softmax(key[seen, shared] @ query[place, head] * scale, dim=0)
                out[place, head] = weights @ value[seen, shared]
    return out


def ends(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def test_runs_one_by_one_are_the_formula() -> None:
    leaves = [tensor.double().requires_grad_() for tensor in inputs()]
    runs = Segments.build(QUERIES, KEYS, CPU)
    got, wanted = (
        sdpa_per_segment(*leaves, runs, SCALE),
        reference_attention(*leaves, ends(QUERIES), ends(KEYS), SCALE),
    )
    torch.testing.assert_close(got, wanted)
    gradient = torch.randn_like(wanted)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, gradient) for out in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_runs_need_a_key_for_every_query() -> None:
    with pytest.raises(ValueError, match=r"segments of \[3, 2\] queries and \[3, 1\] keys"):
        Segments.build([3, 2], [3, 1], CPU)
    with pytest.raises(ValueError, match="at least as many keys"):
        Segments.build([3], [3, 1], CPU)


def test_torchs_variable_length_attention_is_given_what_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen as theirs

    signature = inspect.signature(theirs.varlen_attn)

    def double(*arguments: Any, **options: Any) -> Tensor:
        given = signature.bind(*arguments, **options).arguments
        assert given["window_size"] == (-1, 0)
        assert given["enable_gqa"]
        assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == torch.int32
        assert (given["max_q"], given["max_k"]) == (max(QUERIES), max(KEYS))
        return reference_attention(
            given["query"],
            given["key"],
            given["value"],
            given["cu_seq_q"].tolist(),
            given["cu_seq_k"].tolist(),
            given["scale"],
        )

    monkeypatch.setattr(theirs, "varlen_attn", double)
    runs = Segments.build(QUERIES, KEYS, CPU)
    torch.testing.assert_close(
        varlen.torch_varlen_attention(*inputs(), runs, SCALE), varlen.sdpa_per_segment(*inputs(), runs, SCALE)
    )


def test_torchs_variable_length_attention_takes_our_arguments() -> None:
    """The real function, on tensors without values: the operators behind it have no CPU kernel."""
    meta = [tensor.to("meta") for tensor in inputs(torch.bfloat16)]
    out = varlen.torch_varlen_attention(*meta, Segments.build(QUERIES, KEYS, torch.device("meta")), SCALE)
    assert out.shape == meta[0].shape
    assert out.dtype == torch.bfloat16


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A double of the installed package; what its attention was made with."""
    made: list[dict[str, Any]] = []

    class DotProductAttention:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
            assert query.is_contiguous()
            assert key.is_contiguous()
            assert value.is_contiguous()
            assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (max(QUERIES), max(KEYS))
            ends_of = (given["cu_seqlens_q"].tolist(), given["cu_seqlens_kv"].tolist())
            return reference_attention(query, key, value, *ends_of, made[-1]["softmax_scale"]).flatten(1)  # [Q, H D]

    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    pytorch.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    varlen._transformer_engine.cache_clear()
    yield made
    varlen._transformer_engine.cache_clear()


def test_transformer_engines_attention_is_given_what_it_documents(transformer_engine: list[dict[str, Any]]) -> None:
    runs = Segments.build(QUERIES, KEYS, CPU)
    query, key, value = inputs()
    wanted = varlen.sdpa_per_segment(query, key, value, runs, SCALE)
    for _ in range(2):  # all layers share one
        torch.testing.assert_close(varlen.transformer_engine_attention(query, key, value, runs, SCALE), wanted)
    (options,) = transformer_engine
    assert options["attn_mask_type"] == "padding_causal_bottom_right"
    assert options["qkv_format"] == "thd"
    assert (options["num_attention_heads"], options["num_gqa_groups"], options["kv_channels"]) == (4, 2, 8)


def test_the_formula_with_every_weight_is_the_one_written_out_by_token() -> None:
    given = [tensor.double() for tensor in inputs()]
    wanted = reference_attention(*given, ends(QUERIES), ends(KEYS), SCALE)
    torch.testing.assert_close(varlen.reference_attention(*given, Segments.build(QUERIES, KEYS, CPU), SCALE), wanted)


@pytest.mark.parametrize("with_sums", [False, True])
def test_flash_attention_3_is_given_what_it_documents(monkeypatch: pytest.MonkeyPatch, with_sums: bool) -> None:
    def flash_attn_varlen_func(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        assert given["causal"]
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(QUERIES), max(KEYS))
        bounds = (given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist())
        out = reference_attention(query, key, value, *bounds, given["softmax_scale"])
        return (out, torch.zeros(1)) if with_sums else out

    package = ModuleType("flash_attn_interface")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    runs = Segments.build(QUERIES, KEYS, CPU)
    torch.testing.assert_close(
        varlen.flash_attention_3(*inputs(), runs, SCALE), varlen.sdpa_per_segment(*inputs(), runs, SCALE)
    )
