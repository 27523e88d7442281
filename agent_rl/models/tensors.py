"""Every parameter of a model: its name in the trainer, its Hugging Face tensors, and its cut over ranks. No torch.

This is the only description of tensors. Loading, export, checks of a checkpoint, checkpoints of training, adapters,
weight sync and the plan use it. Parameters and tensors are listed in the order of an export. It also has the rule for
which tensors share a bucket of a weight sync (:func:`joined_tensors`, :func:`fill_buckets`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from agent_rl.models.cuts import Columns, Cut, Experts, HfTensor, Replicated, Rows
from agent_rl.models.parts import ExpertForm, Indexer, Latent, Mixer
from agent_rl.models.spec import ModelSpec

OUTPUT = "lm_head.weight"
"""The name of the output layer's tensor. A tied output layer is sent and saved under it too."""
REPLICATED = Replicated()
_ADAPTER_ENDS = {"a": ".lora_A", "b": ".lora_B"}
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Parameter:
    """``name``: that of a layer's parameter within the layer, otherwise within the model. ``tensors`` are those of all
    ranks and experts. ``adapted``: ``train.lora`` gives it an adapter. ``frozen``: it is never trained. ``copied``: a
    copy of a parameter on another stage."""

    name: str
    tensors: tuple[HfTensor, ...]
    cut: Cut = REPLICATED
    adapted: bool = False
    frozen: bool = False
    copied: bool = False

    @property
    def size(self) -> int:
        """The number of elements over all ranks."""
        return sum(tensor.size for tensor in self.tensors)

    def rank_size(self, tensor: int = 1, expert: int = 1) -> int:
        """The number of elements on each of ``tensor`` tensor ranks or ``expert`` expert ranks."""
        return self.size // {"": 1, "tensor": tensor, "expert": expert}[self.cut.ranks]


MODULES: Mapping[str, str] = MappingProxyType(
    {
        "embeddings": "embedding.",
        "lm_head": "output_layer.",
        "attention": "self_attention.",
        "router": "mlp.router.",
        "experts": "mlp.experts.",
        "shared_experts": "mlp.shared_experts.",
        "mlp": "mlp.linear_",
    }
)
"""What the names of a module's parameters contain, for ``train.freeze``."""


def belongs_to(name: str, modules: Collection[str]) -> bool:
    """Whether the parameter ``name``, with or without its layer, is in one of ``modules``."""
    return any(f".{MODULES[module]}" in f".{name}" for module in modules)


def model_parameters(
    spec: ModelSpec, layers: Sequence[int] | None = None, *, first: bool = True, last: bool = True
) -> Iterator[tuple[int | None, Parameter]]:
    """The parameters of a pipeline stage with their layers (None: of no layer). ``layers``: the stage's, from 0; None:
    all. ``first``: with the embedding; ``last``: with the final norm and the output layer (tied: the embedding's
    copy)."""
    embedding = embedding_tensor(spec)
    if first:
        yield None, Parameter("embedding.word_embeddings.weight", (embedding,), Rows())
    for layer in range(spec.num_layers) if layers is None else layers:
        yield from ((layer, parameter) for parameter in layer_parameters(spec, layer))
    if last:
        norm = f"{spec.family.root}.{spec.family.last_norm}.weight"
        yield None, _norm("decoder.final_layernorm.weight", norm, spec.hidden)
        output = embedding if spec.tied else HfTensor(OUTPUT, embedding.shape)
        yield None, Parameter("output_layer.weight", (output,), Rows(), copied=spec.tied)


def embedding_tensor(spec: ModelSpec) -> HfTensor:
    """The embedding of the vocabulary."""
    return HfTensor(f"{spec.family.root}.{spec.family.embedding}.weight", (spec.vocab_size, spec.hidden))


