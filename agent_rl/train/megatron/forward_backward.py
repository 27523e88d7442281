"""Runs packed micro-batches through Megatron's schedule: forward alone, or forward and backward with a loss function.

batches, routes ─> this rank's shard ─> schedule (pipeline stages) ─> hidden ─> log-probs in the batch's order
                                                                                 └─> loss_fn ─> backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.models.spec import ModelSpec
from agent_rl.train.expert_balancing.plan_feed import ExpertBalancer
from agent_rl.train.megatron.attention import PackedAttention
from agent_rl.train.megatron.gate import GATES, log_router_shift, recorded_gates
from agent_rl.train.megatron.logprobs import token_logprobs
from agent_rl.train.megatron.norm_and_rope import rotary
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch, PackedRoutes, PassOutput, PassPlans, Routes
from agent_rl.train.megatron.parallel import ParallelState
from agent_rl.train.megatron.token_sharding import Layout
from agent_rl.train.route_trace import PassTrace
from r3.balance import LayerPlan
from r3.megatron_replay import RouterReplayer, validate_routes
from r3.shard import RouteShard, ShardSpec


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A micro-batch on the device with its layout, this rank's routes and the balancing plans by column.
    ``real`` False: a filler, which only takes part in collectives."""

    batch: PackedBatch
    layout: Layout
    experts: Tensor | None
    present: Tensor | None
    real: bool
    plans: Mapping[int, LayerPlan] | None


class _NoBalancer:
    """The balancer of a model whose experts stay on their ranks."""

    def forward(
        self, chunk: int, plans: Mapping[int, LayerPlan] | None, *, backward: bool
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, microbatches: int) -> None: ...

    def clear(self) -> None: ...


