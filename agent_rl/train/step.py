"""One rank's share of a GRPO global step: old log-probs, the native measurement, the updates. Needs torch.

::

    samples ─ pack ─> old log-probs (r3: the rollout's routes | r2, off: own routes, recorded)
                  │   (train.balance: experts placed for each micro-batch by the routes that a pass replays)
                  ├─> native log-probs, own routes (only to measure; r3 only, the others' old pass is unreplayed)
                  ├─> the reference's log-probs, the update's routes (only for a KL penalty)
                  └─> mini steps: forward + backward (r3: rollout's | r2: recorded | off: own) ─> optimizer
    Routes are this rank's share all the way, given and recorded ones alike; they are never gathered.
    all ranks' reports ─> agent_rl.train.step_metrics (driver)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.config import CorrectionConfig, OldLogprobSource, OnSpike, RunConfig, TrainConfig
from agent_rl.errors import TrainerError
from agent_rl.train.batching.mini_steps import MiniStepShare
from agent_rl.train.batching.packing import MicroBatch, pack
from agent_rl.train.expert_balancing.report import BalancedPass
from agent_rl.train.expert_balancing.worker import ComingPlans, Foreseen, RankBalance
from agent_rl.train.loss.corrections import correction_factors, weight_moments
from agent_rl.train.loss.policy_loss import Counts, PolicyLoss, policy_loss
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch, PassOutput, PassPlans, Routes
from agent_rl.train.reference import Compared, Reference, compare_with_reference
from agent_rl.train.reports import (
    Differing,
    RankReport,
    ReferenceReport,
    SampledTokens,
    Update,
    UpdateSums,
    differing,
)
from agent_rl.train.requests import StepRequest
from agent_rl.train.route_ablation import ablated
from agent_rl.train.route_trace import PassTrace, traced_pass
from agent_rl.types import Sample, TokenFlag
from r3.shard import Packing, RouteShard, ShardSpec, own_routes
from r3.trace.recorders import RankTracer

Shards = Sequence[RouteShard] | None
SUMS = ("loss", "clipped", "entropy", "kl", "correction", "dropped", "kl_reference")
"""What the loss function adds up over micro-batches: the fields of :class:`UpdateSums`."""


class StepModel(Protocol):
    """What a step needs of :class:`agent_rl.train.megatron.model.PolicyModel`."""

    @property
    def shard(self) -> ShardSpec: ...

    def observe(self, trace: PassTrace | None) -> None: ...

    def forward_logprobs(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        record: bool = False,
        plans: PassPlans | None = None,
    ) -> list[PassOutput]: ...

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
    ) -> list[dict[str, float | Tensor]]: ...

    def sum_over_data(self, values: Tensor) -> Tensor: ...


class StepOptimizer(Protocol):
    """What a step needs of :class:`agent_rl.train.optimizer.PolicyOptimizer`."""

    def step(self, *, finite_loss: bool, spike_norm: float | None, on_spike: OnSpike) -> Update: ...


def grpo_step(
    model: StepModel,
    optimizer: StepOptimizer,
    samples: Mapping[int, Sample],
    shares: Sequence[MiniStepShare],
    rollout: Sequence[RouteShard],
    order: StepRequest,
    tracer: RankTracer | None = None,
    reference: Reference | None = None,
    balance: RankBalance | None = None,
) -> tuple[RankReport, Differing | None]:
    """Run this rank's share of a global step; every rank calls it with as many mini steps.

    ``rollout``: this rank's share of every micro-batch's routes, in order, or none at all. ``tracer`` notes what
    becomes of them, where the step is traced. ``reference``: what a KL penalty compares with. ``balance`` makes the
    plans by which ranks borrow experts, in passes whose routes are known. Log-probs before the update, the reference's
    and advantages are all made before the first mini step, and are the same for all of them.
    """
    batches = step_batches(samples, shares)
    config = order.config
    replay, temperature = config.train.replay, config.rollout.logprob_temperature
    before, given = ablated(config.r3.ablation, rollout, batches) if replay == "r3" and rollout else (None, None)
    record = bool(rollout) or replay == "r2"
    started = time.perf_counter()
    foreseen = balance.foresee(batches, given or ()) if balance is not None and replay == "r3" else None
    with traced_pass(model, tracer, "prev-logprob", 0), _planned(balance, "recompute", foreseen) as plans:
        old = _forward(model, batches, before, temperature, record=record, plans=plans)
    recorded = [_recorded(output) for output in old] if record else []
    after_old = time.perf_counter()
    unreplayed = None
    if order.measure_without_replay:  # under r2 and off the old log-probs came from just this pass
        unreplayed = _forward(model, batches, None, temperature, record=True) if replay == "r3" else old
    before_update = time.perf_counter()
    differs = _differing(model, rollout, recorded, unreplayed)
    pinned = _as_shards(model, batches, recorded) if replay == "r2" else given
    if balance is not None and replay == "r2":
        foreseen = balance.foresee(batches, pinned or ())
    logprobs = [output.logprobs for output in old]
    unreplayed_logprobs = None if unreplayed is None else [output.logprobs for output in unreplayed]
    del old, unreplayed, recorded  # a step's routes are its largest part: none are kept that no pass replays
    inputs = _training_inputs(model, batches, logprobs, config.train)
    compared = _compare(model, reference, inputs, pinned, logprobs, config)
    if compared is not None:
        inputs = [
            replace(item, extras={**item.extras, **own}) for item, own in zip(inputs, compared.extras, strict=True)
        ]
    after_reference = time.perf_counter()
    updates, tokens = _updates(model, optimizer, shares, inputs, pinned, order, tracer, balance, foreseen)
    report = RankReport(
        rollout_logprobs=_sampled(batches, [batch.logprobs_T for batch in batches]),
        trainer_logprobs=_sampled(batches, logprobs),
        logprobs_without_replay=None if unreplayed_logprobs is None else _sampled(batches, unreplayed_logprobs),
        lag=np.concatenate([np.zeros(0, np.int32), *(batch.lag_T[batch.mask_T] for batch in batches)]),
        updates=tuple(updates),
        old_logprob_seconds=after_old - started,
        seconds_without_replay=before_update - after_old,
        update_seconds=time.perf_counter() - after_reference,
        reference=None if compared is None else ReferenceReport(compared.taken, compared.seconds),
        sampled=_sampled_tokens(inputs, tokens) if order.detail else None,
    )
    return report, differs


def step_batches(samples: Mapping[int, Sample], shares: Sequence[MiniStepShare]) -> list[MicroBatch]:
    """The micro-batches of this rank's share of a global step, mini step after mini step."""
    return [pack(samples, ids) for share in shares for ids in share.micro_batches]


