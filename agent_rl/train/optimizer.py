"""Megatron's optimizer and learning-rate schedule behind one class. Import only in rank processes.

The state is Adam's two moments and a float32 master of every weight. It is on the device, or between updates on the
host (:mod:`agent_rl.train.optimizer_offload`, also for moments in bfloat16). With Megatron's distributed optimizer
(``train.parallel.distributed_optimizer``; ZeRO-1, arXiv 1910.02054) the ranks with a copy of a parameter share its
state: each keeps and updates a flat range of the weight. :meth:`PolicyOptimizer.shards` says which, with and without
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from agent_rl.config import OnSpike
from agent_rl.train.host_memory import host_tensor
from agent_rl.train.optimizer_offload import (
    MasterShard,
    StoredState,
    add_counts,
    counts_by_parameter,
    without_gradient_buffers,
)
from agent_rl.train.reports import Update
from agent_rl.train.requests import OptimizerSpec

EMA = "ema"
"""The average's name among the tensors of a parameter's state."""


_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, eq=False)
class StateShard:
    """This rank's state of one parameter: elements ``[start, stop)`` of its flattened weight.

    ``name``: ``<chunk>.<name of the parameter in that model chunk>``. ``shape``: of the weight on this rank. ``slots``:
    the optimizer's tensors, flat ``[stop - start]``, where they are stored; float32, or bfloat16 for moments kept so:
    ``master`` (the weight itself in float32 training, its float32 copy in bfloat16), ``exp_avg``, ``exp_avg_sq``, and
    ``ema`` where the weights are averaged.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    slots: Mapping[str, Tensor]

    @property
    def stop(self) -> int:
        return self.start + self.slots["master"].numel()


