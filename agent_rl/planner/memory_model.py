"""Formulas for the memory of a run from the model's shape and the parallel layout. Pure; imports no torch.

Symbols: T tokens of a micro-batch on a rank, H hidden, I inner width (of an expert, or of a dense layer), E experts, k
experts per token, V vocabulary, b bytes per number; t, p, c, e the tensor, pipeline, context and expert sizes. Token
mixers: :mod:`agent_rl.models.mixer_costs`. Activations are counted from what autograd stores for this trainer's
layers (agent_rl/train/megatron); Korthikanti et al., arXiv 2205.05198, do the same for Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agent_rl.config import LoraConfig, ParallelConfig, TrainConfig
from agent_rl.config.train import FrozenModule
from agent_rl.models.cuts import Experts
from agent_rl.models.mixer_costs import MixerCost, mixer_cost
from agent_rl.models.parts import Mixer
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import Parameter, belongs_to, layer_parameters, model_parameters
from agent_rl.train.hf_index import adapter_update_shapes
from agent_rl.train.parallel_checks import dense_replicas, expert_replicas, uses_distributed_optimizer
from r3.shard import stage_layers

BYTES = {"float32": 4, "bfloat16": 2}
LOGITS_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits per chunk (agent_rl/train/megatron/logprobs.py)."""
LOGITS_COPIES = {"cpu": 5, "cuda": 3}
"""Float32 arrays of a chunk's size that exist at once: logits, shifted logits and exponentials; five on a CPU
(measured) and when the entropy has a gradient."""
ROUTER_BYTES = 17
"""Bytes per token and expert that a router stores: float32 logits, scores and dense gates, a mask and a copy."""


def parameters(model: ModelSpec) -> int:
    """Returns the number of parameters, including an untied output layer."""
    dense, experts = rank_parameters(model, ParallelConfig())
    return dense + experts


def route_bytes(model: ModelSpec) -> int:
    """Returns the bytes of a token's routes in the narrowest integer type for the expert ids."""
    return len(model.moe_layer_ids) * model.top_k * (1 if model.num_experts <= 256 else 2)


def rank_parameters(
    model: ModelSpec, parallel: ParallelConfig, without: Collection[FrozenModule] = ()
) -> tuple[int, int]:
    """Returns ``(dense, experts)`` parameters of the rank with the most, not counting the modules ``without``; dense:
    all but those of experts."""
    sizes: dict[tuple[Mixer, bool], tuple[int, int]] = {}
    for layer, moe in enumerate(model.moe):
        if (kind := (model.mixer(layer), moe)) not in sizes:
            sizes[kind] = _sizes(layer_parameters(model, layer), parallel, without)
    best, last = (0, 0), parallel.pipeline - 1
    for stage, chunks in enumerate(stage_layers(model.num_layers, parallel.pipeline, parallel.virtual_pipeline)):
        ends = (each for _, each in model_parameters(model, (), first=stage == 0, last=stage == last))
        # A tied output layer on another stage is a copy of the embedding there.
        parts = [_sizes((each for each in ends if not each.copied or stage > 0), parallel, without)]
        parts += [sizes[model.mixer(number - 1), model.moe[number - 1]] for chunk in chunks for number in chunk]
        best = max(best, (sum(dense for dense, _ in parts), sum(experts for _, experts in parts)), key=sum)
    return best


def _sizes(
    parameters: Iterable[Parameter], parallel: ParallelConfig, without: Collection[FrozenModule]
) -> tuple[int, int]:
    """Returns the elements of ``parameters`` on a rank, not counting the modules ``without``: ``(dense, experts)``."""
    sizes = [0, 0]
    for each in (each for each in parameters if not belongs_to(each.name, without)):
        sizes[isinstance(each.cut, Experts)] += each.rank_size(parallel.tensor, parallel.expert)
    return sizes[0], sizes[1]