def sample_logprobs(
    model: StepModel,
    samples: Mapping[int, Sample],
    micro_batches: Sequence[Sequence[int]],
    routes: Sequence[RouteShard],
    *,
    temperature: float,
    record: bool,
) -> tuple[dict[int, NDArray[np.float32]], list[NDArray[np.integer]]]:
    """Log-probs of every token given those before it, by the sample's index; this data rank's.

    ``routes``: this rank's shares to replay, one a micro-batch, or none. With ``record`` also the experts that this
    rank's routers used, ``[R, C, K]`` a micro-batch.
    """
    batches = [pack(samples, ids) for ids in micro_batches]
    inputs = [packed(batch) for batch in batches]
    outputs = model.forward_logprobs(inputs, routes or None, temperature=temperature, record=record)
    logprobs = {
        index: output.logprobs[batch.cu_seqlens[at] : batch.cu_seqlens[at + 1]].float().cpu().numpy()
        for batch, output in zip(batches, outputs, strict=True)
        for at, index in enumerate(batch.sample_ids)
    }
    return logprobs, [_recorded(output) for output in outputs] if record else []


def packed(batch: MicroBatch, **extras: Tensor) -> PackedBatch:
    """The tensors of a packed micro-batch; positions restart at 0 for every sequence."""
    lengths = np.diff(batch.cu_seqlens)
    positions_T = np.concatenate([np.arange(length) for length in lengths])
    return PackedBatch(
        tokens=torch.from_numpy(batch.tokens_T),
        position_ids=torch.from_numpy(positions_T),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens),
        sample_ids=batch.sample_ids,
        extras=extras,
    )


def _planned(
    balance: RankBalance | None, kind: BalancedPass, foreseen: Foreseen | None
) -> AbstractContextManager[ComingPlans | None]:
    """Around a pass: its plans, or None where experts stay at home."""
    return nullcontext() if balance is None or foreseen is None else balance.planned(kind, foreseen)


def _forward(
    model: StepModel,
    batches: Sequence[MicroBatch],
    routes: Shards,
    temperature: float,
    *,
    record: bool,
    plans: PassPlans | None = None,
) -> list[PassOutput]:
    inputs = [packed(batch) for batch in batches]
    return model.forward_logprobs(inputs, routes, temperature=temperature, record=record, plans=plans)


def _recorded(output: PassOutput) -> NDArray[np.integer]:
    if output.routes is None:
        raise TrainerError("a recording pass gave no routes")
    return output.routes.numpy()


def _as_shards(
    model: StepModel, batches: Sequence[MicroBatch], recorded: Sequence[NDArray[np.integer]]
) -> list[RouteShard]:
    """The experts of a pass as routes to replay."""
    spec = model.shard
    packings = [Packing(tuple(np.diff(batch.cu_seqlens).tolist()), spec.multiple) for batch in batches]
    return [
        own_routes(used, batch.sample_ids, batch.tokens_T, packing, spec)
        for used, batch, packing in zip(recorded, batches, packings, strict=True)
    ]


