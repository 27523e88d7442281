"""One rank's share of a GRPO step: old log-probs, the pass without replay, the optimizer updates. Needs torch.

::

    samples ─ pack ─> old log-probs (r3: replays the rollout's routes | r2, off: routes itself; r2 records); left out
                  │   where the old log-probs are the engine's and nothing else needs the pass
                  │   (train.balance: each pass with known routes has plans that place experts)
                  ├─> log-probs without replay (only when measured; under r2 and off the old log-probs are these)
                  ├─> advantages by GAE over the values of the first pass (only with train.baseline critic)
                  ├─> reference log-probs along the update's routes (only with a KL penalty)
                  └─> mini steps: forward + backward (r3: rollout's routes | r2: recorded | off: none) ─> optimizer
    Each rank holds and replays its own shard of the routes. Routes are never gathered.
    reports of all ranks ─> agent_rl.train.step_metrics (driver)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.config import CorrectionConfig, DistillConfig, OldLogprobSource, RunConfig, TrainConfig
from agent_rl.config.objectives import objective_spec
from agent_rl.errors import TrainerError
from agent_rl.train.batching.packing import MicroBatch, pack
from agent_rl.train.batching.partition import MiniStepShare
from agent_rl.train.expert_balancing.worker import PassBalancer
from agent_rl.train.loss.corrections import correction_factors, weight_moments
from agent_rl.train.loss.objectives import covariance_moments, distilled_advantages, highest, selection_scores
from agent_rl.train.loss.policy_loss import LossCounts, PolicyLoss, policy_loss
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch, PassOutput, PassPlans
from agent_rl.train.reference import Reference, ReferenceComparison, compare_with_reference, normalized_over_step
from agent_rl.train.reports import (
    RankReport,
    ReferenceReport,
    RouteDifferences,
    SampledTokens,
    UpdateSums,
    route_differences,
)
from agent_rl.train.requests import StepRequest
from agent_rl.train.route_ablation import ablated_routes
from agent_rl.train.route_trace import traced_pass
from agent_rl.types import Sample, TokenFlag
from r3.shard import Packing, RouteShard, own_routes
from r3.trace.recorders import RankTracer

if TYPE_CHECKING:
    from agent_rl.train.critic import Critic
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.optimizer import PolicyOptimizer

Shards = Sequence[RouteShard] | None
_AUXILIARY = ("distill", "observation", "router_shift")
SUMS = ("loss", "clipped", "entropy", "kl", "correction", "dropped", "kl_reference", *_AUXILIARY)
"""The sums that the loss function returns for each micro-batch: fields of :class:`UpdateSums`."""


def grpo_step(
    model: PolicyModel,
    optimizer: PolicyOptimizer,
    samples: Mapping[int, Sample],
    shares: Sequence[MiniStepShare],
    rollout: Sequence[RouteShard],
    request: StepRequest,
    tracer: RankTracer | None = None,
    reference: Reference | None = None,
    balancer: PassBalancer | None = None,
    critic: Critic | None = None,
) -> tuple[RankReport, RouteDifferences | None]:
    """Run this rank's share of a global step. Collective: every rank calls it with the same number of mini steps.

    ``rollout``: this rank's shard of the routes of every micro-batch, in order; empty if the samples have no routes.
    ``tracer`` records the routes of a traced step. ``reference``: the model of the KL penalty. ``balancer``: the
    expert balancing of the passes; None turns it off. ``critic``: of ``train.baseline: critic``. Old log-probs,
    reference log-probs and advantages are computed before the first mini step and are the same for all mini steps.

    Returns the report of the rank, and where its routers used other experts than the rollout (None without routes).
    """
    batches, balancer = step_batches(samples, shares), balancer or PassBalancer()
    config = request.config
    replay, temperature = config.train.replay, config.rollout.logprob_temperature
    old_routes, update_routes = None, None
    if replay == "r3" and rollout:
        old_routes, update_routes = ablated_routes(config.r3.ablation, rollout, batches)
    record = bool(rollout) or replay == "r2"
    started = time.perf_counter()
    balancer.begin_step()
    if replay == "r3":
        balancer.use_routes(batches, update_routes)
    old: list[PassOutput] | None = None
    if request.runs_old_logprob_pass:
        shifts = config.train.correction.router_shift is not None
        with traced_pass(model, tracer, "prev-logprob", 0), balancer.plans("recompute") as plans:
            old = _forward(model, batches, old_routes, temperature, record=record, gates=shifts, plans=plans)
    recorded = [_recorded(output) for output in old] if record and old is not None else []
    after_old = time.perf_counter()
    unreplayed = None
    if request.measure_without_replay and old is not None:  # under r2 and off the old log-probs came from just this
        unreplayed = _forward(model, batches, None, temperature, record=True) if replay == "r3" else old
    before_update = time.perf_counter()
    differences = None if old is None else _differences(model, rollout, recorded, unreplayed)
    if replay == "r2":
        update_routes = _as_shards(model, batches, recorded)
        balancer.use_routes(batches, update_routes)
    own_logprobs = None if old is None else [output.logprobs for output in old]
    # Without the pass the update reads no log-probs of the trainer: the engine's stand in their place.
    logprobs = own_logprobs or [torch.from_numpy(batch.logprobs_T).to(model.device) for batch in batches]
    values = [output.values for output in old or ()]
    gates = [output.gates for output in old or () if output.gates is not None]
    unreplayed_logprobs = None if unreplayed is None else [output.logprobs for output in unreplayed]
    del old, unreplayed, recorded  # routes are the largest data of a step: free those that no pass replays
    inputs = _training_inputs(model, batches, logprobs, config.train, critic, values)
    if gates:
        pairs = zip(inputs, gates, strict=True)
        inputs = [replace(item, extras={**item.extras, "gates": own}) for item, own in pairs]
    comparison = _compare(model, reference, inputs, update_routes, logprobs, config)
    if comparison is not None:
        inputs = [
            replace(item, extras={**item.extras, **extras})
            for item, extras in zip(inputs, comparison.extras, strict=True)
        ]
    after_reference = time.perf_counter()
    updates, loss_values = _updates(model, optimizer, shares, inputs, update_routes, request, tracer, balancer, critic)
    report = RankReport(
        rollout_logprobs=_at_sampled_tokens(batches, [batch.logprobs_T for batch in batches]),
        trainer_logprobs=None if own_logprobs is None else _at_sampled_tokens(batches, own_logprobs),
        logprobs_without_replay=(
            None if unreplayed_logprobs is None else _at_sampled_tokens(batches, unreplayed_logprobs)
        ),
        lag=np.concatenate([np.zeros(0, np.int32), *(batch.lag_T[batch.mask_T] for batch in batches)]),
        updates=tuple(updates),
        old_logprob_seconds=after_old - started,
        seconds_without_replay=before_update - after_old,
        update_seconds=time.perf_counter() - after_reference,
        reference=None if comparison is None else ReferenceReport(comparison.taken, comparison.seconds),
        sampled=_sampled_tokens(inputs, loss_values) if request.detail else None,
        teacher_logprobs=(
            None
            if config.train.distill is None
            else _at_sampled_tokens(batches, [batch.teacher_T for batch in batches if batch.teacher_T is not None])
        ),
        critic=None if critic is None else critic.report(),
    )
    return report, differences


def step_batches(samples: Mapping[int, Sample], shares: Sequence[MiniStepShare]) -> list[MicroBatch]:
    """The micro-batches of this rank's share of a global step, mini step after mini step."""
    return [pack(samples, ids) for share in shares for ids in share.micro_batches]


