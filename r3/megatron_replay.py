"""Routing replay inside Megatron-core 0.16.1's routers: experts are given, gates use the trainer's logits.

With softmax scoring after the top-k (as in Qwen3) a replayed router computes exactly Eq. 8 of the R3 paper (arXiv
2510.11370): ``g_i = I_i exp(s_i) / sum_j I_j exp(s_j)``, I the given experts and s the trainer's logits, so gradients
reach the router.

Megatron sets an action per router (replay in the forward pass, replay in the recomputation under the backward pass) and
keeps a process-global list of all routers. Here every router has its own replay object, which belongs to one
:class:`RouterReplayer`, so that two models in one process are independent. Absent rows use the router's own top-k. A
router that does not run exactly once per micro-batch raises ReplayError.

Axes of routes: ``[tokens, moe_layers, top_k]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor


class ReplayError(Exception):
    """Routes that cannot be replayed, or were not consumed exactly once; the message says where."""


class ReplayObserver(Protocol):
    """Receives the actions of the routers of one model; ``action`` is ``replay_forward`` or ``replay_backward``.

    ``layer_number`` is 1-based over the whole model, ``microbatch`` counts the micro-batches of a pass from 0. Experts
    are ``[tokens, top_k]`` of this rank's tokens (a tensor and context rank's share). Tensors are on the model's device
    and must not be changed.
    """

    def assigned(self, layer_number: int, microbatch: int, experts: Tensor) -> None:
        """A router received ``experts``, in their original order; the values of absent rows have no meaning."""

    def action(self, layer_number: int, microbatch: int, action: str) -> None:
        """A router was switched to ``action`` for a micro-batch; backward only if a backward pass follows."""

    def forwarded(
        self, layer_number: int, microbatch: int, action: str, used: Tensor, expected: Tensor | None, fallback_rows: int
    ) -> None:
        """A router ran (``replay_backward``: again, under the backward pass).

        ``used`` comes from the map that the router passed to its token dispatcher. ``expected``: in the forward pass
        the given experts (absent rows: the router's own top-k; None without replay), in the backward pass those of the
        forward pass. Both int64, each row ascending. ``fallback_rows``: rows that used the router's own top-k.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """The experts of one micro-batch in one router, ``[tokens, top_k]``; ``expected`` is None without replay."""

    microbatch: int
    experts: Tensor
    expected: Tensor | None
    fallback_rows: int


class LayerReplay(RouterReplay):
    """The replay state of one router. ``recomputed``: its layer runs again under the backward pass."""

    def __init__(self, layer_number: int, *, recomputed: bool) -> None:
        # The base class' constructor would append this object to a list shared by the whole process.
        self.layer_number, self.recomputed = layer_number, recomputed
        self.observer: ReplayObserver | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.clear()

    def clear(self) -> None:
        """Discard all routes and route without replay. Idempotent."""
        self.clear_indices()
        self.clear_router_replay_action()
        self.present: Tensor | None = None
        self.microbatch = 0
        self.forwards = self.backwards = 0
        self._chosen: _Choice | None = None
        self._kept: deque[_Choice] = deque()

    @property
    def pending_recomputations(self) -> int:
        """Micro-batches that ran forward and were not yet recomputed."""
        return len(self._kept)

    def begin(self, microbatch: int, experts: Tensor | None, present: Tensor | None, *, backward: bool) -> None:
        """Call before a forward pass with the rows to use (None: no replay) and which are present (None: all)."""
        self.microbatch, self.target_topk_idx, self.present = microbatch, experts, present
        self.forwards = 0
        self._keep = backward and self.recomputed
        if self.observer is not None:
            if experts is not None:
                self.observer.assigned(self.layer_number, microbatch, experts)
            self.observer.action(self.layer_number, microbatch, "replay_forward")
        self.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def end(self, *, backward: bool) -> Tensor:
        """Call after the forward pass; returns the experts used. Raises ReplayError unless the router ran exactly
        once."""
        if self.forwards != 1 or self._chosen is None:
            raise ReplayError(f"layer {self.layer_number}: its routes were consumed {self.forwards} times, not once")
        # Not after the step: in a pipeline, the recomputation of another micro-batch may follow at once.
        self.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        if backward and self.observer is not None:
            self.observer.action(self.layer_number, self.microbatch, "replay_backward")
        return self._chosen.experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and ids of the experts to use; the router calls it instead of its top-k."""
        assert default_compute_topk is not None
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            experts = self._forward(scores, topk, lambda: default_compute_topk(scores, topk, num_groups, group_topk)[1])
        elif self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            experts = self._backward(scores)
        else:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        return scores.gather(1, experts), experts

    def _forward(self, scores: Tensor, topk: int, native: Callable[[], Tensor]) -> Tensor:
        self.forwards += 1
        if self.forwards > 1:
            raise ReplayError(f"layer {self.layer_number}: routed twice in one forward pass of a micro-batch")
        self._chosen = self._resolve(scores, topk, native)
        if self._keep:
            self._kept.append(self._chosen)
        return self._chosen.experts

    def _resolve(self, scores: Tensor, topk: int, native: Callable[[], Tensor]) -> _Choice:
        if self.target_topk_idx is None:
            return _Choice(self.microbatch, native(), None, len(scores))
        if self.target_topk_idx.shape != (len(scores), topk):
            raise ReplayError(
                f"layer {self.layer_number}: the router has {len(scores)} tokens and top-{topk}, "
                f"the routes are {tuple(self.target_topk_idx.shape)}"
            )
        target = self.target_topk_idx.to(device=scores.device, dtype=torch.int64)
        if self.present is None:
            return _Choice(self.microbatch, target, target, 0)
        mixed = torch.where(self.present.to(scores.device)[:, None], target, native())
        absent = 0 if self.observer is None else int((~self.present).sum())
        return _Choice(self.microbatch, mixed, mixed, absent)

    def _backward(self, scores: Tensor) -> Tensor:
        if not self._kept:
            raise ReplayError(f"layer {self.layer_number}: recomputed more often than it was run forward")
        self.backwards += 1
        kept = self._kept.popleft()
        if len(kept.experts) != len(scores):
            raise ReplayError(
                f"layer {self.layer_number}: the recomputation has {len(scores)} tokens, the forward pass had "
                f"{len(kept.experts)}"
            )
        self._chosen = replace(kept, expected=kept.experts)
        return kept.experts

    def routed(self, _router: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        """Forward hook of the router: reports the experts of its dispatch map to the observer."""
        if self.observer is None or self._chosen is None or self.router_replay_action is None:
            return
        chosen, routing_map = self._chosen, output[1]
        used = routing_map.nonzero()[:, 1].view(len(routing_map), -1)
        expected = None if chosen.expected is None else chosen.expected.sort(-1).values
        action = self.router_replay_action.value
        self.observer.forwarded(self.layer_number, chosen.microbatch, action, used, expected, chosen.fallback_rows)


class RouterReplayer:
    """Controls the routers of one model's chunks on this rank.

    ``moe_layers``: the 1-based numbers of all layers with experts, in order, over the whole model; column i of the
    routes is layer ``moe_layers[i]``. Which layers are recomputed under the backward pass follows from the model's own
    configuration. Routers of multi-token-prediction layers have no routes and go on by themselves. Raises ReplayError
    on a model that cannot replay (:func:`check_supported`).
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: Sequence[int]) -> None:
        self._columns = {number: column for column, number in enumerate(moe_layers)}
        self._layers = [self._attach_chunk(chunk) for chunk in chunks]
        self._microbatches = [0] * len(chunks)
        self._observer: ReplayObserver | None = None

    @property
    def observer(self) -> ReplayObserver | None:
        """Receives the actions of the routers; None (the default): nothing is reported."""
        return self._observer

    @observer.setter
    def observer(self, observer: ReplayObserver | None) -> None:
        self._observer = observer
        for layer in self._all_layers():
            layer.observer = observer

    def _attach_chunk(self, chunk: torch.nn.Module) -> list[LayerReplay]:
        attached = []
        _remove_from_shared_list(chunk)
        for module in (module for module in chunk.modules() if isinstance(module, MoELayer)):
            check_experts(module)
        for router, place in _decoder_routers(chunk):
            check_supported(router.config)
            if router.layer_number not in self._columns:
                raise ReplayError(f"layer {router.layer_number} has a router, the model says it has no experts")
            layer = LayerReplay(router.layer_number, recomputed=is_recomputed(router.config, place))
            router.router_replay = layer
            router.register_forward_hook(layer.routed)
            attached.append(layer)
        return attached

    def _all_layers(self) -> list[LayerReplay]:
        return [layer for layers in self._layers for layer in layers]

    @contextmanager
    def forward(
        self, chunk: int, experts: Tensor | None, present: Tensor | None, *, backward: bool
    ) -> Iterator[dict[int, Tensor]]:
        """A context around one forward pass of one micro-batch through chunk ``chunk``.

        ``experts`` ``[tokens, moe_layers, top_k]`` and ``present`` bool ``[tokens]`` or ``[tokens, moe_layers]`` (None:
        all) are this rank's rows; ``experts`` None: no replay. ``backward``: a backward pass follows.
        After the block the yielded mapping holds the experts used, ``[tokens, top_k]`` by column of ``moe_layers``.
        Raises ReplayError unless every router ran exactly once.
        """
        layers, used = self._layers[chunk], dict[int, Tensor]()
        for layer in layers:
            column = self._columns[layer.layer_number]
            rows = None if experts is None else experts[:, column]
            row_mask = present[:, column] if present is not None and present.ndim == 2 else present
            layer.begin(self._microbatches[chunk], rows, row_mask, backward=backward)
        yield used
        for layer in layers:
            used[self._columns[layer.layer_number]] = layer.end(backward=backward)
        self._microbatches[chunk] += 1

    def finish(self, microbatches: int, *, backward: bool) -> None:
        """End a step of ``microbatches`` micro-batches and discard its routes. Raises ReplayError unless every chunk
        ran that many, and every router of a recomputed layer ran once more for each."""
        passes = list(self._microbatches)
        counts = [(layer, layer.backwards, layer.pending_recomputations) for layer in self._all_layers()]
        self.clear()
        for chunk, count in enumerate(passes):
            if count != microbatches:
                raise ReplayError(f"model chunk {chunk} was run on {count} micro-batches, not {microbatches}")
        for layer, count, left in counts:
            expected = microbatches if backward and layer.recomputed else 0
            if count != expected or left:
                raise ReplayError(
                    f"layer {layer.layer_number}: its routes were consumed {count} times in the recomputation, not "
                    f"{expected} ({left} left over)"
                )

    def clear(self) -> None:
        """Discard all routes and route without replay. Idempotent."""
        self._microbatches = [0] * len(self._layers)
        for layer in self._all_layers():
            layer.clear()