def _differing(
    model: StepModel,
    rollout: Sequence[RouteShard],
    recorded: Sequence[NDArray[np.integer]],
    unreplayed: Sequence[PassOutput] | None,
) -> Differing | None:
    """Recorded routes against the rollout's; None where the rollout has none."""
    if not rollout:
        return None
    replayed = [differing(shard, used) for shard, used in zip(rollout, recorded, strict=True)]
    unpinned = None
    if unreplayed is not None:
        unpinned = [differing(shard, _recorded(used)) for shard, used in zip(rollout, unreplayed, strict=True)]
    return Differing.of(len(model.shard.columns), replayed, unpinned)


def _compare(
    model: StepModel,
    reference: Reference | None,
    inputs: Sequence[PackedBatch],
    routes: Shards,
    old_logprobs: Sequence[Tensor],
    config: RunConfig,
) -> Compared | None:
    """What a KL penalty needs of the reference; None without a penalty."""
    if not config.train.kl.coefficient:
        return None
    if reference is None:
        raise TrainerError("the loss has a KL penalty and this rank was started without a reference model")
    temperature = config.rollout.logprob_temperature
    return compare_with_reference(model, reference, inputs, routes, old_logprobs, config.train, temperature)


def _updates(
    model: StepModel,
    optimizer: StepOptimizer,
    shares: Sequence[MiniStepShare],
    inputs: Sequence[PackedBatch],
    routes: Shards,
    order: StepRequest,
    tracer: RankTracer | None,
    balance: RankBalance | None,
    foreseen: Foreseen | None,
) -> tuple[list[UpdateSums], list[Mapping[str, float | Tensor]]]:
    """The updates, and what the loss function gave of every micro-batch, epoch after epoch."""
    config, updates, given = order.config, list[UpdateSums](), list[Mapping[str, float | Tensor]]()
    ends = np.cumsum([len(share.micro_batches) for share in shares]).tolist()
    for epoch, (share, end) in itertools.product(range(config.train.epochs), zip(shares, ends, strict=True)):
        part = slice(end - len(share.micro_batches), end)
        own = None if foreseen is None else foreseen.part(part)
        traced = traced_pass(model, tracer if epoch == 0 else None, "train", part.start)
        with traced, _planned(balance, "update", own) as plans:
            parts = model.train_microbatches(
                inputs[part], routes[part] if routes is not None else None,
                grpo_loss(config, share, detail=order.detail),
                temperature=config.rollout.logprob_temperature,
                entropy_gradient=config.train.entropy_coefficient != 0, plans=plans,
            )  # fmt: skip
        sums = {name: sum(float(values[name]) for values in parts) for name in SUMS}
        finite = math.isfinite(sums["loss"])
        update = optimizer.step(finite_loss=finite, spike_norm=order.spike_norm, on_spike=config.guard.on_spike)
        if balance is not None and update.taken:
            balance.weights_changed()
        updates.append(UpdateSums(tokens=share.sampled_tokens, update=update, **sums))
        given += parts
    return updates, given


def _sampled_tokens(inputs: Sequence[PackedBatch], given: Sequence[Mapping[str, float | Tensor]]) -> SampledTokens:
    """Entropy and flags of the sampled tokens of all micro-batches; ``given`` has all of them once an epoch."""
    epochs = range(0, len(given), max(1, len(inputs)))
    entropy = [_tensor(values["entropy_T"]) for values in given[: len(inputs)]]
    flags = [
        _flags(item.extras, torch.stack([_tensor(given[epoch + at]["clipped_T"]) for epoch in epochs]).any(0))
        for at, item in enumerate(inputs)
    ]
    if not inputs:
        return SampledTokens(np.zeros(0, np.float16), np.zeros(0, np.uint8))
    return SampledTokens(torch.cat(entropy).cpu().numpy(), torch.cat(flags).cpu().numpy())


def _flags(extras: Mapping[str, Tensor], clipped: Tensor) -> Tensor:
    """uint8 ``[n]`` of a micro-batch's sampled tokens; ``clipped`` bool ``[n]``."""
    mask_T = extras["mask"].to(clipped.device)
    factors = extras["factors"].to(clipped.device)[mask_T]
    masked = factors == 0
    bits = {TokenFlag.CLIPPED: clipped, TokenFlag.REWEIGHTED: (factors != 1) & ~masked, TokenFlag.MASKED: masked}
    return torch.stack([found.to(torch.uint8) * int(flag) for flag, found in bits.items()]).sum(0, dtype=torch.uint8)


