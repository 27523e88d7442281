"""Which kernels a model's layers compute with: of those that are installed the fastest that is right on every rank.

=============  =========================================================================================
attention      on a GPU in 16 bits: Transformer Engine's, FlashAttention 3, torch's variable-length one;
               then, and on a CPU and in float32 at once, torch's scaled dot product, run by run
experts        torch's grouped product, then one product an expert
permutation    on a GPU: Transformer Engine's, through Megatron; then Megatron's own
exchange       where ``train.parallel.dispatcher`` is flex: DeepEP's, through Megatron; then Megatron's all-to-all
=============  =========================================================================================

Before it is taken each runs a small case on the rank's own device, forward and backward, and is compared with float64
on the CPU. One that is wrong, or raises, is named in a line, and the next is taken. All ranks take the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.errors import TrainerError
from agent_rl.models.spec import ModelSpec
from agent_rl.train.megatron import varlen
from agent_rl.train.megatron.moe import Product, grouped_product, one_product_an_expert
from agent_rl.train.megatron.varlen import Attend, Runs

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far a kernel may be off, over the largest value of what it computes: an output, or a gradient."""

T = TypeVar("T")
Dispatcher = Literal["alltoall", "allgather", "flex"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What layers compute with. ``notes``: a line for each kernel that is there and was found wrong."""

    attend: Attend
    product: Product
    fused_permutation: bool
    dispatcher: Dispatcher = "alltoall"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A kernel; ``use`` is what a layer gets of it, ``there``: it is installed."""

    name: str
    use: T
    there: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Inputs, the gradient of the output, and what is right (the output, then each input's gradient): float64, CPU."""

    inputs: tuple[Tensor, ...]
    gradient: Tensor
    right: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, exact: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0
    ) -> Case:
        """Random inputs of ``shapes``, rounded to ``dtype``, so that nothing but the kernel's own rounding is compared.
        No random state but its own is used."""
        generator = torch.Generator().manual_seed(seed)

        def draw(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=generator, device="cpu").to(dtype).double()

        leaves = [draw(shape).requires_grad_() for shape in shapes]
        output = exact(*leaves)
        gradient = draw(output.shape)
        gradients = torch.autograd.grad(output, leaves, gradient)
        return cls(tuple(leaf.detach() for leaf in leaves), gradient, (output.detach(), *gradients))

    def error(self, call: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> float:
        """How far ``call`` is off, over the largest value; infinite where a number is none. Raises what it raises."""
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in self.inputs]
        with torch.enable_grad():
            output = call(*leaves)
            gradients = torch.autograd.grad(output, leaves, self.gradient.to(device, output.dtype))
        return max(_off(got, right) for got, right in zip((output, *gradients), self.right, strict=True))


def choose_kernels(
    facts: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, device: torch.device, *, balanced: bool
) -> Kernels:
    """Collective. ``balanced``: experts may be borrowed, which is written for the grouped product and for Megatron's
    own permutation alone.

    Raises TrainerError where no kernel is right.
    """
    notes: list[str] = []
    attention = choose("attention", attentions(dtype, device), attention_exam(facts, parallel, dtype), device, notes)
    product: Product = grouped_product
    fused, dispatcher, names = False, parallel.dispatcher, [attention.name]
    if any(facts.moe):
        what, known = ("experts that ranks borrow (train.balance)", PRODUCTS[:1]) if balanced else ("experts", PRODUCTS)
        products = choose(f"the products of {what}", known, product_exam(facts, dtype), device, notes)
        ways = PERMUTATIONS if device.type == "cuda" and not balanced else PERMUTATIONS[-1:]
        permutation = choose(
            "the experts' permutation", [way() for way in ways], permutation_exam(facts, dtype), device, notes
        )
        product, fused = products.use, permutation.use
        names += [products.name, permutation.name]
        if dispatcher == "flex":
            exchange = choose_exchange(facts, parallel, dtype, device, notes, fused=fused)
            dispatcher = exchange.use
            names.append(exchange.name)
    if device.type == "cuda":
        notes.append(f"kernels: {', '.join(names)}")
    return Kernels(attention.use, product, fused, dispatcher, tuple(notes))


@dataclass(frozen=True, slots=True)
class Exam(Generic[T]):
    """How a small case is made, how what layers get of a kernel is run on it, and in which precision."""

    make: Callable[[], Case]
    run: Callable[..., Tensor]
    dtype: torch.dtype


def choose(
    what: str, candidates: Sequence[Candidate[T]], exam: Exam[T], device: torch.device, notes: list[str]
) -> Candidate[T]:
    """The first that is right on all ranks; a line in ``notes`` for each before it that is there. Collective.

    Raises TrainerError where none is.
    """
    for place, candidate in enumerate(candidates):
        fault = examine(candidate, exam, device)
        if fault is None:
            return candidate
        if candidate.there:
            others = [other.name for other in candidates[place + 1 :] if other.there]
            instead = f"next is {others[0]}" if others else "there is no other"
            notes.append(f"kernels: {candidate.name} is not used for {what}: {fault}; {instead}")
    raise TrainerError(notes[-1])


def examine(candidate: Candidate[T], exam: Exam[T], device: torch.device) -> str | None:
    """What is wrong with a kernel on this rank, or on another; None where it is right on all. Collective."""
    error, limit, fault = float("inf"), LIMITS[exam.dtype], "it is not installed"
    if candidate.there:
        try:
            error = exam.make().error(partial(exam.run, candidate.use), exam.dtype, device)
            fault = f"its error is {error:.1e} of the largest value, and {limit:g} is allowed"
        except Exception as failure:  # whatever a kernel raises, the next may do
            fault = f"it raised {type(failure).__name__}: {(str(failure).strip() or '?').splitlines()[0]}"
    worst = _worst(error, device)
    if worst <= limit:
        return None
    return fault if error > limit else "it is missing or wrong on another rank"


def _worst(error: float, device: torch.device) -> float:
    """The largest error of all ranks."""
    worst = torch.tensor(error, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return float(worst)


def _off(got: Tensor, right: Tensor) -> float:
    off = float((got.detach().double().cpu() - right).abs().max() / right.abs().max())
    return off if off == off else float("inf")


# Attention: runs that cross a kernel's tile, one of a single token, and where sequences are cut over context ranks runs
# that have more keys than queries.

_QUERIES = (130, 1, 61)
_MORE_KEYS = (130, 70, 64)


def attentions(dtype: torch.dtype, device: torch.device) -> list[Candidate[Attend]]:
    """All, the fastest first."""
    fused: tuple[tuple[str, Attend, str], ...] = (
        ("Transformer Engine's attention", varlen.by_transformer_engine, "transformer_engine"),
        ("FlashAttention 3", varlen.by_flash_attention_3, "flash_attn_interface"),
        ("torch's variable-length attention", varlen.by_torch_varlen, "torch"),
    )
    found = [Candidate(name, attend, installed(package)) for name, attend, package in fused]
    last: Candidate[Attend] = Candidate("torch's attention run by run", varlen.one_by_one)
    return [*found, last] if device.type == "cuda" and dtype != torch.float32 else [last]


def attention_exam(facts: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype) -> Exam[Attend]:
    """A rank's own numbers of heads."""
    keys, scale = _MORE_KEYS if parallel.context > 1 else _QUERIES, facts.head_dim**-0.5
    heads, shared = facts.heads // parallel.tensor, facts.kv_heads // parallel.tensor
    shapes = [(sum(_QUERIES), heads, facts.head_dim), *[(sum(keys), shared, facts.head_dim)] * 2]

    def run(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, Runs.build(_QUERIES, keys, query.device), scale)

    return Exam(lambda: Case.of(partial(run, varlen.written_out), shapes, dtype), run, dtype)


def installed(package: str) -> bool:
    """Whether it can be imported."""
    return importlib.util.find_spec(package) is not None


# Experts: one without a token, and numbers of tokens that fill no tile.

PRODUCTS: tuple[Candidate[Product], ...] = (
    Candidate("torch's grouped product", grouped_product),
    Candidate("one product an expert", one_product_an_expert),
)
_COUNTS = (9, 0, 33, 6)
_WIDEST = 256
"""Inner and hidden widths of a small case are the model's, up to this."""


def product_exam(facts: ModelSpec, dtype: torch.dtype) -> Exam[Product]:
    """An expert's first product."""
    hidden, inner = min(facts.hidden, _WIDEST), min(2 * facts.expert_inner, _WIDEST)

    def run(product: Product, tokens: Tensor, weight: Tensor) -> Tensor:
        return product(tokens, weight, torch.tensor(_COUNTS).cumsum(0).to(tokens.device, torch.int32))

    shapes = [(sum(_COUNTS), hidden), (len(_COUNTS), inner, hidden)]
    return Exam(lambda: Case.of(partial(run, one_product_an_expert), shapes, dtype), run, dtype)


def _fused_permutation() -> Candidate[bool]:
    from megatron.core.transformer.moe import moe_utils

    names = ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index", "sort_chunks_by_index_with_probs")
    there = moe_utils.HAVE_TE and all(getattr(moe_utils, f"fused_{name}", None) is not None for name in names)
    return Candidate("Transformer Engine's permutation", True, there)


def _own_permutation() -> Candidate[bool]:
    return Candidate("Megatron's own permutation", False)


PERMUTATIONS = (_fused_permutation, _own_permutation)


def permutation_exam(facts: ModelSpec, dtype: torch.dtype) -> Exam[bool]:
    """Two experts of five for each of 33 tokens, one of them chosen by none."""
    shapes = [(33, min(facts.hidden, _WIDEST)), (33, 5)]
    return Exam(lambda: Case.of(partial(_there_and_back, False), shapes, dtype), _there_and_back, dtype)


def _chosen(tokens: int, experts: int) -> Tensor:
    places = torch.arange(tokens)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen[places, places % 4] = chosen[places, (places + 1 + places // 16) % 4] = True
    return chosen


def _there_and_back(fused: bool, tokens: Tensor, gates: Tensor) -> Tensor:
    """What Megatron's dispatchers do to tokens ``[T, H]``: to their experts, with their gates ``[T, E]`` (all-to-all)
    and without (allgather), in another order of experts, times their gates, back, and added up."""
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    chosen = _chosen(*gates.shape)
    routing_map, counts = chosen.to(tokens.device), chosen.sum(0)
    gates = (gates if gates.dtype == torch.float64 else gates.float()) * routing_map
    count = int(counts.sum())
    rows, held, order = permute(tokens, routing_map, probs=gates, num_out_tokens=count, fused=fused)
    rows = rows + permute(tokens, routing_map, num_out_tokens=count, fused=fused)[0]
    place = tokens.device if fused else torch.device("cpu")
    backwards = torch.arange(len(counts)).flip(0).to(place)
    rows, held = sort_chunks_by_idxs(rows, counts.to(place), backwards, probs=held, fused=fused)
    rows = (rows * held[:, None]).to(rows.dtype)
    rows, _ = sort_chunks_by_idxs(rows, counts.flip(0).to(place), backwards, fused=fused)
    whole: Tensor = unpermute(rows, order, restore_shape=tokens.shape, routing_map=routing_map, fused=fused)
    return whole


# The exchange between expert ranks: all take part in each try.

DEEP_EP: Candidate[Dispatcher] = Candidate("DeepEP", "flex")
ALL_TO_ALL: Candidate[Dispatcher] = Candidate("Megatron's all-to-all", "alltoall")


def choose_exchange(
    facts: ModelSpec,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    notes: list[str],
    *,
    fused: bool,
) -> Candidate[Dispatcher]:
    """DeepEP where every rank has it and it is right, and otherwise a line and Megatron's own. Collective."""
    what, exam = "the exchange of tokens between expert ranks", exchange_exam(facts, parallel, dtype, fused=fused)
    if _worst(float(not installed("deep_ep")), device):  # a rank that has it would wait for one that has not
        notes.append(
            f"kernels: {DEEP_EP.name} is not used for {what}: deep_ep is not installed on every rank; next is "
            f"{ALL_TO_ALL.name}"
        )
        return choose(what, [ALL_TO_ALL], exam, device, notes)
    return choose(what, [DEEP_EP, ALL_TO_ALL], exam, device, notes)


def exchange_exam(facts: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, *, fused: bool) -> Exam[Dispatcher]:
    """A few tokens of the model's own width, other ones on each rank, whose experts multiply by a number each."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_expert_model_parallel_rank(), parallel.expert
    each, tokens = facts.num_experts // size, 33 + rank
    chosen = torch.zeros(tokens, facts.num_experts, dtype=torch.bool)
    places = torch.arange(tokens)[:, None] * 3 + torch.arange(facts.top_k) + rank
    chosen.scatter_(1, places % facts.num_experts, value=True)

    def exact(rows: Tensor, scores: Tensor) -> Tensor:
        return rows * (_gates(scores, chosen) * _factors(facts.num_experts)).sum(-1, keepdim=True)

    def run(dispatcher: Dispatcher, rows: Tensor, scores: Tensor) -> Tensor:
        made = _dispatcher(facts, parallel, dtype, dispatcher, fused=fused)
        own, routing_map = _factors(facts.num_experts)[rank * each : (rank + 1) * each], chosen.to(rows.device)
        sent, gates = made.dispatch_preprocess(rows[:, None], routing_map, _gates(scores, routing_map))
        held, counts, gates = made.dispatch_postprocess(*made.token_dispatch(sent, gates))
        factors = own.repeat_interleave(counts.cpu().long()).to(gates)
        held = made.combine_preprocess((held * (gates * factors)[:, None]).to(rows.dtype))
        whole: Tensor = made.combine_postprocess(made.token_combine(held))
        return whole[:, 0]

    shapes = [(tokens, facts.hidden), (tokens, facts.num_experts)]
    return Exam(lambda: Case.of(exact, shapes, dtype, seed=rank), run, dtype)


def _gates(scores: Tensor, chosen: Tensor) -> Tensor:
    """Dense gates ``[T, E]`` in float32 or wider: above zero of the chosen experts, and zero of all others."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return wide.sigmoid() * chosen


def _factors(experts: int) -> Tensor:
    return 1 + torch.arange(experts) / experts


def _dispatcher(
    facts: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, kind: Dispatcher, *, fused: bool
) -> Any:
    """Megatron's, as a layer has it."""
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from agent_rl.train.megatron.transformer import transformer_config

    config = transformer_config(facts, parallel, dtype, "none", ())
    config.moe_permute_fusion, config.moe_token_dispatcher_type = fused, kind
    groups = get_default_pg_collection()
    each = facts.num_experts // parallel.expert
    known = {
        "flex": token_dispatcher.MoEFlexTokenDispatcher,
        "alltoall": token_dispatcher.MoEAlltoAllTokenDispatcher,
    }
    own = range(groups.ep.rank() * each, (groups.ep.rank() + 1) * each)
    return known[kind](each, list(own), config=config, pg_collection=groups)