def sample_logprobs(
    model: PolicyModel,
    samples: Mapping[int, Sample],
    micro_batches: Sequence[Sequence[int]],
    routes: Sequence[RouteShard],
    *,
    temperature: float,
    record: bool,
) -> tuple[dict[int, NDArray[np.float32]], list[NDArray[np.integer]]]:
    """Log-probs ``[S]`` of this data rank's samples, by the index of the sample; 0 for the first token.

    ``routes``: this rank's shard to replay for each micro-batch; empty routes without replay. With ``record`` also the
    experts that this rank's routers used, ``[R, C, K]`` for each micro-batch.
    """
    batches = [pack(samples, ids) for ids in micro_batches]
    inputs = [packed(batch) for batch in batches]
    outputs = model.forward_logprobs(inputs, routes or None, temperature=temperature, record=record)
    logprobs = {
        index: output.logprobs[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]].float().cpu().numpy()
        for batch, output in zip(batches, outputs, strict=True)
        for number, index in enumerate(batch.sample_ids)
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
        kept=batch.kept_T,
    )


def _forward(
    model: PolicyModel,
    batches: Sequence[MicroBatch],
    routes: Shards,
    temperature: float,
    *,
    record: bool,
    gates: bool = False,
    plans: PassPlans | None = None,
) -> list[PassOutput]:
    inputs = [packed(batch) for batch in batches]
    return model.forward_logprobs(inputs, routes, temperature=temperature, record=record, gates=gates, plans=plans)