class PolicyOptimizer:
    """AdamW over Megatron's model chunks, with warm-up and a constant, linear or cosine schedule."""

    def __init__(self, chunks: Sequence[torch.nn.Module], spec: OptimizerSpec, dtype: torch.dtype) -> None:
        self._chunks: list[Any] = list(chunks)
        self.distributed: bool = self._chunks[0].ddp_config.use_distributed_optimizer
        self._grad_clip = spec.grad_clip
        with without_gradient_buffers(self._chunks) if spec.offload else nullcontext():
            self._optimizer = get_megatron_optimizer(_megatron_config(spec, dtype, self.distributed), self._chunks)
            self._stored_states = list(self._store_states(spec))
        for group in (group for part in self._parts() for group in part.optimizer.param_groups):
            if group.get("foreach", False) is None:  # torch's own Adam
                # foreach allocates temporaries as large as all masters: 12 GiB for Qwen3-30B-A3B on 8 GPUs.
                group["foreach"] = False
        self._scheduler = _scheduler(self._optimizer, spec)
        self._average = None if spec.ema is None else WeightAverage(self._master_values(), spec.ema)

    @torch.no_grad()
    def step(
        self,
        *,
        finite_loss: bool = True,
        spike_norm: float | None = None,
        on_spike: OnSpike = "allow",
        held: bool = False,
    ) -> Update:
        """Apply the gradients in the model's buffers. Collective.

        Every rank skips the update (weights, optimizer and schedule stay) if any rank's loss (``finite_loss``) or the
        gradient norm is not finite. An update whose norm exceeds ``spike_norm`` (None: no limit) is a spike: ``skip``
        skips it, ``clip`` scales it to ``spike_norm``, ``allow`` applies it. A ``held`` update is not applied.
        """
        overflow = self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        finite = finite_loss and not overflow and math.isfinite(grad_norm)
        finite, highest = _agree_on_norm(finite, grad_norm)
        spike = finite and spike_norm is not None and highest > spike_norm
        taken = finite and not held and not (spike and on_spike == "skip")
        if taken:
            # Before the update, so that the first one of a warm-up has lr / warmup_steps and not 0.
            self._scheduler.step(1)
            limit = self._grad_clip
            if spike and spike_norm is not None and on_spike == "clip":
                limit = min(limit, spike_norm)
            self._clip(limit, grad_norm)
            self._apply()
            if self._average is not None:
                self._average.update(self._master_values())
        # The step leaves each parameter's grad aliased to Megatron's gradient buffer, and the next backward pass would
        # add its first micro-batch twice.
        self._optimizer.zero_grad()
        return Update(grad_norm, float(self._scheduler.get_lr({})), finite=finite, spike=spike, taken=taken, held=held)

    def _apply(self) -> None:
        if not self._stored_states:
            self._optimizer.step_with_ready_grads()
            return
        updates = self._updates()
        for state in self._stored_states:
            state.step(updates)
        self._gather_weights()

    def _clip(self, limit: float, grad_norm: float) -> None:
        for part in self._optimizer.chained_optimizers:
            if not getattr(part, "is_stub_optimizer", False) and (parameters := part.get_parameters()):
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, limit, grad_norm, decoupled)

    def _store_states(self, spec: OptimizerSpec) -> Iterator[StoredState]:
        """The stored states of Megatron's optimizers, for offloading or moments in bfloat16."""
        if spec.offload or spec.moments != "float32":
            precision = getattr(torch, spec.moments)
            for part in self._parts():
                masters = list(_masters(part))
                yield StoredState(part.optimizer, masters, _MOMENTS, offload=spec.offload, precision=precision)

    @property
    def counts(self) -> dict[str, int]:
        """Counts in the state: ``updates`` of Adam (for its bias correction) and ``schedule`` steps."""
        return {"updates": self._updates(), "schedule": int(self._scheduler.num_steps)}

    def shards(self) -> Iterator[StateShard]:
        """This rank's state, live: the next update uses what is copied into a slot. Not collective.

        Moments are zeros before the first update. In bfloat16 a changed master does not change the model's weights: use
        :meth:`load`.
        """
        names = {id(parameter): name for name, parameter in named_parameters([chunk.module for chunk in self._chunks])}
        for index, (shard, slots) in enumerate(self._entries()):
            averaged = {} if self._average is None else {EMA: self._average.values[index]}
            yield StateShard(
                names[id(shard.parameter)], tuple(shard.parameter.shape), shard.start, {**slots, **averaged}
            )

    def _master_values(self) -> list[Tensor]:
        return [slots["master"] for _, slots in self._entries()]

    def _entries(self) -> Iterator[tuple[MasterShard, Mapping[str, Tensor]]]:
        """Each parameter's state, flat, where it is stored."""
        for state in self._stored_states:
            yield from zip(state.masters, state.slots, strict=True)
        for optimizer in () if self._stored_states else self._parts():
            _allocate(optimizer)
            for shard in _masters(optimizer):
                moments = optimizer.optimizer.state[shard.master]
                slots = {"master": shard.master, **{slot: moments[slot] for slot in _MOMENTS}}
                yield shard, {slot: tensor.detach().view(-1) for slot, tensor in slots.items()}

    def load(self, read: Callable[[StateShard], Mapping[str, Tensor]], counts: Mapping[str, int]) -> None:
        """Load the state that ``read`` returns for each of :meth:`shards`, by slot, and ``counts``; update the model's
        weights. The spec stays. Collective with the distributed optimizer."""
        for shard in self.shards():
            saved = read(shard)
            for slot, tensor in shard.slots.items():
                tensor.copy_(saved[slot])
        self._set_counts(counts)
        self._spread_masters()

    def _parts(self) -> list[Any]:
        """Megatron's optimizers with parameters: one for dense parameters, one for experts."""
        return [part for part in self._optimizer.chained_optimizers if part.optimizer is not None]

    def _updates(self) -> int:
        return max((updates_made(part.optimizer) for part in self._parts()), default=0)

    def _set_counts(self, counts: Mapping[str, int]) -> None:
        for optimizer in self._parts():
            inner = optimizer.optimizer
            if counts_by_parameter(inner):
                for state in inner.state.values():
                    state["step"].fill_(counts["updates"])
            else:
                for group in inner.param_groups:
                    group["step"] = counts["updates"]
        self._scheduler.num_steps = 0
        self._scheduler.step(counts["schedule"])

    def _spread_masters(self) -> None:
        """Copy the masters to the model's weights, on every rank with a copy."""
        for state in self._stored_states:
            state.spread()
        for optimizer in () if self._stored_states else self._parts():
            if not isinstance(optimizer, FP32Optimizer):
                optimizer._copy_main_params_to_model_params()
        self._gather_weights()

    def _gather_weights(self) -> None:
        if self.distributed:
            for chunk in self._chunks:
                chunk.start_param_sync()


