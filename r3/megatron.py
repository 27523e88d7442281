"""Routing replay inside Megatron-core 0.16.1's routers: given experts in, gate weights from the trainer's own logits.

With softmax scoring after the top-k (as in Qwen3) a replayed router computes exactly Eq. 8 of the R3 paper (arXiv
2510.11370): ``g_i = I_i exp(s_i) / sum_j I_j exp(s_j)``, I the given experts and s the trainer's logits, so gradients
still reach the router.

Megatron's protocol has an action per router (replay in the forward pass, replay in the recomputation under the backward
pass) and a process-global list of all routers. Here every router gets a replay object of its own that belongs to one
:class:`RouterReplayer`, so that two models in one process do not meet; rows that are absent take the native top-k; and
a router that was not asked exactly once a micro-batch raises.

Axes of routes: ``[tokens, moe_layers, top_k]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor


class ReplayError(Exception):
    """Routes that cannot be replayed as they are, or were not consumed exactly once; the message says where."""


class LayerReplay(RouterReplay):
    """The replay state of one router. ``used`` holds the experts of the last pass, ``[tokens, top_k]``."""

    def __init__(self, layer_number: int) -> None:
        # The base class' constructor would append this object to a list shared by the whole process.
        self.layer_number = layer_number
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[Tensor] = []
        self.present: Tensor | None = None
        self.keep = False
        self.forwards = 0
        self.backwards = 0

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scores of the experts to use and their ids; called by the router in place of its top-k."""
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
        experts = self._resolve(scores, topk, native)
        self.recorded_topk_idx = experts
        if self.keep:
            self.replay_backward_list.append(experts)
        return experts

    def _resolve(self, scores: Tensor, topk: int, native: Callable[[], Tensor]) -> Tensor:
        if self.target_topk_idx is None:
            return native()
        if self.target_topk_idx.shape != (len(scores), topk):
            raise ReplayError(
                f"layer {self.layer_number}: the router has {len(scores)} tokens and top-{topk}, "
                f"the routes are {tuple(self.target_topk_idx.shape)}"
            )
        target = self.target_topk_idx.to(device=scores.device, dtype=torch.int64)
        if self.present is None:
            return target
        return torch.where(self.present.to(scores.device)[:, None], target, native())

    def _backward(self, scores: Tensor) -> Tensor:
        if not self.replay_backward_list:
            raise ReplayError(f"layer {self.layer_number}: recomputed more often than it was run forward")
        self.backwards += 1
        experts = self.replay_backward_list.pop(0)
        if len(experts) != len(scores):
            raise ReplayError(
                f"layer {self.layer_number}: the recomputation has {len(scores)} tokens, the forward pass had "
                f"{len(experts)}"
            )
        return experts