def _recorded(output: PassOutput) -> NDArray[np.integer]:
    if output.routes is None:
        raise TrainerError("the pass should record routes and returned none")
    return output.routes.numpy()


def _as_shards(
    model: PolicyModel, batches: Sequence[MicroBatch], recorded: Sequence[NDArray[np.integer]]
) -> list[RouteShard]:
    """The experts that a pass used, as routes to replay."""
    spec = model.shard
    packings = [Packing(tuple(np.diff(batch.cu_seqlens).tolist()), spec.multiple) for batch in batches]
    return [
        own_routes(used, batch.sample_ids, batch.tokens_T, packing, spec)
        for used, batch, packing in zip(recorded, batches, packings, strict=True)
    ]


def _differences(
    model: PolicyModel,
    rollout: Sequence[RouteShard],
    recorded: Sequence[NDArray[np.integer]],
    unreplayed: Sequence[PassOutput] | None,
) -> RouteDifferences | None:
    """Compare recorded routes with the rollout's; None where the rollout has none."""
    if not rollout:
        return None
    replayed = [route_differences(shard, used) for shard, used in zip(rollout, recorded, strict=True)]
    without_replay = None
    if unreplayed is not None:
        without_replay = [
            route_differences(shard, _recorded(used)) for shard, used in zip(rollout, unreplayed, strict=True)
        ]
    return RouteDifferences.of(len(model.shard.columns), replayed, without_replay)


def _compare(
    model: PolicyModel,
    reference: Reference | None,
    inputs: Sequence[PackedBatch],
    routes: Shards,
    old_logprobs: Sequence[Tensor],
    config: RunConfig,
) -> ReferenceComparison | None:
    """The reference's log-probs and penalties; None where the config has no KL penalty."""
    if not config.train.kl.coefficient:
        return None
    if reference is None:
        raise TrainerError("the loss has a KL penalty and this rank was started without a reference model")
    temperature = config.rollout.logprob_temperature
    return compare_with_reference(model, reference, inputs, routes, old_logprobs, config.train, temperature)