def named_parameters(modules: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of model chunks (without DDP) by the optimizer's names, ``<chunk>.<name in the chunk>``."""
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            yield f"{index}.{name}", parameter


def updates_made(adam: Any) -> int:
    """The number of updates that a torch, Transformer Engine or Apex optimizer has made.

    The latter two count in a group's ``step``, which is missing before the first update.
    """
    counts = [group["step"] for group in adam.param_groups if "step" in group]
    counts += [state["step"] for state in adam.state.values() if "step" in state]
    return int(max(counts, default=0))


def _allocate(optimizer: Any) -> None:
    """Allocate Adam's moments as zeros, as its first step would."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    add_counts(optimizer.optimizer)  # Megatron's function omits the counts


def _masters(optimizer: Any) -> Iterator[MasterShard]:
    """The masters of this optimizer on this rank."""
    if isinstance(optimizer, FP32Optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield MasterShard(parameter, 0, parameter)
        return
    if isinstance(optimizer, DistributedOptimizer):
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    else:
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    for models, masters in pairs:
        for parameters, copies in zip(models, masters, strict=True):
            for parameter, master in zip(parameters, copies, strict=True):
                start = 0
                if isinstance(optimizer, DistributedOptimizer):
                    start = optimizer._get_model_param_range_map(parameter)["param"].start
                yield MasterShard(parameter, start, master)


def _agree_on_norm(finite: bool, grad_norm: float) -> tuple[bool, float]:
    """Whether all ranks are ``finite``, and their largest norm, so that all ranks decide alike. Collective."""
    device = torch.cuda.current_device()  # the CPU with the shim of init_parallel
    votes = torch.tensor([0.0 if finite else 1.0, grad_norm if finite else 0.0], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
    bad, highest = votes.tolist()
    return bad == 0.0, highest


def _megatron_config(spec: OptimizerSpec, dtype: torch.dtype, distributed: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.lr * spec.min_lr_ratio,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        clip_grad=spec.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )


def _scheduler(optimizer: Any, spec: OptimizerSpec) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if spec.warmup_steps else spec.lr,
        max_lr=spec.lr,
        min_lr=spec.lr * spec.min_lr_ratio,
        lr_warmup_steps=spec.warmup_steps,
        lr_decay_steps=max(spec.total_steps, spec.warmup_steps + 1),
        lr_decay_style=spec.schedule,
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


class WeightAverage:
    """The exponential moving average of the trained weights (``train.ema``), for evaluation and export.

    After each update, with the float32 master w of every weight that the rank holds::

        average <- decay * average + (1 - decay) * w          the first average is the starting weights

    ``values``: the averages of ``masters``, flat, float32, in their order. They are in host memory, cut as the
    optimizer's state is, so no rank sends anything for them.
    """

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        self._decay, sizes = decay, [master.numel() for master in masters]
        block = host_tensor(sum(sizes), torch.float32, pinned=any(master.is_cuda for master in masters))
        self.values = block.split(sizes)
        for value, master in zip(self.values, masters, strict=True):
            value.copy_(master.view(-1))

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor]) -> None:
        """Take the ``masters`` of an update into the average."""
        for value, master in zip(self.values, masters, strict=True):
            value.lerp_(master.view(-1).to("cpu"), 1.0 - self._decay)