def _decoder_routers(chunk: torch.nn.Module) -> Iterator[tuple[TopKRouter, int]]:
    """Yields the routers of a chunk's decoder with the indices of their layers. Other routers must belong to
    multi-token prediction."""
    known: set[TopKRouter] = set()
    for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
        for place, layer in enumerate(block.layers):
            for router in (module for module in layer.modules() if isinstance(module, TopKRouter)):
                known.add(router)
                yield router, place
    for name, router in chunk.named_modules():
        if isinstance(router, TopKRouter) and router not in known:
            if not any(isinstance(chunk.get_submodule(part), MultiTokenPredictionLayer) for part in _parents(name)):
                raise ReplayError(f"{name} is a router outside the decoder's layers, and has no routes")
            router.router_replay = None


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _remove_from_shared_list(chunk: torch.nn.Module) -> None:
    """Remove the chunk's replay objects from the process-wide list to which Megatron's constructor added them."""
    own = {id(module.router_replay) for module in chunk.modules() if isinstance(module, TopKRouter)}
    shared = RouterReplay.global_router_replay_instances
    shared[:] = [other for other in shared if id(other) not in own]


def is_recomputed(config: Any, index: int) -> bool:
    """Whether Megatron recomputes the router of decoder layer ``index`` of a chunk under the backward pass.

    Full recomputation does, for all layers (uniform) or the first ``recompute_num_layers`` of a chunk (block). Of the
    selective modules only ``moe`` holds the router; ``core_attn``, ``layernorm``, ``mlp`` (of dense layers),
    ``moe_act`` and ``shared_experts`` do not.
    """
    if config.recompute_granularity == "full":
        return config.recompute_method == "uniform" or index < config.recompute_num_layers
    return config.recompute_granularity == "selective" and "moe" in config.recompute_modules