def _updates(
    model: PolicyModel,
    optimizer: PolicyOptimizer,
    shares: Sequence[MiniStepShare],
    inputs: Sequence[PackedBatch],
    routes: Shards,
    request: StepRequest,
    tracer: RankTracer | None,
    balancer: PassBalancer,
    critic: Critic | None,
) -> tuple[list[UpdateSums], list[Mapping[str, float | Tensor]]]:
    """Run all mini steps. Returns the updates, and the loss function's values of every micro-batch, epoch by epoch."""
    config, updates, values = request.config, list[UpdateSums](), list[Mapping[str, float | Tensor]]()
    ends = np.cumsum([len(share.micro_batches) for share in shares]).tolist()
    for epoch, (share, end) in itertools.product(range(config.train.epochs), zip(shares, ends, strict=True)):
        mini_step = slice(end - len(share.micro_batches), end)
        traced = traced_pass(model, tracer if epoch == 0 else None, "train", mini_step.start)
        loss = grpo_loss(config, share, detail=request.detail)
        if critic is not None:
            loss = critic.loss(loss, inputs[mini_step])
        with traced, balancer.plans("update", mini_step) as plans:
            batch_values = model.train_microbatches(
                inputs[mini_step], routes[mini_step] if routes is not None else None, loss,
                temperature=config.rollout.logprob_temperature,
                entropy_gradient=config.train.entropy_coefficient != 0, plans=plans,
            )  # fmt: skip
        sums = _sums(batch_values)
        finite = math.isfinite(sums["loss"])
        update = optimizer.step(
            finite_loss=finite,
            spike_norm=request.spike_norm,
            on_spike=config.guard.on_spike,
            held=critic is not None and critic.warming_up,
        )
        if critic is not None:
            critic.step(batch_values)
        if update.taken:
            balancer.weights_changed()
        updates.append(UpdateSums(share.sampled_tokens, update=update, observed=share.observed, **sums))
        values += batch_values
    return updates, values


def _sampled_tokens(inputs: Sequence[PackedBatch], values: Sequence[Mapping[str, float | Tensor]]) -> SampledTokens:
    """Entropy and flags of the sampled tokens; ``values`` has every micro-batch once per epoch."""
    epochs = range(0, len(values), max(1, len(inputs)))
    entropy = [_tensor(item["entropy_T"]) for item in values[: len(inputs)]]
    flags = [
        _flags(item.extras, *(_ever(values, [epoch + number for epoch in epochs], name) for name in _TOKEN_FLAGS))
        for number, item in enumerate(inputs)
    ]
    if not inputs:
        return SampledTokens(np.zeros(0, np.float16), np.zeros(0, np.uint8))
    return SampledTokens(torch.cat(entropy).cpu().numpy(), torch.cat(flags).cpu().numpy())


_TOKEN_FLAGS = ("clipped_T", "dropped_T")


def _ever(values: Sequence[Mapping[str, float | Tensor]], items: Sequence[int], name: str) -> Tensor:
    """Whether ``name`` was set in any of these micro-batches."""
    return torch.stack([_tensor(values[item][name]) for item in items]).any(0)


def _flags(extras: Mapping[str, Tensor], clipped: Tensor, masked: Tensor) -> Tensor:
    """uint8 ``[n]``: the :class:`TokenFlag` bits of the ``n`` sampled tokens; ``clipped``, ``masked`` bool ``[n]``."""
    sampled_T = extras["sampled"].to(clipped.device)
    factors = extras["factors"].to(clipped.device)[sampled_T]
    bits = {TokenFlag.CLIPPED: clipped, TokenFlag.REWEIGHTED: (factors != 1) & ~masked, TokenFlag.MASKED: masked}
    return torch.stack([is_set.to(torch.uint8) * int(flag) for flag, is_set in bits.items()]).sum(0, dtype=torch.uint8)


def _tensor(value: float | Tensor) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _training_input(batch: MicroBatch, old_logprobs: Tensor, source: OldLogprobSource) -> PackedBatch:
    rollout, trainer = torch.from_numpy(batch.logprobs_T).to(old_logprobs), old_logprobs.detach()
    old = _old_logprobs(batch, trainer, rollout, source)
    lengths = torch.from_numpy(np.diff(batch.cu_seqlens)).long()
    observed = {} if batch.observed_T is None else {"observed": torch.from_numpy(batch.observed_T)}
    return packed(
        batch,
        **observed,
        mask=torch.from_numpy(batch.drawn_T).to(trainer.device),
        sampled=torch.from_numpy(batch.mask_T).to(trainer.device),
        advantages=torch.from_numpy(batch.advantages_T),
        weights=torch.from_numpy(batch.weights_T),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(trainer.device),
        old_logprobs=old,
        log_ratio=trainer - rollout,
        log_weight=old - rollout,
    )