class ForwardBackward:
    """Forward passes and training passes over this rank's model chunks, one chunk per virtual pipeline stage."""

    def __init__(
        self,
        chunks: Sequence[Any],
        model_spec: ModelSpec,
        ranks: ParallelState,
        device: torch.device,
        replayer: RouterReplayer,
        shard: ShardSpec,
        balancer: ExpertBalancer | None,
    ) -> None:
        self.balancer, self._pass_balancer = balancer, balancer or _NoBalancer()
        self.chunks, self.model_spec, self.ranks = list(chunks), model_spec, ranks
        self.device, self.replayer = device, replayer
        self.shard, self.rotary = (
            shard,
            rotary(model_spec.rotary_dim or model_spec.head_dim, model_spec.rope_theta, model_spec.rope_scaling),
        )
        self.trace: PassTrace | None = None
        self.value_head: Callable[[Tensor], Tensor] | None = None
        # The schedule would divide by token counts, which the loss function has already done.
        chunks[0].config.finalize_model_grads_func = _finalize

    def forward_logprobs(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        record: bool = False,
        gates: bool = False,
        plans: PassPlans | None = None,
    ) -> list[PassOutput]:
        """Log-probs of every token without gradients, one output per batch, on every model-parallel rank.

        ``routes``: the experts to replay; None leaves the choice to the routers. ``record`` also returns the experts
        that this rank's routers used, ``gates`` their log-probabilities. Data ranks may have different numbers of
        batches. ``plans``: which experts ranks borrow, for a model built with ``balance``. Raises ReplayError for
        routes that are wrong or not consumed exactly once, TrainerError for routes of other tokens.
        """
        recorded: list[list[Tensor]] = [[] for _ in self.chunks]
        gated: list[Tensor] | None = [] if gates else None

        def finish(item: PreparedBatch, hidden: Tensor) -> tuple[Tensor, Any]:
            logprobs, token_entropy, _, values = self._outputs(hidden, item, temperature, entropy)
            return logprobs.sum(), (logprobs, token_entropy, values)

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            results = self._run(batches, routes, plans, finish, recorded if record else None, gated, forward_only=True)
        absent: list[Tensor | None] = [None] * len(batches)
        paths = [torch.cat(parts, dim=1) for parts in zip(*recorded, strict=True)] if record else absent
        return [
            PassOutput(logprobs, entropy_T, path, values, scores)
            for (logprobs, entropy_T, values), path, scores in zip(results, paths, gated or absent, strict=True)
        ]

    def train_microbatches(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
        entropy_gradient: bool = False,
        plans: PassPlans | None = None,
    ) -> list[dict[str, Any]]:
        """Zero the gradients, run all micro-batches forward and backward, reduce the gradients over data ranks.

        The gradient is that of the *sum* of the losses over all micro-batches and data ranks, so ``loss_fn`` must
        normalize by global counts. Its entropy argument is detached unless ``entropy_gradient``. Returns the metrics of
        ``loss_fn``, one dict per batch. Raises as :meth:`forward_logprobs`.
        """

        def finish(item: PreparedBatch, hidden: Tensor) -> tuple[Tensor, Any]:
            logprobs, token_entropy, of_candidates, values = self._outputs(
                hidden, item, temperature, entropy, entropy_gradient, item.batch.candidates
            )
            if not item.real:
                return logprobs.sum() * 0.0, {}
            named = {"candidates": of_candidates, "values": values}
            extras = {name: value for name, value in named.items() if value is not None}
            # A new batch is checked, for which the host waits.
            batch = replace(item.batch, extras={**item.batch.extras, **extras}) if extras else item.batch
            loss, metrics = loss_fn(logprobs, token_entropy, batch)
            return loss, {name: _detached(value) for name, value in metrics.items()}

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                # The optimizer leaves .grad pointing into the buffer: the first micro-batch would be counted twice.
                parameter.grad = None
        return self._run(batches, routes, plans, finish, None, None, forward_only=False)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        plans: PassPlans | None,
        finish: Callable[[PreparedBatch, Tensor], tuple[Tensor, Any]],
        recorded: list[list[Tensor]] | None,
        gated: list[Tensor] | None,
        *,
        forward_only: bool,
    ) -> list[Any]:
        count = self._agree_on_count(len(batches))
        if count == 0:
            return []
        if routes is not None and len(routes) != len(batches):
            raise TrainerError(f"{len(batches)} batches and {len(routes)} routes: pass one entry (or None) per batch")
        if plans is not None and self.balancer is None:
            raise TrainerError("the pass has balancing plans, and the model was not built with balance")
        items = self._prepared(batches, routes, plans or (), count)
        step = partial(self._step, finish=finish, recorded=recorded, gated=gated, backward=not forward_only)
        try:
            results = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=list(tee(items, len(self.chunks))) if len(self.chunks) > 1 else items,
                model=self.chunks,
                num_microbatches=count,
                seq_length=1,  # the schedule asks for lengths and then reads the real ones (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=forward_only,
            )
            self.replayer.finish(count, backward=not forward_only)
            self._pass_balancer.finish(count)
        finally:
            self.replayer.clear()
            self._pass_balancer.clear()
            self._free_buffers()
        return self._broadcast_results(results)[: len(batches)]

    def _free_buffers(self) -> None:
        """Free buffers that Megatron keeps until the next pass, 2 T H bytes each: the gather buffer of tensor ranks,
        and the input of a pipeline stage with its gradient."""
        parallel_state.get_global_memory_buffer().buffer.clear()
        for chunk in self.chunks:
            chunk.module.set_input_tensor(None)

    def _agree_on_count(self, local: int) -> int:
        """The largest number of micro-batches on any rank, because every expert exchange needs all expert ranks.

        The interleaved schedule needs a multiple of the pipeline size.
        """
        counts = torch.tensor([local], device=self.device)
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
        group = self.ranks.pipeline_size if len(self.chunks) > 1 else 1
        return -(-int(counts.item()) // group) * group

    def _prepared(
        self, batches: Sequence[PackedBatch], routes: Sequence[Routes | None] | None, plans: PassPlans, count: int
    ) -> Iterator[PreparedBatch]:
        for index in range(count):
            batch_plans = plans[index] if index < len(plans) else None
            if real := index < len(batches):
                yield self._prepare(index, batches[index], routes[index] if routes else None, batch_plans, real=real)
            else:
                yield self._prepare(index, PackedBatch.from_sequences([[0, 0]]), None, batch_plans, real=real)

    def _prepare(
        self, index: int, batch: PackedBatch, routes: Routes | None, plans: Mapping[int, LayerPlan] | None, real: bool
    ) -> PreparedBatch:
        layout = Layout(batch, self.shard)
        experts = present = None
        if routes is not None and self.model_spec.moe_layer_ids:
            share = self._shard(routes, batch, layout) if isinstance(routes, PackedRoutes) else routes
            if self.trace is not None:
                self.trace.fetched(index, batch, layout, share)
            checked = layout.check(share)
            # torch has no arithmetic on uint16; int32 holds every expert id.
            experts = torch.tensor(share.experts.astype(np.int32) if share.experts.itemsize > 1 else share.experts)
            present_rows = torch.tensor(share.present)
            self._validate(experts, present_rows, layers=len(self.shard.columns))
            # Padding rows keep their own experts, which are spread evenly; the router would send all to the
            # same experts.
            padding = layout.router_padding
            pinned = present_rows | (padding if present_rows.ndim == 1 else padding[:, None])
            if self.trace is not None:
                self.trace.handed(index, batch, layout, experts, pinned, checked)
            experts, present = experts.to(self.device), None if bool(pinned.all()) else pinned.to(self.device)
        return PreparedBatch(batch.to(self.device), layout, experts, present, real, plans)

    def _shard(self, routes: PackedRoutes, batch: PackedBatch, layout: Layout) -> RouteShard:
        if len(routes.experts) != len(batch):
            raise TrainerError(f"a batch of {len(batch)} tokens has {len(routes.experts)} rows of routes")
        self._validate(routes.experts, routes.present, layers=len(self.model_spec.moe_layer_ids))
        return layout.shard_routes(routes, self.model_spec.num_experts)

    def _validate(self, experts: Tensor, present: Tensor, *, layers: int) -> None:
        top_k, num_experts = self.model_spec.top_k, self.model_spec.num_experts
        validate_routes(experts, present, moe_layers=layers, top_k=top_k, num_experts=num_experts)

    def _step(
        self,
        items: Iterator[PreparedBatch],
        chunk: Any,
        *,
        finish: Callable[[PreparedBatch, Tensor], tuple[Tensor, Any]],
        recorded: list[list[Tensor]] | None,
        gated: list[Tensor] | None,
        backward: bool,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        """Run one micro-batch through one chunk. Returns its output, and the function that the schedule calls for the
        loss."""
        item, number = next(items), self.chunks.index(chunk)
        layout = item.layout
        packed = PackedAttention.build(layout, self.rotary, self.device)
        balanced = self._pass_balancer.forward(number, item.plans, backward=backward)
        shifts = gated is not None or GATES in item.batch.extras
        recording = recorded_gates(chunk) if shifts else nullcontext(list[Tensor]())
        replay = self.replayer.forward(number, item.experts, item.present, backward=backward)
        with replay as used, balanced, recording as gates:
            output = chunk(
                input_ids=layout.take(item.batch.tokens, 0)[None],
                position_ids=layout.positions.to(self.device)[None],
                attention_mask=None,
                packed_seq_params=packed,
            )
        if recorded is not None and item.real:
            recorded[number].append(self._collect(used, layout))
        if gated is not None and item.real:
            gated.append(torch.stack(gates, 1).cpu())
        elif GATES in item.batch.extras:
            item = _with_shift(item, torch.stack(gates, 1))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, result = finish(item, hidden)
            return value, torch.ones((), dtype=torch.int, device=self.device), result

        return output, loss

    def _outputs(
        self,
        hidden: Tensor,
        item: PreparedBatch,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool = False,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Log-probs and entropy ``[T]``, log-probs of ``candidates`` ``[T, k]`` and values ``[T]``, in the order of the
        full batch, the same on every tensor and context rank."""
        layout, batch = item.layout, item.batch
        if self.ranks.tensor_size > 1:
            # Each tensor rank's part of the vocabulary gives a part of the gradient, so the backward pass sums them.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        source = layout.source.to(self.device)
        last = torch.zeros(len(batch), dtype=torch.bool, device=self.device)
        last[batch.cu_seqlens[1:].long() - 1] = True
        rows = ((source >= 0) & ~last[source.clamp(min=0)]).nonzero()[:, 0]
        targets = source[rows] + 1  # the output at a token predicts the next one
        hidden = hidden[:, 0][rows]
        outputs = token_logprobs(
            hidden,
            self.chunks[-1].module.output_weight(),
            batch.tokens[targets],
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            kept=None if batch.kept is None else batch.kept.take(targets.cpu().numpy()),
            candidates_Tk=None if candidates is None else candidates[targets],
        )
        values = None if self.value_head is None else self.value_head(hidden)
        full, *more = (
            None if each is None else _scatter(each, targets, len(batch), self.ranks) for each in (*outputs, values)
        )
        assert full is not None
        return full, more[0], more[1], more[2]

    def _collect(self, used: dict[int, Tensor], layout: Layout) -> Tensor:
        """The experts that this chunk's routers used, in the order of the columns; see ``PassOutput.routes``."""
        rows, top_k = len(layout.router_padding), self.model_spec.top_k
        dtype = torch.uint8 if self.model_spec.num_experts <= 256 else torch.int32
        routes = torch.zeros(rows, len(used), top_k, dtype=dtype)
        for position, column in enumerate(sorted(used)):  # the columns of a chunk may start above 0
            routes[:, position] = used[column].to("cpu", dtype)
        return routes

    def _broadcast_results(self, results: list[Any]) -> list[Any]:
        """Give every pipeline stage the results of the last one."""
        if self.ranks.pipeline_size == 1:
            return results
        group = parallel_state.get_pipeline_model_parallel_group()
        payload = [results if self.ranks.last_stage else None]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast_object_list(payload, src=source, group=group)
        return payload[0] or []


def _with_shift(item: PreparedBatch, gates_TLK: Tensor) -> PreparedBatch:
    """``item`` with the router shift of its tokens in place of the old policy's gates."""
    extras = dict(item.batch.extras)
    shift_T = log_router_shift(extras.pop(GATES), gates_TLK, item.present)
    return replace(item, batch=replace(item.batch, extras={**extras, "router_shift": shift_T}))


class _SumOverContext(torch.autograd.Function):
    """The sum of the context ranks' disjoint parts. All compute the same loss, so the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, share: Tensor) -> Tensor:
        total = share.clone()
        torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _scatter(values: Tensor, targets: Tensor, size: int, ranks: ParallelState) -> Tensor:
    full = values.new_zeros(size, *values.shape[1:]).index_put((targets,), values)
    if ranks.context_size == 1:
        return full
    total: Tensor = _SumOverContext.apply(full)
    return total


def _finalize(model: list[Any], _tokens: Any = None, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value
