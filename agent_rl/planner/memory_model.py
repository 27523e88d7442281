"""How much memory the parts of a run take: formulas over a model's shape and a layout. Pure; imports no torch.

Symbols: T tokens of a micro-batch on a rank, H hidden, Q and KV widths of all query and all key or value heads, I inner
width (of an expert, or of a dense layer), E experts, k of them a token, V vocabulary, b bytes of a number; t, p, c, e
the tensor, pipeline, context and expert sizes. Activations are counted from what autograd keeps of this trainer's own
layers (agent_rl/train/megatron); Korthikanti et al., arXiv 2205.05198, do the same for Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agent_rl.config import LoraConfig, ParallelConfig, TrainConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.hf_index import change_shapes
from agent_rl.train.parallel_checks import expert_copies, shares_optimizer, weight_copies

BYTES = {"float32": 4, "bfloat16": 2}
LOGITS_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits made at once (agent_rl/train/megatron/logprobs.py)."""
LOGITS_COPIES = {"cpu": 5, "cuda": 3}
"""Float32 arrays of a chunk's size that exist at once: logits, the same shifted, and its exponentials; five on a CPU
(measured), and where the entropy has a gradient."""
ROUTER_BYTES = 17
"""Bytes a token and expert that a router keeps: float32 logits, scores and dense gates, a mask and their copy."""


def parameters(model: ModelSpec) -> int:
    """All parameters of a model, an untied output layer included."""
    dense, experts = rank_parameters(model, ParallelConfig())
    return dense + experts


def route_bytes(model: ModelSpec) -> int:
    """Bytes of a token's routes in the narrowest type that holds the expert ids."""
    return len(model.moe_layer_ids) * model.top_k * (1 if model.num_experts <= 256 else 2)