def _training_inputs(
    model: PolicyModel,
    batches: Sequence[MicroBatch],
    old_logprobs: Sequence[Tensor],
    train: TrainConfig,
    critic: Critic | None = None,
    values: Sequence[Tensor | None] = (),
) -> list[PackedBatch]:
    """The inputs of the loss function for each micro-batch, with the correction factors ``[T]`` among the extras.
    ``old_logprobs``: the trainer's own log-probs; ``values``: the critic's. Collective."""
    pairs = zip(batches, old_logprobs, strict=True)
    inputs = [_training_input(batch, old, train.old_logprob.source) for batch, old in pairs]
    if train.distill is not None:
        inputs = [_distilled(*each, train.distill) for each in zip(inputs, batches, old_logprobs, strict=True)]
    if critic is not None:
        inputs = critic.estimate(inputs, [each for each in values if each is not None])
        if train.normalizes_on_ranks:
            scaled = normalized_over_step(model, inputs, [item.extras["advantages"] for item in inputs])
            pairs_of = zip(inputs, scaled, strict=True)
            inputs = [replace(item, extras={**item.extras, "advantages": own}) for item, own in pairs_of]
    if objective_spec(train.objective).selection is not None:
        inputs = _with_selection(model, inputs, old_logprobs, train)
    mean = _mean_weight(model, inputs, train.correction) if train.correction.normalize else 1.0
    return [
        replace(item, extras={**item.extras, "factors": _factors(item.extras, train.correction, mean)})
        for item in inputs
    ]


def _with_selection(
    model: PolicyModel, inputs: Sequence[PackedBatch], logprobs: Sequence[Tensor], train: TrainConfig
) -> list[PackedBatch]:
    """``inputs`` with the tokens that the objective selects among those of the step on all data ranks. Collective."""
    pairs = [(item.extras["advantages"].to(own), own) for item, own in zip(inputs, logprobs, strict=True)]
    masks = [item.extras["mask"] for item in inputs]
    local = [covariance_moments(*pair, mask) for pair, mask in zip(pairs, masks, strict=True)]
    moments = model.sum_over_data(torch.stack(local).sum(0) if local else torch.zeros(3, dtype=torch.float64))
    options = train.clip.options
    scores = [
        torch.where(mask, selection_scores(train.objective, options, *pair, moments.to(mask.device)), -torch.inf)
        for pair, mask in zip(pairs, masks, strict=True)
    ]
    sampled = [score[mask] for score, mask in zip(scores, masks, strict=True)]
    everything = _over_data(model, torch.cat(sampled) if sampled else torch.zeros(0, dtype=torch.float64))
    selected = [highest(score, everything.to(score.device), options["fraction"]) for score in scores]
    return [replace(item, extras={**item.extras, "selected": own}) for item, own in zip(inputs, selected, strict=True)]


def _over_data(model: PolicyModel, values: Tensor) -> Tensor:
    """The ``values`` of all data ranks, one after another. Collective."""
    rank, counts = model.ranks.data_rank, torch.zeros(model.ranks.data_size, dtype=torch.int64)
    counts[rank] = len(values)
    counts = model.sum_over_data(counts).cpu()
    start, total = int(counts[:rank].sum()), int(counts.sum())
    placed = torch.zeros(total, dtype=values.dtype)
    placed[start : start + len(values)] = values.cpu()
    return model.sum_over_data(placed)