class RouterReplayer:
    """Drives the routers of one model's chunks on this rank.

    ``moe_layers``: the 1-based numbers of all layers with experts, in order, over the whole model; column i of the
    routes is layer ``moe_layers[i]``. ``recompute``: whether the model recomputes its layers under the backward pass.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: Sequence[int], *, recompute: bool) -> None:
        self._columns = {number: column for column, number in enumerate(moe_layers)}
        self._recompute = recompute
        self._layers: list[list[LayerReplay]] = []
        for chunk in chunks:
            self._layers.append([self._adopt(module) for module in chunk.modules() if isinstance(module, TopKRouter)])

    def _adopt(self, router: TopKRouter) -> LayerReplay:
        check_supported(router.config)
        if router.layer_number not in self._columns:
            raise ReplayError(f"layer {router.layer_number} has a router, the model says it has no experts")
        shared = RouterReplay.global_router_replay_instances
        shared[:] = [other for other in shared if other is not router.router_replay]
        router.router_replay = LayerReplay(router.layer_number)
        return router.router_replay

    @contextmanager
    def forward(
        self, chunk: int, experts: Tensor | None, present: Tensor | None, *, backward: bool
    ) -> Iterator[dict[int, Tensor]]:
        """Around one forward pass of one micro-batch through chunk ``chunk``.

        ``experts`` ``[tokens, moe_layers, top_k]`` and ``present`` bool ``[tokens]`` (None: all) are this rank's rows;
        ``experts`` None routes natively. ``backward`` says that a backward pass will follow. After the block the
        yielded mapping holds the experts used, ``[tokens, top_k]`` by column of ``moe_layers``. Raises ReplayError
        unless every router was asked exactly once.
        """
        layers, used = self._layers[chunk], dict[int, Tensor]()
        for layer in layers:
            column = self._columns[layer.layer_number]
            layer.target_topk_idx = None if experts is None else experts[:, column]
            layer.present = present
            layer.keep = backward and self._recompute
            layer.forwards = 0
            layer.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield used
        for layer in layers:
            if layer.forwards != 1:
                raise ReplayError(
                    f"layer {layer.layer_number}: its routes were consumed {layer.forwards} times, not once"
                )
            assert layer.recorded_topk_idx is not None
            used[self._columns[layer.layer_number]] = layer.recorded_topk_idx
            # At once, not after the step: in a pipeline the recomputation of another micro-batch may come next.
            layer.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def finish(self, microbatches: int, *, backward: bool) -> None:
        """After a step: every router must have been recomputed once a micro-batch. Clears. Raises ReplayError."""
        expected = microbatches if backward and self._recompute else 0
        counts = {layer.layer_number: layer.backwards for layers in self._layers for layer in layers}
        left = {layer.layer_number: len(layer.replay_backward_list) for layers in self._layers for layer in layers}
        self.clear()
        for number, count in counts.items():
            if count != expected or left[number]:
                raise ReplayError(
                    f"layer {number}: its routes were consumed {count} times in the recomputation, not {expected} "
                    f"({left[number]} left over)"
                )

    def clear(self) -> None:
        """Forget all routes and let the routers route natively. Idempotent."""
        for layer in (layer for layers in self._layers for layer in layers):
            layer.clear_indices()
            layer.clear_router_replay_action()
            layer.present = None
            layer.forwards = layer.backwards = 0


def check_supported(config: Any) -> None:
    """Refuse a router that would ignore replay or not compute Eq. 8 with it. Raises ReplayError with the reason."""
    reasons = {
        "the fused router ignores replay (moe_router_fusion)": config.moe_router_fusion,
        "sinkhorn routing ignores replay (moe_router_load_balancing_type)": "sinkhorn"
        in _as_list(config.moe_router_load_balancing_type),
        "a softmax before the top-k is not Eq. 8 (moe_router_pre_softmax)": config.moe_router_pre_softmax,
        f"{config.moe_router_score_function} scores are not Eq. 8 (moe_router_score_function)": (
            config.moe_router_score_function != "softmax"
        ),
        "an expert bias chooses by other scores (moe_router_enable_expert_bias)": config.moe_router_enable_expert_bias,
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
    """Every present row must name ``top_k`` different experts below ``num_experts`` a layer. Raises ReplayError.

    A duplicate runs silently and changes the loss, which is why this is checked before every pass.
    """
    if experts.ndim != 3 or experts.shape[1:] != (moe_layers, top_k):
        raise ReplayError(f"routes are {tuple(experts.shape)}, the model needs [tokens, {moe_layers}, {top_k}]")
    if present.shape != experts.shape[:1]:
        raise ReplayError(f"{len(experts)} rows of routes, and a mask of {tuple(present.shape)}")
    wrong = ((experts < 0) | (experts >= num_experts)).any(-1)
    for first in range(top_k):
        for second in range(first + 1, top_k):
            wrong |= experts[..., first] == experts[..., second]
    wrong &= present[:, None]
    if bool(wrong.any()):
        row, layer = (int(index) for index in wrong.nonzero()[0])
        raise ReplayError(
            f"row {row}, MoE layer {layer}: experts {experts[row, layer].tolist()} are not {top_k} different ids below "
            f"{num_experts}"
        )
