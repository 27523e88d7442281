"""Attention over segments: compared with the formula, and the arguments of GPU kernels, with fakes of them."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
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


def written_out(query: Tensor, key: Tensor, value: Tensor, query_ends: Any, key_ends: Any, scale: float) -> Tensor:
    """Query i of a segment of q queries and k keys sees the keys up to k - q + i; two heads share a key head."""
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


ENDS = [list(itertools.accumulate(lengths, initial=0)) for lengths in (QUERIES, KEYS)]
SEGMENTS = Segments.build(QUERIES, KEYS, CPU)


def check_equal_to_sdpa(kernel: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(kernel(*inputs(), SEGMENTS, SCALE), sdpa_per_segment(*inputs(), SEGMENTS, SCALE))


def test_attention_per_segment_equals_the_formula() -> None:
    leaves = [tensor.double().requires_grad_() for tensor in inputs()]
    got, wanted = sdpa_per_segment(*leaves, SEGMENTS, SCALE), written_out(*leaves, *ENDS, SCALE)
    torch.testing.assert_close(got, wanted)
    gradient = torch.randn_like(wanted)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, gradient) for out in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_segments_need_a_key_for_every_query() -> None:
    with pytest.raises(ValueError, match=r"segments of \[3, 2\] queries and \[3, 1\] keys"):
        Segments.build([3, 2], [3, 1], CPU)
    with pytest.raises(ValueError, match="at least as many keys"):
        Segments.build([3], [3, 1], CPU)


def test_torchs_variable_length_attention_gets_its_documented_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen as theirs

    signature = inspect.signature(theirs.varlen_attn)

    def fake(*arguments: Any, **options: Any) -> Tensor:
        given = signature.bind(*arguments, **options).arguments
        assert given["window_size"] == (-1, 0)
        assert given["enable_gqa"]
        assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == torch.int32
        assert (given["max_q"], given["max_k"]) == (max(QUERIES), max(KEYS))
        ends = (given["cu_seq_q"].tolist(), given["cu_seq_k"].tolist())
        return written_out(given["query"], given["key"], given["value"], *ends, given["scale"])

    monkeypatch.setattr(theirs, "varlen_attn", fake)
    check_equal_to_sdpa(varlen.torch_varlen_attention)


def test_torchs_variable_length_attention_accepts_our_arguments() -> None:
    """The real function on meta tensors, because its operators have no CPU kernel."""
    meta = [tensor.to("meta") for tensor in inputs(torch.bfloat16)]
    out = varlen.torch_varlen_attention(*meta, Segments.build(QUERIES, KEYS, torch.device("meta")), SCALE)
    assert out.shape == meta[0].shape
    assert out.dtype == torch.bfloat16


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A fake of the package; the options of every attention that is made."""
    made: list[dict[str, Any]] = []

    class DotProductAttention:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
            assert all(tensor.is_contiguous() for tensor in (query, key, value))
            assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (max(QUERIES), max(KEYS))
            ends_of = (given["cu_seqlens_q"].tolist(), given["cu_seqlens_kv"].tolist())
            return written_out(query, key, value, *ends_of, made[-1]["softmax_scale"]).flatten(1)  # [Q, H D]

    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    pytorch.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    varlen._transformer_engine.cache_clear()
    yield made
    varlen._transformer_engine.cache_clear()


def test_transformer_engines_attention_gets_its_documented_arguments(transformer_engine: list[dict[str, Any]]) -> None:
    for _ in range(2):
        check_equal_to_sdpa(varlen.transformer_engine_attention)
    (options,) = transformer_engine  # all layers share one
    assert options["attn_mask_type"] == "padding_causal_bottom_right"
    assert options["qkv_format"] == "thd"
    assert (options["num_attention_heads"], options["num_gqa_groups"], options["kv_channels"]) == (4, 2, 8)


def test_the_reference_for_kernel_checks_equals_the_formula() -> None:
    given = [tensor.double() for tensor in inputs()]
    wanted = written_out(*given, *ENDS, SCALE)
    torch.testing.assert_close(varlen.reference_attention(*given, SEGMENTS, SCALE), wanted)


@pytest.mark.parametrize(
    ("name", "attend"),
    [("flash_attn_interface", varlen.flash_attention_3), ("flash_attn.cute", varlen.flash_attention_4)],
)
@pytest.mark.parametrize("with_sums", [False, True])
def test_flash_attention_gets_its_documented_arguments(
    monkeypatch: pytest.MonkeyPatch, with_sums: bool, name: str, attend: varlen.AttentionKernel
) -> None:
    def flash_attn_varlen_func(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        assert given["causal"]
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(QUERIES), max(KEYS))
        bounds = (given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist())
        out = written_out(query, key, value, *bounds, given["softmax_scale"])
        return (out, torch.zeros(1)) if with_sums else out

    for part in (name.partition(".")[0], name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    sys.modules[name].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    check_equal_to_sdpa(attend)