def check_experts(layer: MoELayer) -> None:
    """Refuse experts whose gradients Megatron-core 0.16.1 would reduce wrongly. Raises ReplayError.

    Tensor ranks route different tokens (sequence parallelism). Where each holds whole experts, and expert parallelism
    is 1, Megatron's own experts are reduced with the dense weights, over data ranks alone: the experts of the
    tensor ranks then diverge without an error. Experts with ``allreduce=False`` are reduced over both.
    """
    config = layer.config
    alone = config.expert_model_parallel_size == 1 and config.expert_tensor_parallel_size == 1
    if config.tensor_model_parallel_size == 1 or not alone:
        return
    if any(getattr(parameter, "allreduce", True) for parameter in layer.experts.parameters()):
        raise ReplayError(
            f"layer {layer.layer_number}: with tensor parallelism {config.tensor_model_parallel_size} and expert "
            "parallelism 1 the experts' gradients would not be summed over the tensor ranks "
            f"(set expert_model_parallel_size to {config.tensor_model_parallel_size})"
        )


_BALANCING_THAT_REPLAYS = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def check_supported(config: Any) -> None:
    """Refuse a router that would ignore replay or not compute Eq. 8 with it. Raises ReplayError with the reason.

    A softmax before the top-k (``moe_router_pre_softmax``, models whose gates are not normalized over the chosen
    experts) passes: replay gives such a model its own gates, Eq. 8 with the sum taken over all experts. So do sigmoid
    scores, scaled gates and expert biases: Megatron takes the gates from the unbiased scores of the replayed experts.
    Read of Megatron-core 0.16.1's ``TransformerConfig``. Only the ways of balancing that are known to replay pass:
    sinkhorn and quantile routing (a later Megatron's) choose experts elsewhere.
    """
    balancing = [
        kind for kind in _as_list(config.moe_router_load_balancing_type) if kind not in _BALANCING_THAT_REPLAYS
    ]
    reasons = {
        "the fused router ignores replay (moe_router_fusion)": config.moe_router_fusion,
        f"{', '.join(balancing)} routing ignores replay (moe_router_load_balancing_type)": bool(balancing),
        "random logits are not the model's (moe_router_force_load_balancing)": config.moe_router_force_load_balancing,
        "jittered inputs give other logits in every pass (moe_input_jitter_eps)": (
            config.moe_input_jitter_eps is not None
        ),
        "dropped tokens would change the experts (moe_expert_capacity_factor)": (
            config.moe_expert_capacity_factor is not None
        ),
        "replay is off in the model (moe_enable_routing_replay)": not config.moe_enable_routing_replay,
    }
    for reason, refused in reasons.items():
        if refused:
            raise ReplayError(f"this model cannot replay routes: {reason}")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def validate_routes(experts: Tensor, present: Tensor, *, moe_layers: int, top_k: int, num_experts: int) -> None:
    """Raises ReplayError unless every present row has ``top_k`` different experts below ``num_experts`` per layer.

    A duplicate raises no error in Megatron and changes the loss; so this is checked before every pass.
    """
    if experts.ndim != 3 or experts.shape[1:] != (moe_layers, top_k):
        raise ReplayError(f"routes are {tuple(experts.shape)}, the model needs [tokens, {moe_layers}, {top_k}]")
    if present.shape != experts.shape[: present.ndim]:
        raise ReplayError(f"{len(experts)} rows of routes, and a mask of {tuple(present.shape)}")
    outside = experts < 0
    if num_experts <= torch.iinfo(experts.dtype).max:  # torch casts the number to the dtype: 256 to 0
        outside |= experts >= num_experts
    wrong = outside.any(-1)
    for first in range(top_k):
        for second in range(first + 1, top_k):
            wrong |= experts[..., first] == experts[..., second]
    wrong &= present if present.ndim == 2 else present[:, None]
    if bool(wrong.any()):
        row, layer = (int(index) for index in wrong.nonzero()[0])
        raise ReplayError(
            f"row {row}, MoE layer {layer}: experts {experts[row, layer].tolist()} are not {top_k} different ids below "
            f"{num_experts}"
        )