def _distilled(item: PackedBatch, batch: MicroBatch, logprobs: Tensor, distill: DistillConfig) -> PackedBatch:
    """``item`` with the advantages of on-policy distillation."""
    if batch.teacher_T is None:
        raise TrainerError(f"train.distill is set and the teacher did not evaluate sample {batch.sample_ids[0]}")
    teacher, advantages = torch.from_numpy(batch.teacher_T).to(logprobs), item.extras["advantages"].to(logprobs)
    distilled = distilled_advantages(advantages, logprobs, teacher, distill.reward, distill.in_advantage)
    item = replace(item, extras={**item.extras, "advantages": distilled})
    if distill.top_k is None:
        return item
    if batch.teacher_top_T is None:
        raise TrainerError(f"train.distill.top_k is set and sample {batch.sample_ids[0]} has no tokens of the teacher")
    top = torch.from_numpy(batch.teacher_top_T.logprobs).to(logprobs.device)
    return replace(
        item, extras={**item.extras, "teacher_top": top}, candidates=torch.from_numpy(batch.teacher_top_T.ids)
    )


def _mean_weight(model: PolicyModel, inputs: Sequence[PackedBatch], correction: CorrectionConfig) -> float:
    """The mean correction weight of the step's sampled tokens on all data ranks."""
    moments = [weight_moments(correction, *(item.extras[name] for name in _WEIGHT_INPUTS)) for item in inputs]
    local = torch.stack(moments).sum(0) if moments else torch.zeros(2, dtype=torch.float64)
    count, total = model.sum_over_data(local).tolist()
    return float(total / count) if count else 1.0


_WEIGHT_INPUTS = ("log_weight", "mask", "sequence")


def _factors(extras: Mapping[str, Tensor], correction: CorrectionConfig, mean: float) -> Tensor:
    log_weight_T, mask_T, sequence_T = (extras[name] for name in _WEIGHT_INPUTS)
    return correction_factors(
        correction, extras["log_ratio"], mask_T, sequence_T, log_weight_T=log_weight_T, mean=mean
    )  # fmt: skip


def _old_logprobs(batch: MicroBatch, trainer: Tensor, rollout: Tensor, source: OldLogprobSource) -> Tensor:
    """The denominator of the policy ratio, by ``train.old_logprob.source``."""
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
    """The loss function of one mini step, normalized by its tokens or sequences over all ranks.

    The constant length of Dr.GRPO is ``rollout.max_tokens``. With ``detail`` the function also returns the entropy of
    the sampled tokens and which of them were clipped.
    """
    counts = LossCounts(share.sampled_tokens, share.sequences, share.weight, share.observed)

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
            selected_T=batch.extras.get("selected"),
            observed_T=batch.extras.get("observed"),
            shift_T=batch.extras.get("router_shift"),
            top_Tk=(batch.extras["candidates"], batch.extras["teacher_top"]) if batch.candidates is not None else None,
        )
        values = dict[str, float | Tensor](zip(SUMS, (result.loss.detach(), *_reported(result)), strict=True))
        if detail:
            mask_T = batch.extras["sampled"]
            entropy = torch.zeros_like(logprobs_T) if entropy_T is None else entropy_T.detach()
            flags = {name: getattr(result, name)[mask_T] for name in _TOKEN_FLAGS}
            values |= {"entropy_T": entropy[mask_T].half(), **flags}
        return result.loss, values

    return loss_fn


def _reported(result: PolicyLoss) -> tuple[Tensor, ...]:
    names = ("clipped", "entropy", "approx_kl", "correction", "dropped", "kl_reference", *_AUXILIARY)
    return tuple(getattr(result, name) for name in names)


def _sums(values: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """The sums of :data:`SUMS` over micro-batches: one transfer from the device."""
    if not values:
        return dict.fromkeys(SUMS, 0.0)
    rows = torch.stack([torch.stack([_tensor(item[name]) for name in SUMS]) for item in values]).tolist()
    return {name: sum(column) for name, column in zip(SUMS, zip(*rows, strict=True), strict=True)}


def _at_sampled_tokens(
    batches: Sequence[MicroBatch], values: Sequence[Tensor | NDArray[np.float32]]
) -> NDArray[np.float32]:
    """The values at the sampled tokens of all micro-batches, concatenated."""
    parts = [
        (value.float().cpu().numpy() if isinstance(value, Tensor) else value)[batch.mask_T]
        for batch, value in zip(batches, values, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
