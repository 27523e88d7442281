"""Kernels are checked at the start: one that is wrong, raises or is missing is not used, and a note says why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import megatron_tiny as tiny
import pytest
from support.model_sizes import DENSE_SIZES, EXPERT_SIZES

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.errors import TrainerError
from agent_rl.models.parts import Delta, Mamba
from agent_rl.models.spec import ModelSpec

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
Fault = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Patch = pytest.MonkeyPatch
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
SPEC = ModelSpec.of({"model_type": "qwen3_moe", **DENSE_SIZES, **EXPERT_SIZES, **HEADS})
CONTEXT = ParallelConfig(world_size=2, context=2)


@pytest.fixture
def choice(world: Any) -> Any:
    from agent_rl.train.megatron import kernel_choice

    return kernel_choice


def slightly_off(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: kernel(*given) * 1.01


def not_finite(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: kernel(*given) * torch.nan


def wrong_backwards(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Its values are correct; the gradient of its second input is doubled."""
    return lambda first, second, *given: kernel(first, 2 * second - second.detach(), *given)


def raising(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(*_: Any) -> Tensor:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    return kernel


FAULTS = [
    (slightly_off, r"its error is 1\.0e-02 of the largest value \(limit 0\.0001\)"),
    (not_finite, r"its error is inf of the largest value \(limit 0\.0001\)"),
    (wrong_backwards, r"its error is 1\.0e\+00 of the largest value \(limit 0\.0001\)"),
    (raising, r"it raised RuntimeError: no kernel image is available"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
@pytest.mark.parametrize("layout", [ParallelConfig(), CONTEXT], ids=["whole", "context"])
def test_a_faulty_attention_kernel_is_not_used(choice: Any, fault: Fault, reason: str, layout: ParallelConfig) -> None:
    (right,) = choice.attentions(torch.float32, CPU)
    wrong = choice.KernelCandidate("a fast kernel", fault(right.kernel))
    check, notes = choice.attention_check(SPEC, layout, torch.float32), []
    assert choice.choose("attention", [wrong, right], check, CPU, notes) is right
    (line,) = notes
    found = rf"kernels: a fast kernel is not used for attention: {reason}; next is torch's attention per segment"
    assert re.fullmatch(found, line)


def wrong_sinks(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of the sinks is doubled."""
    return lambda query, key, value, sink, *given: kernel(query, key, value, 2 * sink - sink.detach(), *given)


@pytest.mark.parametrize(("fault", "reason"), [*FAULTS, (wrong_sinks, r"its error is 1\.0e\+00 of the largest .*")])
@pytest.mark.parametrize("layout", [ParallelConfig(), CONTEXT], ids=["whole", "context"])
def test_a_faulty_attention_with_sinks_is_not_used(
    choice: Any, monkeypatch: Patch, fault: Fault, reason: str, layout: ParallelConfig
) -> None:
    (right,) = choice.sink_attentions(torch.float32, CPU)
    wrong = choice.KernelCandidate("a fast kernel", fault(right.kernel))
    monkeypatch.setattr(choice, "sink_attentions", lambda *_: [wrong, right])
    kernels = choice.choose_kernels(replace(SPEC, sinks=True), layout, torch.float32, CPU, balanced=False)
    assert kernels.attend_with_sinks is right.kernel
    (line,) = kernels.notes
    found = rf"kernels: a fast kernel is not used for attention with sinks: {reason}; next is blocks of queries"
    assert re.fullmatch(found, line)


DELTA = replace(SPEC, delta=Delta(2, 4, key_dim=16, value_dim=12, kernel=4, fused=False))
MAMBA = replace(SPEC, mamba=Mamba(heads=4, head_dim=12, groups=2, state=16, kernel=4))
RULES = {
    "flash-linear-attention": (DELTA, "delta_rule", "fla_delta_rule", "torch's delta rule"),
    "Mamba-2's kernels": (MAMBA, "state_space", "mamba_state_space", "torch's state space"),
}


def fake_packages(monkeypatch: Patch, fault: Fault) -> None:
    """The packages with the kernels' published signatures, in torch; ``fault`` changes the results."""
    from agent_rl.train.megatron.delta_rule import delta_rule, state_space

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        wide = (part[0].float() for part in (q * scale, k, v, g, beta))
        return fault(delta_rule)(*wide, cu_seqlens.diff().tolist())[None].to(q.dtype), None

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor
    ) -> Tensor:
        wide = (C[0].float(), B[0].float(), x[0].float(), dt[0], A)
        return fault(state_space)(*wide, seq_idx[0].bincount().tolist(), chunk_size)[None].to(x.dtype)

    for module, kernel in {
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
        "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    }.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{kernel.__name__: kernel}))


def unchanged(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return kernel


def far_off(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: kernel(*given) * 1.1


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("fault", [unchanged, far_off, not_finite, wrong_backwards, raising])
def test_kernels_of_linear_attention_are_used_if_they_are_correct(
    choice: Any, monkeypatch: Patch, name: str, fault: Fault
) -> None:
    def is_tested(candidate: Any) -> bool:
        return bool(candidate.name == name)

    spec, part, kernel, other = RULES[name]
    fake_packages(monkeypatch, fault)
    monkeypatch.setattr(choice, "installed", lambda _: True)
    monkeypatch.setattr(choice, "_by_device", lambda fused, last, *_: [*filter(is_tested, fused), last])
    kernels = choice.choose_kernels(spec, ParallelConfig(), torch.bfloat16, CPU, balanced=False)
    if fault is unchanged:
        assert (getattr(kernels, part), kernels.notes) == (getattr(choice, kernel), ())
        return
    assert getattr(kernels, part) is getattr(choice, part)
    (line,) = kernels.notes
    assert re.fullmatch(rf"kernels: {name} is not used for the .*: it(s error is| raised) .*; next is {other}", line)


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_faulty_grouped_product_is_not_used(choice: Any, monkeypatch: Patch, fault: Fault, reason: str) -> None:
    grouped, per_expert = choice.EXPERT_MATMULS
    wrong = choice.KernelCandidate(grouped.name, fault(grouped.kernel))
    monkeypatch.setattr(choice, "EXPERT_MATMULS", (wrong, per_expert))
    kernels = choice.choose_kernels(SPEC, ParallelConfig(), torch.float32, CPU, balanced=False)
    assert kernels.product is per_expert.kernel
    (line,), last = kernels.notes, rf"borrowed experts \(train.balance\): {reason}; no other kernel is installed$"
    expected = rf"kernels: torch's grouped .* matmuls of experts: {reason}; next is one matmul per expert"
    assert re.fullmatch(expected, line)
    with pytest.raises(TrainerError, match=last):
        choice.choose_kernels(SPEC, ParallelConfig(), torch.float32, CPU, balanced=True)


def test_a_kernel_that_is_not_installed_is_skipped_without_a_note(choice: Any) -> None:
    check, (grouped, _), notes = choice.expert_matmul_check(SPEC, torch.float32), choice.EXPERT_MATMULS, []
    missing = choice.KernelCandidate("not there", grouped.kernel, installed=False)
    assert choice.choose("products", [missing, grouped], check, CPU, notes) is grouped
    assert not notes
    fast = [candidate.installed for candidate in choice.attentions(torch.bfloat16, torch.device("cuda"))]
    assert fast == [False, False, False, True, True], "Transformer Engine, FlashAttention 4 and 3, and torch's two"
    assert len(choice.attentions(torch.float32, torch.device("cuda"))) == 1


def test_the_rate_of_attention_counts_what_a_kernel_computes(choice: Any, monkeypatch: Patch) -> None:
    from agent_rl.train.megatron import varlen

    sizes, clock = (SPEC.heads, SPEC.kv_heads, SPEC.head_dim), iter(range(0, 1000, 2))
    monkeypatch.setattr(choice.time, "perf_counter", lambda: next(clock))
    rate = choice.attention_rate(varlen.sdpa_per_segment, sizes, torch.float32, CPU, tokens=64)
    assert rate == pytest.approx(3.5 * 2 * 64**2 * SPEC.heads * SPEC.head_dim / 2 / 1e12), "each run takes 2 s"


def test_a_kernel_that_is_wrong_on_another_rank_is_not_used(choice: Any, monkeypatch: Patch) -> None:
    seen: list[float] = []

    def worst(error: float, _: torch.device) -> float:
        seen.append(error)
        return 0.5 if len(seen) == 1 else error

    monkeypatch.setattr(choice, "_worst", worst)
    notes: list[str] = []
    check = choice.expert_matmul_check(SPEC, torch.float32)
    assert choice.choose("products", choice.EXPERT_MATMULS, check, CPU, notes) is choice.EXPERT_MATMULS[1]
    assert seen[0] < 1e-5
    assert "it is missing or wrong on another rank; next is one matmul per expert" in notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_kernels_are_correct_and_leave_the_random_state_unchanged(choice: Any, dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    kernels = choice.choose_kernels(SPEC, ParallelConfig(), dtype, CPU, balanced=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert (kernels.product, kernels.fused_permutation, kernels.notes) == (choice.EXPERT_MATMULS[0].kernel, False, ())
    check = choice.expert_matmul_check(SPEC, dtype)
    error = check.make().error(lambda *inputs: check.run(choice.EXPERT_MATMULS[1].kernel, *inputs), dtype, CPU)
    assert 0 < error < choice.LIMITS[dtype]


def test_one_matmul_per_expert_computes_the_same(build: Any, monkeypatch: Patch) -> None:
    from agent_rl.train.megatron import kernel_choice

    batch = tiny.packed()
    wanted = build().forward_logprobs([batch], None)[0].logprobs
    monkeypatch.setattr(kernel_choice, "EXPERT_MATMULS", kernel_choice.EXPERT_MATMULS[1:])
    found = build().forward_logprobs([batch], None)[0].logprobs
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.fixture
def fused(choice: Any, monkeypatch: Patch) -> Any:
    """Fakes of Transformer Engine's permutation in Megatron, which compute what Megatron's own does."""
    from megatron.core.transformer.moe import moe_utils

    permute, unpermute, sort = moe_utils.permute, moe_utils.unpermute, moe_utils.sort_chunks_by_idxs
    fakes = {
        "permute": lambda tokens, routing_map, num_out_tokens: permute(tokens, routing_map)[::2],
        "permute_with_probs": lambda tokens, probs, routing_map, num_out_tokens: permute(tokens, routing_map, probs),
        "unpermute": lambda rows, order, merging_probs, restore_shape: unpermute(rows, order, restore_shape),
        "sort_chunks_by_index": lambda rows, sizes, order: sort(rows, sizes, order)[0],
        "sort_chunks_by_index_with_probs": lambda rows, probs, sizes, order: sort(rows, sizes, order, probs),
    }
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    for name, fake in fakes.items():
        monkeypatch.setattr(moe_utils, f"fused_{name}", fake, raising=False)
    return moe_utils


def test_a_correct_fused_permutation_is_used(choice: Any, fused: Any) -> None:
    check, notes = choice.permutation_check(SPEC, torch.float32), []
    ways = [way() for way in choice.PERMUTATIONS]
    assert [way.installed for way in ways] == [True, True]
    assert choice.choose("permutation", ways, check, CPU, notes).kernel is True


@pytest.mark.parametrize(
    "name", ["permute", "permute_with_probs", "unpermute", "sort_chunks_by_index", "sort_chunks_by_index_with_probs"]
)
def test_a_fused_permutation_with_a_wrong_part_is_not_used(
    choice: Any, fused: Any, monkeypatch: Patch, name: str
) -> None:
    right, notes = getattr(fused, f"fused_{name}"), []
    monkeypatch.setattr(fused, f"fused_{name}", lambda rows, *rest, **options: right(rows.flip(0), *rest, **options))
    check, ways = choice.permutation_check(SPEC, torch.float32), [way() for way in choice.PERMUTATIONS]
    assert choice.choose("permutation", ways, check, CPU, notes).kernel is False
    assert "Transformer Engine's permutation is not used for permutation: its error is" in notes[0]


def test_without_transformer_engine_the_permutation_is_megatrons(choice: Any) -> None:
    assert [way().installed for way in choice.PERMUTATIONS] == [False, True]
