"""Choose the kernels of a model's layers: the fastest installed kernel that is correct on every rank.

=============  =========================================================================================
attention      on a GPU in 16 bits: Transformer Engine, FlashAttention 4, FlashAttention 3, torch's variable-length
               attention; then, and always on a CPU or in float32, torch's scaled dot product per segment
with sinks     on a GPU in 16 bits: torch's flash attention; then, and always on a CPU or in float32, blocks of queries
delta rule     on a GPU in 16 bits: flash-linear-attention; then, and always on a CPU or in float32, torch
state space    on a GPU in 16 bits: Mamba-2's kernels; then, and always on a CPU or in float32, torch
experts        torch's grouped matmul, then one matmul per expert
permutation    on a GPU: Transformer Engine, through Megatron; then Megatron's own
exchange       with ``train.parallel.dispatcher: flex``: DeepEP, through Megatron; then Megatron's all-to-all
=============  =========================================================================================

Before use, each kernel runs a small case on the rank's device, forward and backward, and is compared with float64 on
the CPU. A kernel that is wrong or raises gets one line in the notes, and the next one is tried. All ranks use the same.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.errors import TrainerError
from agent_rl.models.spec import ModelSpec
from agent_rl.train.megatron import attention_sinks, varlen
from agent_rl.train.megatron.attention_sinks import SinkAttention
from agent_rl.train.megatron.delta_rule import (
    DeltaRule,
    StateSpace,
    delta_rule,
    fla_delta_rule,
    mamba_state_space,
    state_space,
)
from agent_rl.train.megatron.moe import ExpertMatmul, grouped_matmul, matmul_per_expert
from agent_rl.train.megatron.varlen import AttentionKernel, Segments

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""The largest allowed error of an output or gradient, relative to its largest value."""
RATE_TOKENS = 8192
"""The sequence whose attention is timed at the start."""