def rank_parameters(model: ModelSpec, parallel: ParallelConfig) -> tuple[int, int]:
    """``(dense, experts)``: parameters on the rank that has most; dense ones are all that are no expert's."""
    stages = parallel.pipeline
    per_stage = model.num_layers // stages
    best = (0, 0)
    for stage in range(stages):
        dense = experts = 0
        for index in range(stage * per_stage, (stage + 1) * per_stage):
            dense += _dense_of_layer(model, index, parallel.tensor)
            experts += 3 * model.hidden * model.expert_inner * (model.num_experts // parallel.expert) * model.moe[index]
        embedding = model.vocab_size * model.hidden // parallel.tensor
        dense += embedding * (stage == 0)
        # A tied output layer on another stage is a copy of the embedding there.
        dense += (embedding * (not model.tied or stages > 1) + model.hidden) * (stage == stages - 1)
        best = max(best, (dense, experts), key=sum)
    return best


def _dense_of_layer(model: ModelSpec, index: int, tensor: int) -> int:
    attention = model.hidden * (2 * model.q_width + 2 * model.kv_width) // tensor
    norms = 2 * model.hidden + 2 * model.head_dim
    if model.moe[index]:
        shared = 3 * model.hidden * model.shared_inner // tensor + model.hidden * bool(model.shared_inner)
        return attention + norms + model.num_experts * model.hidden + shared
    return attention + norms + 3 * model.hidden * model.inner // tensor


def trained_parameters(model: ModelSpec, train: TrainConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """As :func:`rank_parameters`, of those that are trained: all, or the adapters (``train.lora``)."""
    if train.lora is None:
        return rank_parameters(model, parallel)
    attention, expert = adapter_parameters(model, train.lora)
    return model.num_layers * attention, len(model.moe_layer_ids) * (model.num_experts // parallel.expert) * expert


def adapter_parameters(model: ModelSpec, lora: LoraConfig) -> tuple[int, int]:
    """Of one layer's attention and of one expert; query, key and value have one A, and so have gate and up."""
    attention = 2 * model.hidden + 2 * model.q_width + 2 * model.kv_width
    return lora.rank * attention, lora.rank * (2 * model.hidden + 3 * model.expert_inner)


def changes_bytes(model: ModelSpec, train: TrainConfig) -> int:
    """What adapters are when they travel to an engine, float32; 0 without adapters."""
    shapes = {} if train.lora is None else change_shapes(model, train.lora.rank)
    return 4 * sum(map(math.prod, shapes.values()))


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Memory of the fullest trainer rank on its device, in bytes.

    ``optimizer_unshared``: what the optimizer would take without the distributed one. ``offloaded``: what of it lies in
    host memory. ``activations`` are those kept between forward and backward pass (``inputs``: of layers, in host
    memory); then come the logits, and when those are gone a ``layer``: its gradients, and its activations where they
    are made again. When all of those are gone, Adam's ``step``: two float32 temporaries of the largest weight and one
    of those before it, and what of its state is not there in float32. ``start``: what there is at most, beside weights
    and gradients, before there is an optimizer: Megatron copies the weights into the distributed optimizer's buffers,
    those of all experts or all others at once.
    ``borrowed``: experts of other ranks, twice what a layer may borrow (the next layer's are fetched while one
    computes; their gradients wait to be returned).
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
        """What is there before and after a step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peaks(self) -> Mapping[str, int]:
        """What may come on top, each at another time. Activations are not there in the last two, nor is the optimizer
        in the last: it counts for what it takes beyond these."""
        passing = self.activations + self.borrowed
        return {
            "a chunk of logits": self.logits,
            "a layer's backward pass": self.layer,
            "Adam's step, when activations are gone": self.step - passing,
            "a copy of weights at the start, beyond what a step takes": self.start - self.optimizer - passing,
        }

    @property
    def peak(self) -> int:
        """The most that comes on top."""
        return max(self.peaks.values())

    @property
    def total(self) -> int:
        return self.static + self.activations + self.borrowed + self.peak


def rank_bytes(model: ModelSpec, train: TrainConfig, *, microbatches: int, device: str) -> RankBytes:
    """The memory of the fullest rank on ``device``, cpu or cuda; ``microbatches``: how many a data rank has in a mini
    step (a pipeline holds as many as it has stages at most)."""
    parallel, width = train.parallel, BYTES[train.dtype]
    held = sum(rank_parameters(model, parallel))
    dense, experts = trained_parameters(model, train, parallel)
    if train.lora:
        held += dense + experts
    state = state_bytes(train)
    shared = shares_optimizer(parallel)
    copies = (weight_copies(parallel), expert_copies(parallel)) if shared else (1, 1)
    tokens = train.microbatch_tokens // parallel.context
    optimizer = (dense * state) // copies[0] + (experts * state) // copies[1]
    offloads = train.offload_optimizer and device == "cuda"  # on a CPU it is the same memory
    vocabulary = model.vocab_size * model.hidden // parallel.tensor
    stacked = 2 * model.hidden * model.expert_inner * (model.num_experts // parallel.expert)
    attention = 2 * model.hidden * (model.q_width + model.kv_width) // parallel.tensor
    beside = 20 if offloads else 8 if train.optimizer_moments == "float32" else 16  # bytes of a number at Adam's step
    largest = max(min(vocabulary, dense // copies[0]), min(stacked, experts // copies[1]))
    return RankBytes(
        weights=held * width,
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
    """Of a parameter: Adam's moments, and a float32 master of a narrower weight."""
    return 2 * BYTES[train.optimizer_moments] + (4 if train.dtype == "bfloat16" else 0)


def expert_bytes(model: ModelSpec, train: TrainConfig) -> int:
    """The weights of one expert of one layer."""
    return 3 * model.hidden * model.expert_inner * BYTES[train.dtype]


def pool_bytes(model: ModelSpec, train: TrainConfig) -> int:
    """The pool of all experts of all layers that a machine's ranks borrow from; 0 where none is kept."""
    if not train.balance.enabled or "pool" not in (train.balance.transfer.recompute, train.balance.transfer.update):
        return 0
    return len(model.moe_layer_ids) * model.num_experts * expert_bytes(model, train)


def _activations(model: ModelSpec, train: TrainConfig, tokens: int, microbatches: int, device: str) -> int:
    """What the backward pass finds kept when it starts: every layer's, or the layers' inputs where all is run again."""
    width = BYTES[train.dtype]
    # The last norm's input and output and its rows that predict something; the rotary embedding's cosines and sines.
    final = tokens * (model.hidden * width * 3 + model.head_dim * 4 * 2)
    if train.recompute == "full":
        return final + _inputs(model, train, tokens, microbatches, device)[0]
    kept = {moe: layer_bytes(model, train, tokens, moe=moe, device=device) for moe in set(model.moe)}
    return _in_flight(train, microbatches) * sum(kept[moe] for moe in _first_chunk(model, train)) + final


def _inputs(model: ModelSpec, train: TrainConfig, tokens: int, microbatches: int, device: str) -> tuple[int, int]:
    """The inputs of layers that are run again: on the device, and in host memory."""
    if train.recompute != "full":
        return 0, 0
    of_a_layer = _in_flight(train, microbatches) * (tokens // train.parallel.tensor) * model.hidden * BYTES[train.dtype]
    every = len(_first_chunk(model, train)) * of_a_layer
    # A pipeline's schedule holds a stage's inputs itself; without one, an input that came back.
    return (of_a_layer, every) if train.offload_activations and device == "cuda" else (every, 0)


def _first_chunk(model: ModelSpec, train: TrainConfig) -> tuple[bool, ...]:
    """Layers of the first stage, which holds most micro-batches."""
    return model.moe[: model.num_layers // train.parallel.pipeline]


def _in_flight(train: TrainConfig, microbatches: int) -> int:
    """How many micro-batches the first stage holds at most."""
    parallel = train.parallel
    held = min(parallel.pipeline, max(1, microbatches))
    if parallel.virtual_pipeline > 1:  # arXiv 2104.04473: a part more for the interleaved schedule
        held = min(max(1, microbatches), held + -(-(parallel.pipeline - 1) // parallel.virtual_pipeline))
    return held


def layer_bytes(model: ModelSpec, train: TrainConfig, tokens: int, *, moe: bool, device: str) -> int:
    """What autograd keeps of one layer for ``tokens`` tokens (of one context rank), selective recomputation heeded."""
    width, tensor = BYTES[train.dtype], train.parallel.tensor
    again = train.recompute_modules if train.recompute == "selective" else ()
    own = tokens // tensor  # under tensor parallelism the residual stream is cut by tokens
    residual = 4 * model.hidden * width * own  # both norms' inputs and outputs
    # Queries are there twice: with keys and values, as they were projected, and apart, as their norm wants them.
    projected = (2 * model.q_width + 2 * model.kv_width) * width * tokens // tensor
    core = (2 * model.q_width + model.kv_width) * width * tokens // tensor + 4 * model.heads * tokens // tensor
    if (parts := train.parallel.context) > 1:
        core += 2 * model.kv_width * width * tokens * parts // tensor  # keys and values of the whole sequence
        if device == "cpu" or train.dtype == "float32":  # and a mask for each of the two chunks a rank holds of it
            core += (tokens // 2) ** 2 * (2 * parts + 1)
    joined = model.q_width * width * tokens // tensor  # the output projection's input
    given = (model.q_width + model.kv_width) * width * tokens // tensor  # what core attention is run again from
    attention = projected + joined + (given if "core_attn" in again else core)
    if not moe:
        mlp = 0 if "mlp" in again else 4 * model.inner * width * tokens // tensor
    elif "moe" in again:
        mlp = 0
    else:
        rows = own * model.top_k
        mlp = rows * (model.hidden + 5 * model.expert_inner) * width + own * model.num_experts * ROUTER_BYTES
        mlp += 4 * model.shared_inner * width * tokens // tensor
    return residual + attention + mlp + _adapted(model, train, tokens, moe=moe and "moe" not in again)


def _adapted(model: ModelSpec, train: TrainConfig, tokens: int, *, moe: bool) -> int:
    """What adapters keep of one layer beyond what frozen weights would: the products with each A."""
    rows = tokens * (2 + 2 * model.top_k * moe)
    return rows * train.lora.rank * BYTES[train.dtype] if train.lora else 0


def _logits(model: ModelSpec, train: TrainConfig, tokens: int, device: str) -> int:
    """A chunk of logits, what is made of it, and the output weight's gradient over all chunks. That of one chunk is
    made, where it is narrower, when all arrays but two are gone."""
    share, width = model.vocab_size // train.parallel.tensor, BYTES[train.dtype]
    rows = min(tokens, max(1, LOGITS_CHUNK[device] // share))
    chunk, narrow = rows * share * 4, share * model.hidden * width if width < 4 else 0
    copies = LOGITS_COPIES["cpu" if train.entropy_coefficient else device]
    return max(copies * chunk, 2 * chunk + narrow) + share * model.hidden * 4


def _one_layer(model: ModelSpec, train: TrainConfig, tokens: int, device: str) -> int:
    """What lives for a moment of the backward pass: one layer's activations where they are made again, gradients of its
    widest, and of the largest weight."""
    width, parallel = BYTES[train.dtype], train.parallel
    rows = tokens // parallel.tensor * max(1, model.top_k)
    inner = model.expert_inner or model.inner // parallel.tensor
    weight = 2 * model.hidden * inner * max(1, model.num_experts // parallel.expert)
    embedding = model.vocab_size * model.hidden // parallel.tensor
    sent = 2 * rows * model.hidden * (parallel.expert > 1)  # before and after the exchange between expert ranks
    passing = (rows * (2 * model.hidden + 3 * inner) + sent + max(weight, embedding)) * width
    if train.recompute != "full":
        return passing
    return passing + max(layer_bytes(model, train, tokens, moe=moe, device=device) for moe in set(model.moe))


def kv_bytes_per_token(model: ModelSpec, dtype: str, tensor: int = 1) -> int:
    """Key and value of a token on one GPU of an engine; with more GPUs than heads, heads are held twice."""
    return 2 * model.num_layers * max(1, model.kv_heads // tensor) * model.head_dim * BYTES[dtype]


def route_slot_bytes(model: ModelSpec) -> int:
    """Host memory of a KV slot's routes in one engine process: int32, dense layers included (SGLang 0.5.23)."""
    return model.num_layers * model.top_k * 4