def _tensor(value: float | Tensor) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _training_input(batch: MicroBatch, old_logprobs: Tensor, source: OldLogprobSource) -> PackedBatch:
    rollout, trainer = torch.from_numpy(batch.logprobs_T).to(old_logprobs), old_logprobs.detach()
    old = _old_logprobs(batch, trainer, rollout, source)
    lengths = torch.from_numpy(np.diff(batch.cu_seqlens)).long()
    return packed(
        batch,
        mask=torch.from_numpy(batch.mask_T).to(trainer.device),
        advantages=torch.from_numpy(batch.advantages_T),
        weights=torch.from_numpy(batch.weights_T),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(trainer.device),
        old_logprobs=old,
        log_ratio=trainer - rollout,
        log_weight=old - rollout,
    )


def _training_inputs(
    model: StepModel, batches: Sequence[MicroBatch], old_logprobs: Sequence[Tensor], train: TrainConfig
) -> list[PackedBatch]:
    """What the loss function is given of each micro-batch, with the correction's factors ``[T]`` as a further extra.
    ``old_logprobs`` are the trainer's own. Collective where weights are normalized."""
    pairs = zip(batches, old_logprobs, strict=True)
    inputs = [_training_input(batch, before, train.old_logprob.source) for batch, before in pairs]
    mean = _mean_weight(model, inputs, train.correction) if train.correction.normalize else 1.0
    return [
        replace(item, extras={**item.extras, "factors": _factors(item.extras, train.correction, mean)})
        for item in inputs
    ]


def _mean_weight(model: StepModel, inputs: Sequence[PackedBatch], correction: CorrectionConfig) -> float:
    """Over the step's sampled tokens, also those of the other data ranks."""
    own = [weight_moments(correction, *(item.extras[name] for name in _WEIGHED)) for item in inputs]
    count, total = model.sum_over_data(torch.stack(own).sum(0) if own else torch.zeros(2, dtype=torch.float64)).tolist()
    return float(total / count) if count else 1.0


_WEIGHED = ("log_weight", "mask", "sequence")


def _factors(extras: Mapping[str, Tensor], correction: CorrectionConfig, mean: float) -> Tensor:
    log_weight_T, mask_T, sequence_T = (extras[name] for name in _WEIGHED)
    return correction_factors(
        correction, extras["log_ratio"], mask_T, sequence_T, log_weight_T=log_weight_T, mean=mean
    )  # fmt: skip


def _old_logprobs(batch: MicroBatch, trainer: Tensor, rollout: Tensor, source: OldLogprobSource) -> Tensor:
    """What the ratio is taken against."""
    if source == "recompute":
        return trainer
    if source == "rollout":
        return rollout
    if batch.old_logprobs_T is None:
        raise TrainerError(
            f"train.old_logprob.source is rescore and the engine did not evaluate sample {batch.sample_ids[0]} again"
        )
    return torch.from_numpy(batch.old_logprobs_T).to(trainer)


def grpo_loss(config: RunConfig, share: MiniStepShare, *, detail: bool = False) -> LossFn:
    """The loss function of one mini step, normalized by its tokens or sequences over all ranks. Dr.GRPO's constant
    length is the most a trajectory may hold. With ``detail`` it also gives the sampled tokens' entropy and which of
    them were clipped."""
    counts = Counts(share.sampled_tokens, share.sequences)

    def loss_fn(
        logprobs_T: Tensor, entropy_T: Tensor | None, batch: PackedBatch
    ) -> tuple[Tensor, dict[str, float | Tensor]]:
        result = policy_loss(
            logprobs_T,
            batch.extras["old_logprobs"],
            batch.extras["factors"],
            batch.extras["advantages"],
            batch.extras["mask"],
            batch.extras["sequence"],
            entropy_T=torch.zeros_like(logprobs_T) if entropy_T is None else entropy_T,
            weights_T=batch.extras["weights"],
            train=config.train,
            length=config.rollout.max_tokens,
            counts=counts,
            reference_T=batch.extras.get("reference"),
        )
        given = dict[str, float | Tensor](zip(SUMS, (result.loss.detach(), *_reported(result)), strict=True))
        if detail:
            mask_T = batch.extras["mask"]
            entropy = torch.zeros_like(logprobs_T) if entropy_T is None else entropy_T.detach()
            given |= {"entropy_T": entropy[mask_T].half(), "clipped_T": result.clipped_T[mask_T]}
        return result.loss, given

    return loss_fn


def _reported(result: PolicyLoss) -> tuple[Tensor, ...]:
    return result.clipped, result.entropy, result.approx_kl, result.correction, result.dropped, result.kl_reference


def _sampled(batches: Sequence[MicroBatch], values: Sequence[Tensor | NDArray[np.float32]]) -> NDArray[np.float32]:
    """The values at sampled tokens of all micro-batches, one after another."""
    parts = [
        (value.float().cpu().numpy() if isinstance(value, Tensor) else value)[batch.mask_T]
        for batch, value in zip(batches, values, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
