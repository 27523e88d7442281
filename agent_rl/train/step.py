"""One rank's share of a GRPO global step: old log-probs, the native measurement, the updates. Needs torch.

::

    samples ─ pack ─> old log-probs (r3: the rollout's routes | r2, off: own routes, recorded)
                  ├─> native log-probs, own routes (only to measure; r3 only, the others' old pass is native)
                  └─> mini steps: forward + backward (r3: rollout's | r2: recorded | off: own) ─> optimizer
    all ranks' reports ─> agent_rl.train.metrics (driver)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.train.losses import policy_loss
from agent_rl.train.megatron.batch import LossFn, PackedBatch, PackedRoutes, PassOutput
from agent_rl.train.packing import MicroBatch, pack
from agent_rl.train.reports import MiniStepShare, RankReport, RouteCounts, Update, UpdateSums, count_routes
from agent_rl.train.settings import StepSettings
from agent_rl.types import Sample

Routes = list[PackedRoutes] | None


class Model(Protocol):
    """What a step needs of :class:`agent_rl.train.megatron.model.PolicyModel`."""

    def forward_logprobs(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[PackedRoutes | None] | None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        record: bool = False,
    ) -> list[PassOutput]: ...

    def train_microbatches(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[PackedRoutes | None] | None,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
    ) -> list[dict[str, float | Tensor]]: ...


class Optimizer(Protocol):
    """What a step needs of :class:`agent_rl.train.optimizer.PolicyOptimizer`."""

    def step(self) -> Update: ...


def grpo_step(
    model: Model,
    optimizer: Optimizer,
    samples: Sequence[Sample],
    shares: Sequence[MiniStepShare],
    settings: StepSettings,
) -> RankReport:
    """Run this data rank's share of a global step; every rank calls it with as many mini steps."""
    batches = [pack(samples, ids) for share in shares for ids in share.micro_batches]
    given = _rollout_routes(batches) if settings.replay == "r3" else None
    started = time.perf_counter()
    old = _forward(model, batches, given, settings)
    after_old = time.perf_counter()
    native = _native(model, batches, old, settings) if settings.measure_native else None
    before_update = time.perf_counter()
    replayed = _recorded_routes(old) if settings.replay == "r2" else given
    updates = _updates(model, optimizer, shares, batches, replayed, old, settings)
    return RankReport(
        rollout_logprobs=_sampled(batches, [batch.logprobs_T for batch in batches]),
        trainer_logprobs=_sampled(batches, [output.logprobs for output in old]),
        native_logprobs=None if native is None else _sampled(batches, [o.logprobs for o in native]),
        routes=_counts(batches, old),
        native_routes=None if native is None else _counts(batches, native),
        updates=tuple(updates),
        old_logprob_seconds=after_old - started,
        native_seconds=before_update - after_old,
        update_seconds=time.perf_counter() - before_update,
    )


def sample_logprobs(
    model: Model, samples: Sequence[Sample], micro_batches: Sequence[Sequence[int]], *, replay: bool
) -> dict[int, NDArray[np.float32]]:
    """Log-probs of every token given those before it at temperature 1, by the sample's index; this rank's share."""
    batches = [pack(samples, ids) for ids in micro_batches]
    outputs = model.forward_logprobs([packed(batch) for batch in batches], _rollout_routes(batches) if replay else None)
    return _by_sample(batches, [output.logprobs.float().cpu().numpy() for output in outputs])


def sample_routes(
    model: Model,
    samples: Sequence[Sample],
    micro_batches: Sequence[Sequence[int]],
    *,
    replay: bool,
    temperature: float = 1.0,
) -> dict[int, tuple[NDArray[np.float32], NDArray[np.integer]]]:
    """As :func:`sample_logprobs`, at ``temperature``, with the experts used at every token, ``[tokens, moe_layers,
    top_k]``."""
    batches = [pack(samples, ids) for ids in micro_batches]
    given = _rollout_routes(batches) if replay else None
    inputs = [packed(batch) for batch in batches]
    outputs = model.forward_logprobs(inputs, given, temperature=temperature, record=True)
    logprobs = _by_sample(batches, [output.logprobs.float().cpu().numpy() for output in outputs])
    routes = _by_sample(batches, [_recorded(output).cpu().numpy() for output in outputs])
    return {index: (logprobs[index], routes[index]) for index in logprobs}


def _by_sample(batches: Sequence[MicroBatch], values: Sequence[NDArray]) -> dict[int, NDArray]:
    return {
        index: value[batch.cu_seqlens[at] : batch.cu_seqlens[at + 1]]
        for batch, value in zip(batches, values, strict=True)
        for at, index in enumerate(batch.sample_ids)
    }


def packed(batch: MicroBatch, **extras: Tensor) -> PackedBatch:
    """The tensors of a packed micro-batch; positions restart at 0 for every sequence."""
    lengths = np.diff(batch.cu_seqlens)
    positions_T = np.concatenate([np.arange(length) for length in lengths])
    return PackedBatch(
        tokens=torch.from_numpy(batch.tokens_T),
        position_ids=torch.from_numpy(positions_T),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens),
        extras=extras,
    )


