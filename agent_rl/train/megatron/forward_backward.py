"""Runs packed micro-batches through Megatron's schedule: forward alone, or forward and backward with a loss function.

batches, routes ─> cut for this rank ─> schedule (pipeline stages) ─> hidden ─> log-probs in the batch's order
                                                                                 └─> loss_fn ─> backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from agent_rl.train.megatron.logprobs import token_logprobs
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch, PackedRoutes, PassOutput, PassPlans, Routes
from agent_rl.train.megatron.parallel import Ranks
from agent_rl.train.megatron.rotary import rotary
from agent_rl.train.megatron.token_sharding import Layout
from agent_rl.train.route_trace import PassTrace
from r3.balance import Plan
from r3.megatron_replay import RouterReplayer, validate_routes
from r3.shard import RouteShard, ShardSpec


@dataclass(frozen=True, slots=True, eq=False)
class ReadyBatch:
    """A micro-batch ready to run: the batch on the device, its cut, this rank's routes, who borrows which experts.
    ``real`` False: a filler."""

    batch: PackedBatch
    layout: Layout
    experts: Tensor | None
    present: Tensor | None
    real: bool
    plans: Mapping[int, Plan] | None


class Passes:
    """The two kinds of pass over this rank's model chunks (one a virtual pipeline stage)."""

    def __init__(
        self,
        chunks: Sequence[Any],
        facts: ModelSpec,
        ranks: Ranks,
        device: torch.device,
        replayer: RouterReplayer,
        shard: ShardSpec,
        balancer: ExpertBalancer | None,
    ) -> None:
        self.balancer = balancer
        self.chunks, self.facts, self.ranks, self.device, self.replayer = list(chunks), facts, ranks, device, replayer
        self.shard, self.rotary = shard, rotary(facts.head_dim, facts.rope_theta, facts.rope_scaling)
        self.trace: PassTrace | None = None
        # The schedule would divide by token counts; the loss function has already done that.
        chunks[0].config.finalize_model_grads_func = _finalize

    def forward(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        *,
        temperature: float,
        entropy: bool,
        record: bool,
        plans: PassPlans | None,
    ) -> list[PassOutput]:
        """See :meth:`PolicyModel.forward_logprobs`."""
        recorded: list[list[Tensor]] = [[] for _ in self.chunks]

        def finish(item: ReadyBatch, hidden: Tensor) -> tuple[Tensor, Any]:
            logprobs, spread = self._logprobs(hidden, item, temperature, entropy)
            return logprobs.sum(), (logprobs, spread)

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            results = self._run(batches, routes, plans, finish, recorded if record else None, forward_only=True)
        paths = [torch.cat(parts, dim=1) for parts in zip(*recorded, strict=True)] if record else [None] * len(batches)
        return [PassOutput(logprobs, spread, path) for (logprobs, spread), path in zip(results, paths, strict=True)]

    def train(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        loss_fn: LossFn,
        *,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
        plans: PassPlans | None,
    ) -> list[dict[str, Any]]:
        """See :meth:`PolicyModel.train_microbatches`."""

        def finish(item: ReadyBatch, hidden: Tensor) -> tuple[Tensor, Any]:
            logprobs, spread = self._logprobs(hidden, item, temperature, entropy, entropy_gradient)
            if not item.real:
                return logprobs.sum() * 0.0, {}
            loss, metrics = loss_fn(logprobs, spread, item.batch)
            return loss, {name: _detached(value) for name, value in metrics.items()}

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                # The optimizer leaves .grad pointing into the buffer: the first micro-batch would be counted twice.
                parameter.grad = None
        return self._run(batches, routes, plans, finish, None, forward_only=False)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        plans: PassPlans | None,
        finish: Callable[[ReadyBatch, Tensor], tuple[Tensor, Any]],
        recorded: list[list[Tensor]] | None,
        *,
        forward_only: bool,
    ) -> list[Any]:
        count = self._agree_on_count(len(batches))
        if count == 0:
            return []
        if routes is not None and len(routes) != len(batches):
            raise TrainerError(f"{len(batches)} batches and {len(routes)} routes: give one (or None) a batch")
        if plans is not None and self.balancer is None:
            raise TrainerError("a pass was given plans, but the model was not built with balance")
        items = self._items(batches, routes, plans or (), count)
        step = partial(self._step, finish=finish, recorded=recorded, backward=not forward_only)
        try:
            data = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=list(tee(items, len(self.chunks))) if len(self.chunks) > 1 else items,
                model=self.chunks,
                num_microbatches=count,
                seq_length=1,  # the schedule asks for lengths and then reads the real ones (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=forward_only,
            )
            self.replayer.finish(count, backward=not forward_only)
            if self.balancer is not None:
                self.balancer.finish(count)
        finally:
            self.replayer.clear()
            if self.balancer is not None:
                self.balancer.clear()
            self._release()
        return self._share(data)[: len(batches)]

    def _release(self) -> None:
        """Let go of what Megatron would hold until the next pass, 2 T H bytes each: what tensor ranks gather into, and
        what a pipeline stage was handed, with its gradient."""
        parallel_state.get_global_memory_buffer().buffer.clear()
        for chunk in self.chunks:
            chunk.module.set_input_tensor(None)

    def _agree_on_count(self, mine: int) -> int:
        """The largest number of micro-batches any rank has: expert ranks must all take part in every exchange.

        The interleaved schedule wants whole groups of as many as there are pipeline stages.
        """
        counts = torch.tensor([mine], device=self.device)
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
        group = self.ranks.pipeline_size if len(self.chunks) > 1 else 1
        return -(-int(counts.item()) // group) * group

    def _items(
        self, batches: Sequence[PackedBatch], routes: Sequence[Routes | None] | None, plans: PassPlans, count: int
    ) -> Iterator[ReadyBatch]:
        for index in range(count):
            given = plans[index] if index < len(plans) else None
            if real := index < len(batches):
                yield self._item(index, batches[index], routes[index] if routes else None, given, real=real)
            else:
                yield self._item(index, PackedBatch.from_sequences([[0, 0]]), None, given, real=real)

    def _item(
        self, index: int, batch: PackedBatch, routes: Routes | None, plans: Mapping[int, Plan] | None, *, real: bool
    ) -> ReadyBatch:
        layout = Layout(batch, self.shard)
        experts = present = None
        if routes is not None and self.facts.moe_layer_ids:
            share = self._cut(routes, batch, layout) if isinstance(routes, PackedRoutes) else routes
            if self.trace is not None:
                self.trace.fetched(index, batch, layout, share)
            checked = layout.check(share)
            # torch has no arithmetic on uint16 and no use for it here; int32 holds every expert id.
            experts = torch.tensor(share.experts.astype(np.int32) if share.experts.itemsize > 1 else share.experts)
            there = torch.tensor(share.present)
            self._validate(experts, there, layers=len(self.shard.columns))
            # Padding keeps the experts it came with: they are spread evenly, the router's own choice would not be.
            padding = layout.router_padding
            pinned = there | (padding if there.ndim == 1 else padding[:, None])
            if self.trace is not None:
                self.trace.handed(index, batch, layout, experts, pinned, checked)
            experts, present = experts.to(self.device), None if bool(pinned.all()) else pinned.to(self.device)
        return ReadyBatch(batch.to(self.device), layout, experts, present, real, plans)

    def _cut(self, routes: PackedRoutes, batch: PackedBatch, layout: Layout) -> RouteShard:
        if len(routes.experts) != len(batch):
            raise TrainerError(f"a batch of {len(batch)} tokens has {len(routes.experts)} rows of routes")
        self._validate(routes.experts, routes.present, layers=len(self.facts.moe_layer_ids))
        return layout.cut(routes, self.facts.num_experts)

    def _validate(self, experts: Tensor, present: Tensor, *, layers: int) -> None:
        top_k, num_experts = self.facts.top_k, self.facts.num_experts
        validate_routes(experts, present, moe_layers=layers, top_k=top_k, num_experts=num_experts)

    def _step(
        self,
        items: Iterator[ReadyBatch],
        chunk: Any,
        *,
        finish: Callable[[ReadyBatch, Tensor], tuple[Tensor, Any]],
        recorded: list[list[Tensor]] | None,
        backward: bool,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        """One micro-batch through one chunk of this stage, and what the last stage makes of its output."""
        item, number = next(items), self.chunks.index(chunk)
        layout = item.layout
        packed = PackedAttention.build(layout, self.rotary, self.device)
        balanced = self.balancer.forward(number, item.plans, backward=backward) if self.balancer else nullcontext()
        with self.replayer.forward(number, item.experts, item.present, backward=backward) as used, balanced:
            output = chunk(
                input_ids=layout.take(item.batch.tokens, 0)[None],
                position_ids=layout.positions.to(self.device)[None],
                attention_mask=None,
                packed_seq_params=packed,
            )
        if recorded is not None and item.real:
            recorded[number].append(self._collect(used, layout))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, result = finish(item, hidden)
            return value, torch.ones((), dtype=torch.int, device=self.device), result

        return output, loss

    def _logprobs(
        self, hidden: Tensor, item: ReadyBatch, temperature: float, entropy: bool, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropy) ``[T]`` in the uncut batch's order, the same on every tensor and context rank."""
        layout, batch = item.layout, item.batch
        if self.ranks.tensor_size > 1:
            # Each tensor rank's share of the vocabulary gives a part of the gradient: summed on the way back.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        source = layout.source.to(self.device)
        last = torch.zeros(len(batch), dtype=torch.bool, device=self.device)
        last[batch.cu_seqlens[1:].long() - 1] = True
        rows = ((source >= 0) & ~last[source.clamp(min=0)]).nonzero()[:, 0]
        place = source[rows] + 1  # what is read at a token is said of the next one
        logprobs, spread = token_logprobs(
            hidden[:, 0][rows],
            self.chunks[-1].module.output_weight(),
            batch.tokens[place],
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )
        full = _put(logprobs, place, len(batch), self.ranks)
        return full, None if spread is None else _put(spread, place, len(batch), self.ranks)

    def _collect(self, used: dict[int, Tensor], layout: Layout) -> Tensor:
        """The experts that this chunk's routers used, in the order of their columns; see ``PassOutput.routes``."""
        rows, top_k = len(layout.router_padding), self.facts.top_k
        dtype = torch.uint8 if self.facts.num_experts <= 256 else torch.int32
        routes = torch.zeros(rows, len(used), top_k, dtype=dtype)
        for place, column in enumerate(sorted(used)):  # a chunk's columns need not start at 0
            routes[:, place] = used[column].to("cpu", dtype)
        return routes

    def _share(self, data: list[Any]) -> list[Any]:
        """What the last stage made, on every stage."""
        if self.ranks.pipeline_size == 1:
            return data
        group = parallel_state.get_pipeline_model_parallel_group()
        sandbox = [data if self.ranks.last_stage else None]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast_object_list(sandbox, src=source, group=group)
        return sandbox[0] or []


class _SumOverContext(torch.autograd.Function):
    """Adds up the context ranks' disjoint shares; all compute the same loss, so the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, share: Tensor) -> Tensor:
        total = share.clone()
        torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _put(values: Tensor, place: Tensor, size: int, ranks: Ranks) -> Tensor:
    full = values.new_zeros(size).index_put((place,), values)
    if ranks.context_size == 1:
        return full
    total: Tensor = _SumOverContext.apply(full)
    return total


def _finalize(model: list[Any], _tokens: Any = None, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value