def trained_parameters(model: ModelSpec, train: TrainConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """As :func:`rank_parameters`, for the trained parameters: all but ``train.freeze``, or the adapters
    (``train.lora``)."""
    if train.lora is None:
        return rank_parameters(model, parallel, train.freeze or ())
    attention, expert = adapter_parameters(model, train.lora)
    return model.num_layers * attention, len(model.moe_layer_ids) * (model.num_experts // parallel.expert) * expert


def adapter_parameters(model: ModelSpec, lora: LoraConfig) -> tuple[int, int]:
    """Returns the adapter parameters of one layer's attention and of one expert. Query, key and value share one A,
    and so do gate and up."""
    attention = 2 * model.hidden + 2 * model.q_width + 2 * model.kv_width
    return lora.rank * attention, lora.rank * (2 * model.hidden + 3 * model.expert_inner)


def adapter_bytes(model: ModelSpec, train: TrainConfig) -> int:
    """Returns the bytes of the adapters sent to an engine, in float32; 0 without adapters."""
    shapes = {} if train.lora is None else adapter_update_shapes(model, train.lora.rank)
    return 4 * sum(map(math.prod, shapes.values()))


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Memory of the fullest trainer rank on its device, in bytes.

    - ``optimizer_unshared``: optimizer state without the distributed optimizer; ``offloaded``: its part in host memory.
    - ``activations``: kept between forward and backward pass; ``inputs``: inputs of layers, kept in host memory.
    - ``logits``, later ``layer`` (gradients of one layer and its recomputed activations), later ``step`` of Adam (two
      float32 temporaries of the largest weight, one of the weights before it, and float32 copies of narrower state):
      temporary, never at the same time.
    - ``start``: temporary memory before the optimizer exists: Megatron copies the weights of all experts, or all
      others, into the distributed optimizer's buffers.
    - ``borrowed``: twice the experts that a layer may borrow (the next layer's are fetched during the computation of
      one, and gradients wait to be returned).
    """

    weights: int
    gradients: int
    optimizer: int
    optimizer_unshared: int
    activations: int
    logits: int
    layer: int
    step: int
    start: int = 0
    borrowed: int = 0
    offloaded: int = 0
    inputs: int = 0

    @property
    def static(self) -> int:
        """Memory before and after a step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peaks(self) -> Mapping[str, int]:
        """Temporary memory, each entry at another time. The last two count only what they need beyond the activations
        (and the optimizer, in the last), which do not exist then."""
        activations = self.activations + self.borrowed
        return {
            "a chunk of logits": self.logits,
            "a layer's backward pass": self.layer,
            "Adam's step, when activations are gone": self.step - activations,
            "a copy of weights at the start, beyond what a step takes": self.start - self.optimizer - activations,
        }

    @property
    def peak(self) -> int:
        """The highest temporary memory."""
        return max(self.peaks.values())

    @property
    def total(self) -> int:
        return self.static + self.activations + self.borrowed + self.peak


def rank_bytes(model: ModelSpec, train: TrainConfig, *, microbatches: int, device: str) -> RankBytes:
    """Returns the memory of the fullest rank on ``device``, cpu or cuda. ``microbatches``: per data rank and mini step
    (a pipeline keeps at most as many as it has stages)."""
    parallel, width = train.parallel, BYTES[train.dtype]
    weights = sum(rank_parameters(model, parallel))
    dense, experts = trained_parameters(model, train, parallel)
    if train.lora:
        weights += dense + experts
    state = state_bytes(train)
    shared = uses_distributed_optimizer(parallel)
    copies = (dense_replicas(parallel), expert_replicas(parallel)) if shared else (1, 1)
    tokens = train.microbatch_tokens // parallel.context
    optimizer = (dense * state) // copies[0] + (experts * state) // copies[1]
    offloads = train.offload_optimizer and device == "cuda"  # on a CPU it is the same memory
    vocabulary = model.vocab_size * model.hidden // parallel.tensor
    stacked = 2 * model.hidden * model.expert_inner * (model.num_experts // parallel.expert)
    attention = max(mixer_cost(model, layer).projections for layer in range(model.num_layers)) // 2 // parallel.tensor
    beside = (
        20 if offloads else 8 if train.optimizer_moments == "float32" else 16
    )  # bytes per number during Adam's step
    largest = max(min(vocabulary, dense // copies[0]), min(stacked, experts // copies[1]))
    value_head = 16 * (model.hidden + 1) * train.uses_critic  # float32 weights, gradient and moments on every rank
    return RankBytes(
        weights=weights * width + value_head,
        gradients=(dense + experts) * 4,
        optimizer=0 if offloads else optimizer,
        optimizer_unshared=(dense + experts) * state,
        activations=_activations(model, train, tokens, microbatches, device),
        logits=_logits(model, train, tokens, device),
        layer=_one_layer(model, train, tokens, device),
        step=beside * largest + 4 * attention,
        start=max(dense, experts) * width if shared else 0,
        offloaded=optimizer if offloads else 0,
        inputs=_inputs(model, train, tokens, microbatches, device)[1],
        borrowed=2 * train.balance.slots * expert_bytes(model, train) if train.balance.enabled else 0,
    )


def state_bytes(train: TrainConfig) -> int:
    """Returns the optimizer bytes per parameter: Adam's moments, and a float32 master copy of a bfloat16 weight."""
    return 2 * BYTES[train.optimizer_moments] + (4 if train.dtype == "bfloat16" else 0)


CANDIDATE_BYTES = 48
"""Bytes per token and id of a teacher's top_k: ids and columns in int64, logits, log-probs and the terms of the KL."""


def expert_bytes(model: ModelSpec, train: TrainConfig) -> int:
    """Returns the bytes of one expert of one layer."""
    return 3 * model.hidden * model.expert_inner * BYTES[train.dtype]


def pool_bytes(model: ModelSpec, train: TrainConfig) -> int:
    """Returns the bytes of a node's pool of all experts of all layers; 0 if ``train.balance`` uses no pool."""
    if not train.balance.enabled or "pool" not in (train.balance.transfer.recompute, train.balance.transfer.update):
        return 0
    return len(model.moe_layer_ids) * model.num_experts * expert_bytes(model, train)


def _activations(model: ModelSpec, train: TrainConfig, tokens: int, microbatches: int, device: str) -> int:
    """Returns the bytes kept for the backward pass: activations of every layer, or with full recomputation the
    inputs."""
    width = BYTES[train.dtype]
    # Input and output of the last norm, its rows that predict a token, and the rotary embedding's cosines and sines.
    final = tokens * (model.hidden * width * 3 + model.head_dim * 4 * 2)
    if train.distill is not None and train.distill.top_k is not None:
        final += tokens * train.distill.top_k * CANDIDATE_BYTES
    if train.recompute == "full":
        return final + _inputs(model, train, tokens, microbatches, device)[0]
    kept = (layer_bytes(model, train, tokens, layer=layer, device=device) for layer in _first_chunk(model, train))
    return _in_flight(train, microbatches) * sum(kept) + final


def _inputs(model: ModelSpec, train: TrainConfig, tokens: int, microbatches: int, device: str) -> tuple[int, int]:
    """Returns the bytes of the inputs of recomputed layers: on the device, and in host memory."""
    if train.recompute != "full":
        return 0, 0
    of_a_layer = _in_flight(train, microbatches) * (tokens // train.parallel.tensor) * model.hidden * BYTES[train.dtype]
    every = len(_first_chunk(model, train)) * of_a_layer
    # One layer's input is on the device: that of the pipeline stage, or the one copied back.
    return (of_a_layer, every) if train.offload_activations and device == "cuda" else (every, 0)


def _first_chunk(model: ModelSpec, train: TrainConfig) -> list[int]:
    """Returns the layers of the first stage, which keeps the most micro-batches."""
    (first, *_) = stage_layers(model.num_layers, train.parallel.pipeline, train.parallel.virtual_pipeline)
    return [number - 1 for chunk in first for number in chunk]


def _in_flight(train: TrainConfig, microbatches: int) -> int:
    """Returns the maximum number of micro-batches that the first stage keeps."""
    parallel = train.parallel
    count = min(parallel.pipeline, max(1, microbatches))
    if parallel.virtual_pipeline > 1:  # arXiv 2104.04473: the interleaved schedule keeps more
        count = min(max(1, microbatches), count + -(-(parallel.pipeline - 1) // parallel.virtual_pipeline))
    return count


def layer_bytes(model: ModelSpec, train: TrainConfig, tokens: int, *, layer: int, device: str) -> int:
    """Returns the bytes that autograd stores of ``layer`` for ``tokens`` tokens of one context rank, after selective
    recomputation."""
    width, tensor = BYTES[train.dtype], train.parallel.tensor
    recomputed = train.recompute_modules if train.recompute == "selective" else ()
    own = tokens // tensor  # tensor parallelism shards the residual stream by tokens
    norms = 2 if "layernorm" in recomputed else 4  # inputs, and unless they are computed again outputs, of both norms
    residual = norms * model.hidden * width * own
    mixer, moe = mixer_cost(model, layer), model.moe[layer]
    regrouped = mixer.regrouped * (model.kv_heads > tensor)
    attention = (mixer.projected + regrouped + mixer.joined) * width * tokens // tensor
    if "core_attn" in recomputed:
        attention += mixer.core_inputs * width * tokens // tensor
    else:
        attention += _core_bytes(model, mixer, train, tokens, device)
    if not model.has_mlp(layer):
        mlp = 0
    elif not moe:
        mlp = 0 if "mlp" in recomputed else 4 * model.inner * width * tokens // tensor
    elif "moe" in recomputed:
        mlp = 0
    else:
        rows = own * model.top_k
        mlp = rows * (model.hidden + 5 * model.expert_inner) * width + own * model.num_experts * ROUTER_BYTES
        mlp += 4 * model.shared_inner * width * tokens // tensor
    return residual + attention + mlp + _adapter_activations(model, train, tokens, moe=moe and "moe" not in recomputed)


def _core_bytes(model: ModelSpec, mixer: MixerCost, train: TrainConfig, tokens: int, device: str) -> int:
    """Returns the bytes that the core of a mixer stores: what its kernel stores, and what context ranks exchange."""
    width, tensor, ranks = BYTES[train.dtype], train.parallel.tensor, train.parallel.context
    shared = mixer.attended * (device == "cuda" and train.dtype == "bfloat16")
    core = ((mixer.core - shared) * width + mixer.core_float32 * 4) * tokens // tensor
    if mixer.core:
        core += 4 * model.heads * tokens // tensor  # the log-sums of softmax
    if ranks > 1 and mixer.gathered:
        core += mixer.gathered * width * tokens * ranks // tensor  # keys and values of the whole sequence
        if device == "cpu" or train.dtype == "float32":  # and a mask for each of a rank's two chunks
            core += (tokens // 2) ** 2 * (2 * ranks + 1)
    return core


def _adapter_activations(model: ModelSpec, train: TrainConfig, tokens: int, *, moe: bool) -> int:
    """Returns the additional bytes that adapters store of one layer: the products with each A."""
    rows = tokens * (2 + 2 * model.top_k * moe)
    return rows * train.lora.rank * BYTES[train.dtype] if train.lora else 0


def _logits(model: ModelSpec, train: TrainConfig, tokens: int, device: str) -> int:
    """Returns the bytes of a chunk of logits, of the arrays computed from it, and of the output weight's gradient. A
    bfloat16 gradient of one chunk is computed when only two of the arrays remain."""
    share, width = model.vocab_size // train.parallel.tensor, BYTES[train.dtype]
    rows = min(tokens, max(1, LOGITS_CHUNK[device] // share))
    chunk, narrow = rows * share * 4, share * model.hidden * width if width < 4 else 0
    copies = LOGITS_COPIES["cpu" if train.entropy_coefficient else device]
    return max(copies * chunk, 2 * chunk + narrow) + share * model.hidden * 4


def _one_layer(model: ModelSpec, train: TrainConfig, tokens: int, device: str) -> int:
    """Returns the temporary bytes of one layer's backward pass: its recomputed activations, the gradients of its widest
    activations, and that of the largest weight."""
    width, parallel = BYTES[train.dtype], train.parallel
    rows = tokens // parallel.tensor * max(1, model.top_k)
    inner = model.expert_inner or model.inner // parallel.tensor
    weight = 2 * model.hidden * inner * max(1, model.num_experts // parallel.expert)
    embedding = model.vocab_size * model.hidden // parallel.tensor
    sent = 2 * rows * model.hidden * (parallel.expert > 1)  # before and after the exchange between expert ranks
    temporary = (rows * (2 * model.hidden + 3 * inner) + sent + max(weight, embedding)) * width
    kept, whole = train.recompute != "full", train.model_copy(update={"recompute": "none"})
    return temporary + max(
        layer_bytes(model, whole, tokens, layer=layer, device=device)
        - kept * layer_bytes(model, train, tokens, layer=layer, device=device)
        for layer in range(model.num_layers)
    )


def kv_bytes_per_token(model: ModelSpec, dtype: str, tensor: int = 1) -> int:
    """Returns the bytes of a token on one GPU of an engine, in layers that see all tokens; with more GPUs than heads,
    heads are replicated."""
    mixers = (mixer_cost(model, layer) for layer in range(model.num_layers))
    return sum(_on_a_gpu(mixer.cached, mixer.heads, tensor) for mixer in mixers if not mixer.window) * BYTES[dtype]


def state_bytes_per_sequence(model: ModelSpec, dtype: str, tensor: int = 1) -> int:
    """Returns the bytes of a running sequence on one GPU of an engine: states, and the keys and values of windows."""
    total = 0
    for mixer in (mixer_cost(model, layer) for layer in range(model.num_layers)):
        numbers = mixer.state + mixer.cached * mixer.window
        total += _on_a_gpu(numbers * BYTES[dtype] + mixer.state_float32 * 4, mixer.heads, tensor)
    return total


def _on_a_gpu(size: int, heads: int, tensor: int) -> int:
    return size * max(1, heads // tensor) // heads


def route_slot_bytes(model: ModelSpec) -> int:
    """Returns the host bytes of a KV slot's routes in one engine process: int32, with dense layers (SGLang 0.5.23)."""
    return model.num_layers * model.top_k * 4