def _forward(model: Model, batches: Sequence[MicroBatch], routes: Routes, settings: StepSettings) -> list[PassOutput]:
    return model.forward_logprobs(
        [packed(batch) for batch in batches], routes, temperature=settings.temperature, record=True
    )


def _native(
    model: Model, batches: Sequence[MicroBatch], old: list[PassOutput], settings: StepSettings
) -> list[PassOutput]:
    """The pass without the rollout's routes; under r2 and off the old log-probs came from just that."""
    return _forward(model, batches, None, settings) if settings.replay == "r3" else old


def _rollout_routes(batches: Sequence[MicroBatch]) -> list[PackedRoutes]:
    return [_routes_of(batch) for batch in batches]


def _routes_of(batch: MicroBatch) -> PackedRoutes:
    if batch.experts_TLK is None or batch.present_T is None:
        raise TrainerError("train.replay is r3 and the samples have no routes: set it to r2 or off, or capture routes")
    # torch has no arithmetic on uint16 and no use for it here; int16 and int32 hold every expert id.
    dtype = np.uint8 if batch.experts_TLK.dtype == np.uint8 else np.int32
    return PackedRoutes(
        experts=torch.from_numpy(batch.experts_TLK.astype(dtype, copy=False)),
        present=torch.from_numpy(batch.present_T),
    )


def _recorded_routes(outputs: Sequence[PassOutput]) -> list[PackedRoutes]:
    return [
        PackedRoutes(experts=_recorded(output), present=torch.ones(len(output.logprobs), dtype=torch.bool))
        for output in outputs
    ]


def _recorded(output: PassOutput) -> Tensor:
    if output.routes is None:
        raise TrainerError("a recording pass gave no routes")
    return output.routes


def _updates(
    model: Model,
    optimizer: Optimizer,
    shares: Sequence[MiniStepShare],
    batches: Sequence[MicroBatch],
    routes: Routes,
    old: Sequence[PassOutput],
    settings: StepSettings,
) -> list[UpdateSums]:
    updates, first = [], 0
    for share in shares:
        part = slice(first, first + len(share.micro_batches))
        first = part.stop
        inputs = [_training_input(batch, output) for batch, output in zip(batches[part], old[part], strict=True)]
        parts = model.train_microbatches(
            inputs, routes[part] if routes is not None else None, grpo_loss(settings, share.sampled_tokens),
            temperature=settings.temperature,
        )  # fmt: skip
        sums = {name: sum(float(values[name]) for values in parts) for name in ("loss", "clipped", "entropy", "kl")}
        _check_finite(sums)
        updates.append(UpdateSums(tokens=share.sampled_tokens, update=optimizer.step(), **sums))
    return updates


def _check_finite(sums: Mapping[str, float]) -> None:
    if not np.isfinite(sums["loss"]):
        raise TrainerError(f"the loss is {sums['loss']}: no update was made")


def _training_input(batch: MicroBatch, old: PassOutput) -> PackedBatch:
    return packed(
        batch,
        mask=torch.from_numpy(batch.mask_T),
        advantages=torch.from_numpy(batch.advantages_T),
        weights=torch.from_numpy(batch.weights_T),
        old_logprobs=old.logprobs.detach(),
    )


def grpo_loss(settings: StepSettings, batch_tokens: int) -> LossFn:
    """The loss function of one mini step, normalised by its sampled tokens over all ranks."""

    def loss_fn(
        logprobs_T: Tensor, entropy_T: Tensor | None, batch: PackedBatch
    ) -> tuple[Tensor, dict[str, float | Tensor]]:
        result = policy_loss(
            logprobs_T,
            batch.extras["old_logprobs"],
            batch.extras["advantages"],
            batch.extras["mask"],
            entropy_T=torch.zeros_like(logprobs_T) if entropy_T is None else entropy_T,
            weights_T=batch.extras["weights"],
            eps_low=settings.eps_low,
            eps_high=settings.eps_high,
            batch_tokens=max(1, batch_tokens),
        )
        sums = {"clipped": result.clipped, "entropy": result.entropy, "kl": result.approx_kl}
        return result.loss, {"loss": result.loss.detach(), **sums}

    return loss_fn


def _sampled(batches: Sequence[MicroBatch], values: Sequence[Tensor | NDArray[np.float32]]) -> NDArray[np.float32]:
    """The values at sampled tokens of all micro-batches, one after another."""
    parts = [
        (value.float().cpu().numpy() if isinstance(value, Tensor) else value)[batch.mask_T]
        for batch, value in zip(batches, values, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _counts(batches: Sequence[MicroBatch], outputs: Sequence[PassOutput]) -> RouteCounts | None:
    """Recorded routes against the rollout's; None where the rollout has none."""
    total: RouteCounts | None = None
    for batch, output in zip(batches, outputs, strict=True):
        if batch.experts_TLK is None or batch.present_T is None:
            continue
        recorded = _recorded(output).cpu().numpy()
        counts = count_routes(batch.experts_TLK, batch.present_T, recorded, batch.cu_seqlens)
        total = counts if total is None else total + counts
    return total