T = TypeVar("T")
Dispatcher = Literal["alltoall", "allgather", "flex"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen kernels; ``attend_with_sinks`` only for a model with sinks, ``delta_rule`` and ``state_space`` for one
    with such mixers. ``notes``: a line for each installed kernel that failed its check."""

    attend: AttentionKernel
    product: ExpertMatmul
    fused_permutation: bool
    dispatcher: Dispatcher = "alltoall"
    attend_with_sinks: SinkAttention | None = None
    delta_rule: DeltaRule = delta_rule
    state_space: StateSpace = state_space
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelCandidate(Generic[T]):
    """A kernel by ``name``; ``kernel`` is what a layer receives."""

    name: str
    kernel: T
    installed: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class KernelCase:
    """Inputs, the gradient of the output, and the expected output and input gradients, in float64 on the CPU."""

    inputs: tuple[Tensor, ...]
    gradient: Tensor
    expected: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, exact: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0
    ) -> KernelCase:
        """Random inputs of ``shapes``, rounded to ``dtype`` so that only the kernel's own rounding is compared. The
        generator is local."""
        generator = torch.Generator().manual_seed(seed)

        def draw(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=generator, device="cpu").to(dtype).double()

        leaves = [draw(shape).requires_grad_() for shape in shapes]
        output = exact(*leaves)
        gradient = draw(output.shape)
        gradients = torch.autograd.grad(output, leaves, gradient)
        return cls(tuple(leaf.detach() for leaf in leaves), gradient, (output.detach(), *gradients))

    def error(self, call: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> float:
        """The largest error of ``call`` relative to the largest value; infinite for NaN. Raises what ``call``
        raises."""
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in self.inputs]
        with torch.enable_grad():
            output = call(*leaves)
            gradients = torch.autograd.grad(output, leaves, self.gradient.to(device, output.dtype))
        return max(_relative_error(*pair) for pair in zip((output, *gradients), self.expected, strict=True))


def choose_kernels(
    model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, device: torch.device, *, balanced: bool
) -> Kernels:
    """The kernels for a model on this rank. Collective.

    ``balanced``: ranks can borrow experts, which supports only the grouped matmul and Megatron's own permutation.
    Raises TrainerError where no kernel is correct.
    """
    notes: list[str] = []
    attention = choose("attention", attentions(dtype, device), attention_check(model, parallel, dtype), device, notes)
    product: ExpertMatmul = grouped_matmul
    fused, dispatcher, names = False, parallel.dispatcher, [_with_rate(attention, model, parallel, dtype, device)]
    with_sinks: SinkAttention | None = None
    if model.sinks:
        check = sink_check(model, parallel, dtype)
        own = choose("attention with sinks", sink_attentions(dtype, device), check, device, notes)
        with_sinks, names = own.kernel, [own.name]
    delta: KernelCandidate[DeltaRule] = KernelCandidate("torch's delta rule", delta_rule)
    space: KernelCandidate[StateSpace] = KernelCandidate("torch's state space", state_space)
    if model.delta:
        fla: KernelCandidate[DeltaRule] = KernelCandidate("flash-linear-attention", fla_delta_rule, installed("fla"))
        rules = _by_device([fla], delta, dtype, device)
        delta = choose("the gated delta rule", rules, delta_check(model, parallel, dtype), device, notes)
        names.append(delta.name)
    if model.mamba:
        mamba: KernelCandidate[StateSpace] = KernelCandidate(
            "Mamba-2's kernels", mamba_state_space, installed("mamba_ssm")
        )
        spaces = _by_device([mamba], space, dtype, device)
        space = choose("the state space", spaces, space_check(model, parallel, dtype), device, notes)
        names.append(space.name)
    if any(model.moe):
        purpose, known = (
            ("borrowed experts (train.balance)", EXPERT_MATMULS[:1]) if balanced else ("experts", EXPERT_MATMULS)
        )
        matmul = choose(f"the matmuls of {purpose}", known, expert_matmul_check(model, dtype), device, notes)
        factories = PERMUTATIONS if device.type == "cuda" and not balanced else PERMUTATIONS[-1:]
        permutation = choose(
            "the experts' permutation", [make() for make in factories], permutation_check(model, dtype), device, notes
        )
        product, fused = matmul.kernel, permutation.kernel
        names += [matmul.name, permutation.name]
        if dispatcher == "flex":
            exchange = choose_exchange(model, parallel, dtype, device, notes, fused=fused)
            dispatcher = exchange.kernel
            names.append(exchange.name)
    if device.type == "cuda":
        notes.append(f"kernels: {', '.join(names)}")
    return Kernels(attention.kernel, product, fused, dispatcher, with_sinks, delta.kernel, space.kernel, tuple(notes))


@dataclass(frozen=True, slots=True)
class KernelCheck(Generic[T]):
    """How to make a small case, how to run a kernel on it, and the precision."""

    make: Callable[[], KernelCase]
    run: Callable[..., Tensor]
    dtype: torch.dtype


def choose(
    target: str, candidates: Sequence[KernelCandidate[T]], check: KernelCheck[T], device: torch.device, notes: list[str]
) -> KernelCandidate[T]:
    """The first candidate that is correct on all ranks; ``notes`` gets a line for each installed one before it.

    Collective. Raises TrainerError where none is correct.
    """
    for number, candidate in enumerate(candidates):
        fault = check_kernel(candidate, check, device)
        if fault is None:
            return candidate
        if candidate.installed:
            others = [other.name for other in candidates[number + 1 :] if other.installed]
            instead = f"next is {others[0]}" if others else "no other kernel is installed"
            notes.append(f"kernels: {candidate.name} is not used for {target}: {fault}; {instead}")
    raise TrainerError(notes[-1])


def check_kernel(candidate: KernelCandidate[T], check: KernelCheck[T], device: torch.device) -> str | None:
    """Why a kernel cannot be used; None where it is correct on all ranks. Collective."""
    error, limit, fault = float("inf"), LIMITS[check.dtype], "it is not installed"
    if candidate.installed:
        try:
            error = check.make().error(partial(check.run, candidate.kernel), check.dtype, device)
            fault = f"its error is {error:.1e} of the largest value (limit {limit:g})"
        except Exception as failure:  # any failure of a kernel only rejects that kernel
            fault = f"it raised {type(failure).__name__}: {(str(failure).strip() or '?').splitlines()[0]}"
    worst = _worst(error, device)
    if worst <= limit:
        return None
    return fault if error > limit else "it is missing or wrong on another rank"


def _worst(error: float, device: torch.device) -> float:
    """The largest error over all ranks."""
    worst = torch.tensor(error, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return float(worst)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual.detach().double().cpu() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


# Attention cases: segments longer than a kernel's tile, one of a single token, and for context parallelism segments
# with more keys than queries.

_QUERIES = (130, 1, 61)
_MORE_KEYS = (130, 70, 64)
_WINDOW = 48


def attentions(dtype: torch.dtype, device: torch.device) -> list[KernelCandidate[AttentionKernel]]:
    """All candidates, the fastest first."""
    fused: tuple[tuple[str, AttentionKernel, str], ...] = (
        ("Transformer Engine's attention", varlen.transformer_engine_attention, "transformer_engine"),
        ("FlashAttention 4", varlen.flash_attention_4, "flash_attn.cute"),
        ("FlashAttention 3", varlen.flash_attention_3, "flash_attn_interface"),
        ("torch's variable-length attention", varlen.torch_varlen_attention, "torch"),
    )
    known = [KernelCandidate(name, attend, installed(package)) for name, attend, package in fused]
    return _by_device(known, KernelCandidate("torch's attention per segment", varlen.sdpa_per_segment), dtype, device)


def _by_device(
    fused: Sequence[KernelCandidate[T]], last: KernelCandidate[T], dtype: torch.dtype, device: torch.device
) -> list[KernelCandidate[T]]:
    """The candidates: on a GPU in 16 bits first the ``fused`` ones."""
    return [*fused, last] if device.type == "cuda" and dtype != torch.float32 else [last]


def attention_check(model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype) -> KernelCheck[AttentionKernel]:
    """A check with this rank's numbers of heads."""
    keys, scale = _MORE_KEYS if parallel.context > 1 else _QUERIES, model.head_dim**-0.5
    shapes = _attention_shapes(model, parallel, keys)

    def run(attend: AttentionKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, Segments.build(_QUERIES, keys, query.device), scale)

    return KernelCheck(lambda: KernelCase.of(partial(run, varlen.reference_attention), shapes, dtype), run, dtype)


def _with_rate(
    chosen: KernelCandidate[AttentionKernel],
    model: ModelSpec,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """The kernel's name, on a GPU with its rate, which shows a slow kernel that is correct."""
    if device.type != "cuda" or model.latent is not None:
        return chosen.name
    heads, shared = model.heads // parallel.tensor, model.kv_heads // parallel.tensor
    rate = attention_rate(chosen.kernel, (heads, shared, model.head_dim), dtype, device)
    return f"{chosen.name} ({rate:.0f} TFLOP/s at {RATE_TOKENS} tokens)"


def attention_rate(
    attend: AttentionKernel,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = RATE_TOKENS,
) -> float:
    """TFLOP/s of causal attention forward and backward over one sequence, the best of three after a first run.

    ``sizes``: heads of queries, heads of keys, and their width. The backward pass counts 2.5 times the forward pass.
    """
    heads, shared, width = sizes
    shapes = [(tokens, count, width) for count in (heads, shared, shared)]
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    segments, seconds = Segments.build([tokens], [tokens], device), float("inf")
    for run in range(4):
        begun = time.perf_counter()
        with torch.enable_grad():
            output = attend(query, key, value, segments, width**-0.5)
            gradients = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
        float(gradients[0].sum())  # waits for the device
        seconds = min(seconds, time.perf_counter() - begun) if run else seconds
    return 3.5 * 2 * tokens**2 * heads * width / seconds / 1e12


def _attention_shapes(model: ModelSpec, parallel: ParallelConfig, keys: Sequence[int]) -> list[tuple[int, ...]]:
    """Of queries, keys and values."""
    heads, shared = model.heads // parallel.tensor, model.kv_heads // parallel.tensor
    value = model.latent.value_dim if model.latent else model.head_dim
    return [(sum(_QUERIES), heads, model.head_dim), *((sum(keys), shared, width) for width in (model.head_dim, value))]


def sink_attentions(dtype: torch.dtype, device: torch.device) -> list[KernelCandidate[SinkAttention]]:
    """As :func:`attentions`, with sinks."""
    flash: KernelCandidate[SinkAttention] = KernelCandidate(
        "torch's flash attention", attention_sinks.flash_sink_attention
    )
    blocks: KernelCandidate[SinkAttention] = KernelCandidate("blocks of queries", attention_sinks.attend_by_blocks)
    return _by_device([flash], blocks, dtype, device)


def sink_check(model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype) -> KernelCheck[SinkAttention]:
    """As :func:`attention_check`, of attention to all keys and within a window shorter than the segments."""
    keys, scale = _MORE_KEYS if parallel.context > 1 else _QUERIES, model.head_dim**-0.5

    def run(attend: SinkAttention, query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        segments = Segments.build(_QUERIES, keys, query.device)
        return torch.cat([attend(query, key, value, sink, segments, scale, window) for window in (0, _WINDOW)])

    exact = partial(run, attention_sinks.reference_sink_attention)
    shapes = [*_attention_shapes(model, parallel, keys), (model.heads // parallel.tensor,)]
    return KernelCheck(lambda: KernelCase.of(exact, shapes, dtype), run, dtype)


def delta_check(model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype) -> KernelCheck[DeltaRule]:
    """A check with this rank's number of heads, unit queries and keys, and decays of moderate size."""
    assert model.delta is not None
    tokens, heads, key_dim = sum(_QUERIES), model.delta.value_heads // parallel.tensor, model.delta.key_dim

    def run(rule: DeltaRule, *given: Tensor) -> Tensor:
        query, key, value, decay, beta = map(_wide, given)
        query, key = (F.normalize(part, dim=-1) for part in (query, key))
        return rule(query * key_dim**-0.5, key, value, F.logsigmoid(decay), beta.sigmoid(), _QUERIES)

    shapes = [(tokens, heads, width) for width in (key_dim, key_dim, model.delta.value_dim)] + 2 * [(tokens, heads)]
    return KernelCheck(lambda: KernelCase.of(partial(run, delta_rule), shapes, dtype), run, dtype)


def space_check(model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype) -> KernelCheck[StateSpace]:
    """A check with this rank's numbers of heads and groups."""
    assert model.mamba is not None
    mamba, tokens = model.mamba, sum(_QUERIES)
    heads, groups = mamba.heads // parallel.tensor, mamba.groups // parallel.tensor

    def run(space: StateSpace, *given: Tensor) -> Tensor:
        query, key, value, step, rate = map(_wide, given)
        return space(query * mamba.state**-0.5, key, value, F.softplus(step), -F.softplus(rate), _QUERIES)

    shapes = [*2 * [(tokens, groups, mamba.state)], (tokens, heads, mamba.head_dim), (tokens, heads), (heads,)]
    return KernelCheck(lambda: KernelCase.of(partial(run, state_space), shapes, dtype), run, dtype)


def installed(package: str) -> bool:
    """Whether ``package`` can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False


# Expert cases: one expert without a token, and token counts that fill no tile.

EXPERT_MATMULS: tuple[KernelCandidate[ExpertMatmul], ...] = (
    KernelCandidate("torch's grouped matmul", grouped_matmul),
    KernelCandidate("one matmul per expert", matmul_per_expert),
)
_COUNTS = (9, 0, 33, 6)
_WIDEST = 256
"""The limit for the inner and hidden width of a small case."""


def expert_matmul_check(model: ModelSpec, dtype: torch.dtype) -> KernelCheck[ExpertMatmul]:
    """A check of the first expert matmul."""
    hidden, inner = min(model.hidden, _WIDEST), min(2 * model.expert_inner, _WIDEST)

    def run(product: ExpertMatmul, tokens: Tensor, weight: Tensor) -> Tensor:
        return product(tokens, weight, torch.tensor(_COUNTS).cumsum(0).to(tokens.device, torch.int32))

    shapes = [(sum(_COUNTS), hidden), (len(_COUNTS), inner, hidden)]
    return KernelCheck(lambda: KernelCase.of(partial(run, matmul_per_expert), shapes, dtype), run, dtype)


def _fused_permutation() -> KernelCandidate[bool]:
    from megatron.core.transformer.moe import moe_utils

    names = ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index", "sort_chunks_by_index_with_probs")
    there = moe_utils.HAVE_TE and all(getattr(moe_utils, f"fused_{name}", None) is not None for name in names)
    return KernelCandidate("Transformer Engine's permutation", True, there)


def _own_permutation() -> KernelCandidate[bool]:
    return KernelCandidate("Megatron's own permutation", False)


PERMUTATIONS = (_fused_permutation, _own_permutation)


def permutation_check(model: ModelSpec, dtype: torch.dtype) -> KernelCheck[bool]:
    """A check with 33 tokens and 2 of 5 experts per token; no token chooses the last expert."""
    shapes = [(33, min(model.hidden, _WIDEST)), (33, 5)]
    return KernelCheck(
        lambda: KernelCase.of(partial(_permute_and_combine, False), shapes, dtype), _permute_and_combine, dtype
    )


def _chosen(tokens: int, experts: int) -> Tensor:
    rows = torch.arange(tokens)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen[rows, rows % 4] = chosen[rows, (rows + 1 + rows // 16) % 4] = True
    return chosen


def _permute_and_combine(fused: bool, tokens: Tensor, gates: Tensor) -> Tensor:
    """The permutations of Megatron's dispatchers on tokens ``[T, H]`` with gates ``[T, E]``: to the experts with gates
    (all-to-all) and without (allgather), to another order of experts, times the gates, back, and summed."""
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    chosen = _chosen(*gates.shape)
    routing_map, counts = chosen.to(tokens.device), chosen.sum(0)
    gates = _wide(gates) * routing_map
    count = int(counts.sum())
    rows, row_gates, order = permute(tokens, routing_map, probs=gates, num_out_tokens=count, fused=fused)
    rows = rows + permute(tokens, routing_map, num_out_tokens=count, fused=fused)[0]
    index_device = tokens.device if fused else torch.device("cpu")
    backwards = torch.arange(len(counts)).flip(0).to(index_device)
    rows, row_gates = sort_chunks_by_idxs(rows, counts.to(index_device), backwards, probs=row_gates, fused=fused)
    rows = (rows * row_gates[:, None]).to(rows.dtype)
    rows, _ = sort_chunks_by_idxs(rows, counts.flip(0).to(index_device), backwards, fused=fused)
    combined: Tensor = unpermute(rows, order, restore_shape=tokens.shape, routing_map=routing_map, fused=fused)
    return combined


# The exchange between expert ranks: all take part in each check.

DEEP_EP: KernelCandidate[Dispatcher] = KernelCandidate("DeepEP", "flex")
ALL_TO_ALL: KernelCandidate[Dispatcher] = KernelCandidate("Megatron's all-to-all", "alltoall")


def choose_exchange(
    model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, device: torch.device, notes: list[str], fused: bool
) -> KernelCandidate[Dispatcher]:
    """DeepEP where it is installed and correct on every rank, otherwise Megatron's all-to-all and a note.
    Collective."""
    purpose, check = "the exchange of tokens between expert ranks", exchange_check(model, parallel, dtype, fused=fused)
    if _worst(float(not installed("deep_ep")), device):  # a rank with DeepEP would wait for one without
        notes.append(
            f"kernels: {DEEP_EP.name} is not used for {purpose}: deep_ep is not installed on every rank; next is "
            f"{ALL_TO_ALL.name}"
        )
        return choose(purpose, [ALL_TO_ALL], check, device, notes)
    return choose(purpose, [DEEP_EP, ALL_TO_ALL], check, device, notes)


def exchange_check(
    model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, *, fused: bool
) -> KernelCheck[Dispatcher]:
    """A check with a few tokens of the model's width, different on each rank, and experts that multiply by a
    constant."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_expert_model_parallel_rank(), parallel.expert
    local_experts, tokens = model.num_experts // size, 33 + rank
    chosen = torch.zeros(tokens, model.num_experts, dtype=torch.bool)
    choices = torch.arange(tokens)[:, None] * 3 + torch.arange(model.top_k) + rank
    chosen.scatter_(1, choices % model.num_experts, value=True)

    def exact(rows: Tensor, scores: Tensor) -> Tensor:
        return rows * (_gates(scores, chosen) * _factors(model.num_experts)).sum(-1, keepdim=True)

    def run(dispatcher: Dispatcher, rows: Tensor, scores: Tensor) -> Tensor:
        dispatch = _dispatcher(model, parallel, dtype, dispatcher, fused=fused)
        local = slice(rank * local_experts, (rank + 1) * local_experts)
        own, routing_map = _factors(model.num_experts)[local], chosen.to(rows.device)
        sent, gates = dispatch.dispatch_preprocess(rows[:, None], routing_map, _gates(scores, routing_map))
        received, counts, gates = dispatch.dispatch_postprocess(*dispatch.token_dispatch(sent, gates))
        factors = own.repeat_interleave(counts.cpu().long()).to(gates)
        received = dispatch.combine_preprocess((received * (gates * factors)[:, None]).to(rows.dtype))
        combined: Tensor = dispatch.combine_postprocess(dispatch.token_combine(received))
        return combined[:, 0]

    shapes = [(tokens, model.hidden), (tokens, model.num_experts)]
    return KernelCheck(lambda: KernelCase.of(exact, shapes, dtype, seed=rank), run, dtype)


def _gates(scores: Tensor, chosen: Tensor) -> Tensor:
    """Dense gates ``[T, E]`` in at least float32: positive for the chosen experts, 0 for the others."""
    return _wide(scores).sigmoid() * chosen


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _factors(experts: int) -> Tensor:
    return 1 + torch.arange(experts) / experts


def _dispatcher(model: ModelSpec, layout: ParallelConfig, dtype: torch.dtype, kind: Dispatcher, fused: bool) -> Any:
    """Megatron's dispatcher of a layer."""
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from agent_rl.train.megatron.transformer import transformer_config

    config = transformer_config(model, layout, dtype, "none", ())
    config.moe_permute_fusion, config.moe_token_dispatcher_type = fused, kind
    groups = get_default_pg_collection()
    each = model.num_experts // layout.expert
    known = {"flex": token_dispatcher.MoEFlexTokenDispatcher, "alltoall": token_dispatcher.MoEAlltoAllTokenDispatcher}
    own = range(groups.ep.rank() * each, (groups.ep.rank() + 1) * each)
    return known[kind](each, list(own), config=config, pg_collection=groups)