def layer_parameters(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
    """The parameters of one layer (from 0). Layers with the same mixer, with or without experts, differ in nothing but
    the layer's number in the names of tensors."""
    at = f"{spec.family.root}.layers.{layer}."
    if (mixer := spec.mixer(layer)) != "none":
        yield _norm("input_layernorm.weight", f"{at}{spec.family.mixer_norm}.weight", spec.hidden)
        yield from _MIXERS[mixer](spec, at)
    if not spec.has_mlp(layer):
        return
    yield _norm("pre_mlp_layernorm.weight", f"{at}{spec.family.mlp_norm}.weight", spec.hidden)
    if spec.moe[layer]:
        yield from _experts(spec, at)
    else:
        yield from _mlp(spec, "mlp", at + spec.family.mlp, spec.inner)


def adapters(parameter: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """A ``[rank, in]`` and B ``[out, rank]`` of an adapted parameter. B is cut like its weight. A, which all parts of a
    fused weight share, is named after the first part; every expert has its own."""
    cut = parameter.cut
    each = len(parameter.tensors) // cut.count if isinstance(cut, Experts) else len(parameter.tensors)
    a = tuple(_half(tensor, "a", (rank, tensor.shape[1])) for tensor in parameter.tensors[::each])
    b = tuple(_half(tensor, "b", (tensor.shape[0], rank)) for tensor in parameter.tensors)
    module, _, weight = parameter.name.rpartition(".")
    return (
        Parameter(f"{module}.lora.{weight}.a", a, cut if isinstance(cut, Experts) else REPLICATED),
        Parameter(f"{module}.lora.{weight}.b", b, cut),
    )


def is_adapter(name: str) -> bool:
    """Whether a tensor's name is that of an adapter's half."""
    return name.endswith(tuple(_ADAPTER_ENDS.values()))


def adapted_weight(name: str) -> str:
    """The name of the weight that the adapter's half ``name`` changes."""
    return name.rpartition(".")[0] + ".weight"


def _half(tensor: HfTensor, half: str, shape: tuple[int, ...]) -> HfTensor:
    return HfTensor(tensor.name.removesuffix(".weight") + _ADAPTER_ENDS[half], shape)


def _norm(name: str, tensor: str, width: int, cut: Cut = REPLICATED) -> Parameter:
    return Parameter(name, (HfTensor(tensor, (width,)),), cut)


def _grouped(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """Grouped-query attention: queries, key and value of a key-value group are neighbours in ``linear_qkv``."""
    module, attention, by_group = "self_attention", at + spec.family.attention, Rows(groups=spec.kv_heads)
    widths = {"q": spec.q_width, "k": spec.kv_width, "v": spec.kv_width}
    if spec.output_gate:  # each head's query and its gate
        widths["q"] *= 2
    weights = tuple(HfTensor(f"{attention}.{part}_proj.weight", (rows, spec.hidden)) for part, rows in widths.items())
    yield Parameter(f"{module}.linear_qkv.weight", weights, by_group, adapted=True)
    if spec.qkv_bias:
        biases = tuple(HfTensor(f"{attention}.{part}_proj.bias", (rows,)) for part, rows in widths.items())
        yield Parameter(f"{module}.linear_qkv.bias", biases, by_group)
    if spec.qk_norm:
        for part in "qk":
            width, cut = (spec.head_dim, REPLICATED) if spec.qk_norm == "head" else (widths[part], Rows())
            yield _norm(f"{module}.{part}_layernorm.weight", f"{attention}.{part}_norm.weight", width, cut)
    if spec.sinks:
        yield Parameter(f"{module}.sinks", (HfTensor(f"{attention}.sinks", (spec.heads,)),), Rows())
    out = HfTensor(f"{attention}.o_proj.weight", (spec.hidden, spec.q_width))
    yield Parameter(f"{module}.linear_proj.weight", (out,), Columns(), adapted=True)
    if spec.out_bias:
        yield Parameter(f"{module}.linear_proj.bias", (HfTensor(f"{attention}.o_proj.bias", (spec.hidden,)),))


def _latent(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """Multi-head latent attention. The two projections to latents are neighbors: engines take them together."""
    module, attention, latent = "self_attention", f"{at}self_attn", spec.latent
    assert latent is not None

    def weight(name: str, tensor: str, rows: int, columns: int, cut: Cut = REPLICATED) -> Parameter:
        tensors = (HfTensor(f"{attention}.{tensor}.weight", (rows, columns)),)
        return Parameter(f"{module}.{name}.weight", tensors, cut, adapted=True)

    if latent.q_rank:
        yield weight("q_down", "q_a_proj", latent.q_rank, spec.hidden)
    yield weight("kv_down", "kv_a_proj_with_mqa", latent.cache_width, spec.hidden)
    if latent.q_rank:
        yield _norm(f"{module}.q_norm.weight", f"{attention}.q_a_layernorm.weight", latent.q_rank)
    yield _norm(f"{module}.kv_norm.weight", f"{attention}.kv_a_layernorm.weight", latent.kv_rank)
    query = "q_b_proj" if latent.q_rank else "q_proj"
    yield weight("q_up", query, spec.q_width, latent.q_rank or spec.hidden, Rows())
    expanded = spec.heads * (latent.plain_dim + latent.value_dim)
    yield weight("kv_up", "kv_b_proj", expanded, latent.kv_rank, Rows())
    yield weight("linear_proj", "o_proj", spec.hidden, spec.heads * latent.value_dim, Columns())
    if spec.indexer is not None:
        yield from _indexer(f"{module}.indexer", f"{attention}.indexer", spec.hidden, latent, spec.indexer)


def _indexer(module: str, at: str, hidden: int, latent: Latent, indexer: Indexer) -> Iterator[Parameter]:
    width = indexer.head_dim
    shapes = {
        "query": ("wq_b.weight", (indexer.heads * width, latent.q_rank)),
        "key": ("wk.weight", (width, hidden)),
        "key_norm_weight": ("k_norm.weight", (width,)),
        "key_norm_bias": ("k_norm.bias", (width,)),
        "head_weight": ("weights_proj.weight", (indexer.heads, hidden)),
    }
    for name, (tensor, shape) in shapes.items():
        yield Parameter(f"{module}.{name}", (HfTensor(f"{at}.{tensor}", shape),), frozen=True)


def _delta(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """The gated delta rule, cut by key head. Engines join the tensors of ``in_proj`` in this order."""
    assert spec.delta is not None
    delta, module, attention = spec.delta, "self_attention", f"{at}linear_attn"
    parts = Rows(parts=(delta.key_width, delta.key_width, delta.value_width))
    mixed = sum(parts.parts)
    if delta.fused:
        linears = {"qkvz": (mixed + delta.value_width, Rows()), "ba": (2 * delta.value_heads, Rows())}
    else:
        linears = {"qkv": (mixed, parts), "z": (delta.value_width, Rows())}
        linears |= {part: (delta.value_heads, Rows()) for part in "ba"}
    for part, (rows, cut) in linears.items():
        projection = HfTensor(f"{attention}.in_proj_{part}.weight", (rows, spec.hidden))
        yield Parameter(f"{module}.in_proj_{part}.weight", (projection,), cut)
    yield Parameter(f"{module}.conv1d", (HfTensor(f"{attention}.conv1d.weight", (mixed, 1, delta.kernel)),), parts)
    for name, tensor in {"dt_bias": "dt_bias", "decay_log": "A_log"}.items():
        yield Parameter(f"{module}.{name}", (HfTensor(f"{attention}.{tensor}", (delta.value_heads,)),), Rows())
    yield _norm(f"{module}.norm", f"{attention}.norm.weight", delta.value_dim)
    out = HfTensor(f"{attention}.out_proj.weight", (spec.hidden, delta.value_width))
    yield Parameter(f"{module}.out_proj.weight", (out,), Columns())


def _mamba(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """Mamba-2, cut by group. ``in_proj`` has gates, the convolution's inputs, and a time step of each head."""
    assert spec.mamba is not None
    mamba, module, name = spec.mamba, "self_attention", f"{at}{spec.family.attention}"
    parts = (mamba.width, *mamba.convolved, mamba.heads)
    projection = HfTensor(f"{name}.in_proj.weight", (sum(parts), spec.hidden))
    yield Parameter(f"{module}.in_proj.weight", (projection,), Rows(parts=parts))
    convolved, mixed = Rows(parts=mamba.convolved), sum(mamba.convolved)
    yield Parameter(f"{module}.conv1d", (HfTensor(f"{name}.conv1d.weight", (mixed, 1, mamba.kernel)),), convolved)
    yield Parameter(f"{module}.conv1d_bias", (HfTensor(f"{name}.conv1d.bias", (mixed,)),), convolved)
    for own, tensor in {"dt_bias": "dt_bias", "decay_log": "A_log", "skip": "D"}.items():
        yield Parameter(f"{module}.{own}", (HfTensor(f"{name}.{tensor}", (mamba.heads,)),), Rows())
    yield _norm(f"{module}.norm", f"{name}.norm.weight", mamba.width, Rows())
    out = HfTensor(f"{name}.out_proj.weight", (spec.hidden, mamba.width))
    yield Parameter(f"{module}.out_proj.weight", (out,), Columns())


_MIXERS: Mapping[Mixer, Callable[[ModelSpec, str], Iterator[Parameter]]] = MappingProxyType(
    {"grouped": _grouped, "latent": _latent, "delta": _delta, "mamba": _mamba}
)
"""The parameters of each mixer, from the prefix of the layer's tensors."""


def _plain_experts(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """A tensor of each expert and projection."""
    family, count, hidden, inner = spec.family, spec.num_experts, spec.hidden, spec.expert_inner
    if family.stacked_experts:
        stacked = Experts(count, stacked=True)
        name = f"{at}mlp.experts"
        yield Parameter("mlp.experts.weight1", (HfTensor(f"{name}.gate_up_proj", (count, 2 * inner, hidden)),), stacked)
        yield Parameter("mlp.experts.weight2", (HfTensor(f"{name}.down_proj", (count, hidden, inner)),), stacked)
        return
    names = [at + family.expert.format(expert) for expert in range(count)]
    gate, up, down = family.expert_parts
    inputs = (up,) if spec.expert_form == "squared" else (gate, up)
    gate_up = tuple(HfTensor(f"{name}.{part}.weight", (inner, hidden)) for name in names for part in inputs)
    yield Parameter("mlp.experts.weight1", gate_up, Experts(count), adapted=True)
    yield Parameter(
        "mlp.experts.weight2",
        tuple(HfTensor(f"{name}.{down}.weight", (hidden, inner)) for name in names),
        Experts(count),
        adapted=True,
    )


def _clamped_experts(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """Two tensors of all experts with their biases. Inputs come before outputs, and gate and up alternate."""
    name, count, hidden, inner = f"{at}mlp.experts", spec.num_experts, spec.hidden, spec.expert_inner
    sizes = (("gate_up", hidden, 2 * inner), ("down", inner, hidden))
    for number, (part, inputs, outputs) in enumerate(sizes, 1):
        weight = HfTensor(f"{name}.{part}_proj", (count, inputs, outputs))
        bias = HfTensor(f"{name}.{part}_proj_bias", (count, outputs))
        cut = Experts(count, stacked=True, interleaved=part == "gate_up", transposed=True)
        yield Parameter(f"mlp.experts.weight{number}", (weight,), cut)
        yield Parameter(f"mlp.experts.bias{number}", (bias,), replace(cut, transposed=False))


_EXPERT_FORMS: Mapping[ExpertForm, Callable[[ModelSpec, str], Iterator[Parameter]]] = MappingProxyType(
    {"gated": _plain_experts, "clamped": _clamped_experts, "squared": _plain_experts}
)


def _experts(spec: ModelSpec, at: str) -> Iterator[Parameter]:
    """The router, the experts and the shared expert of a layer."""
    family, count, hidden = spec.family, spec.num_experts, spec.hidden
    yield Parameter("mlp.router.weight", (HfTensor(at + family.router, (count, hidden)),))
    if spec.router_bias:
        bias = family.router.removesuffix("weight") + "bias"
        yield Parameter("mlp.router.bias", (HfTensor(at + bias, (count,)),))
    if family.correction:
        correction = HfTensor(at + family.correction, (*family.correction_axes, count))
        yield Parameter("mlp.router.expert_bias", (correction,), frozen=True)
    yield from _EXPERT_FORMS[spec.expert_form](spec, at)
    if spec.shared_inner:
        if family.shared_gate:
            shared_gate = HfTensor(f"{at}{family.shared}_gate.weight", (1, hidden))
            yield Parameter("mlp.shared_experts.gate_weight", (shared_gate,))
        yield from _mlp(spec, "mlp.shared_experts", at + family.shared, spec.shared_inner)


def _mlp(spec: ModelSpec, module: str, name: str, inner: int) -> Iterator[Parameter]:
    hidden, inputs = spec.hidden, ("up",) if spec.expert_form == "squared" else ("gate", "up")
    gate_up = tuple(HfTensor(f"{name}.{part}_proj.weight", (inner, hidden)) for part in inputs)
    yield Parameter(f"{module}.linear_fc1.weight", gate_up, Rows())
    yield Parameter(f"{module}.linear_fc2.weight", (HfTensor(f"{name}.down_proj.weight", (hidden, inner)),), Columns())


def joined_tensors(spec: ModelSpec) -> frozenset[str]:
    """The tensors after which a bucket must not end: an engine loads some tensors only in one call
    (:attr:`agent_rl.models.families.Family.together`)."""
    joined: set[str] = set()
    for layer in range(spec.num_layers) if spec.family.together else ():
        names = [tensor.name for parameter in layer_parameters(spec, layer) for tensor in parameter.tensors]
        for endings in spec.family.together:
            places = [place for place, name in enumerate(names) if name.endswith(endings)]
            joined.update(names[places[0] : places[-1]] if places else ())
    return frozenset(joined)


def fill_buckets(
    items: Iterable[Item],
    name: Callable[[Item], str],
    size: Callable[[Item], int],
    *,
    limit: int,
    joined: Collection[str],
) -> Iterator[tuple[list[Item], bool]]:
    """Buckets of items with at most ``limit`` bytes, in order, and whether each is the last. No bucket ends after a
    name in ``joined``; items that belong together and are larger than ``limit`` have a bucket of their own. A single
    empty bucket where there are no items."""
    bucket: list[Item] = []
    unit: list[Item] = []
    filled = added = 0
    for item in items:
        unit.append(item)
        added += size(item)
        if name(item) in joined:
            continue
        if bucket and filled + added > limit:
            yield bucket, False
            bucket, filled = [], 0
        bucket, filled = bucket + unit, filled + added
        unit, added = [], 0
    yield bucket + unit, True
