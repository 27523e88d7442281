"""Merge the workers' reports of one step into its metrics (docs/reference/metrics.md) and its token details. numpy
only; runs in the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import Clip
from agent_rl.config.objectives import Distance
from agent_rl.errors import TrainerError
from agent_rl.train.reports import RankReport, RouteCounts, Update
from agent_rl.train.route_sharding import MicroBatches, by_sample
from agent_rl.types import Sample, TokenDetail
from r3.mismatch.report import log_ratios, mismatch_metrics

Bits = NDArray[np.uint8]
_EPS = 1e-8
"""As in dppo_kl."""


def step_metrics(
    reports: Sequence[RankReport], routes: RouteCounts | None, routes_without_replay: RouteCounts | None, clip: Clip
) -> dict[str, float]:
    """The metrics of the data ranks' reports; the registry names this file as their source.

    Route counts are over all ranks (None without routes, or without a pass without replay). ``mismatch/*`` compares
    trainer and engine with equal weights: tokens of older weights are left out. ``off_policy/*`` reports those by lag;
    ``clip`` defines what counts as clipped. Both are absent where no pass ran before the update.
    """
    lag = np.concatenate([report.lag for report in reports])
    values = _train(reports) | _staleness(lag) | _compared(reports, lag, clip)
    if routes is not None:
        values |= {**_differ("r3", routes), **_coverage(routes)}
    if routes_without_replay is not None:
        values |= _differ("mismatch_without_replay", routes_without_replay)
    values["time/old_logprob"] = max(report.old_logprob_seconds for report in reports)
    values["time/logprob_without_replay"] = max(report.seconds_without_replay for report in reports)
    values["time/update"] = max(report.update_seconds for report in reports)
    return values | _reference(reports) | _critic(reports)


def _compared(reports: Sequence[RankReport], lag: NDArray[np.int32], clip: Clip) -> dict[str, float]:
    """The metrics that compare the trainer's log-probs before the update with those of engine and teacher."""
    own = [report.trainer_logprobs for report in reports if report.trainer_logprobs is not None]
    if not own:
        return {}
    rollout, trainer = np.concatenate([report.rollout_logprobs for report in reports]), np.concatenate(own)
    values = _off_policy(rollout, trainer, lag, clip)
    if (fresh := lag == 0).any():
        values |= _mismatch("mismatch", rollout[fresh], trainer[fresh])
        unreplayed = [each.logprobs_without_replay for each in reports if each.logprobs_without_replay is not None]
        if len(unreplayed) == len(reports):
            values |= _mismatch("mismatch_without_replay", rollout[fresh], np.concatenate(unreplayed)[fresh])
    teacher = [report.teacher_logprobs for report in reports if report.teacher_logprobs is not None]
    if teacher:
        values["distill/kl"] = float(np.mean(trainer - np.concatenate(teacher), dtype=np.float64))
    return values


def sft_metrics(update: Update, loss: float, tokens: int) -> dict[str, float]:
    """The metrics of a supervised update on ``tokens`` tokens."""
    counts = {
        "train/updates": float(update.taken),
        "train/skipped_updates": float(not update.taken),
        "train/spikes": float(update.spike),
        "train/sampled_tokens": float(tokens),
    }
    means = {"sft/loss": loss, "train/grad_norm": update.grad_norm, "train/lr": update.lr}
    return counts | (means if update.finite else {})


def _mismatch(prefix: str, rollout: NDArray[np.float32], trainer: NDArray[np.float32]) -> dict[str, float]:
    try:
        values = mismatch_metrics(trainer, rollout)
    except ValueError as error:
        raise TrainerError(f"{prefix}: the trainer's and the rollout's log-probs cannot be compared: {error}") from None
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _staleness(lag: NDArray[np.int32]) -> dict[str, float]:
    shares = {age: float(np.mean(lag == age)) for age in np.unique(lag).tolist()}
    ages = {"staleness/mean": float(lag.mean()), "staleness/max": float(lag.max())}
    return ages | _by_lag("staleness/share", shares)


def _off_policy(
    rollout: NDArray[np.float32], trainer: NDArray[np.float32], lag: NDArray[np.int32], clip: Clip
) -> dict[str, float]:
    """The difference of the weights before this step from those that sampled, for each lag above 0."""
    logs = {age: log_ratios(trainer, rollout, lag == age) for age in np.unique(lag[lag > 0]).tolist()}
    ratios = {age: np.exp(log) for age, log in logs.items()}
    outside = {
        age: _outside(clip, clip.distance, log, np.exp(rollout[lag == age].astype(np.float64)))
        for age, log in logs.items()
        if clip.distance is not None
    }
    return (
        _by_lag("off_policy/k3_kl_lag", {age: float(np.mean(ratio - 1 - logs[age])) for age, ratio in ratios.items()})
        | _by_lag("off_policy/ratio_mean_lag", {age: ratio.mean() for age, ratio in ratios.items()})
        | _by_lag("off_policy/clip_fraction_lag", {age: beyond.mean() for age, beyond in outside.items()})
    )


def _outside(
    clip: Clip, distance: Distance, log_ratio: NDArray[np.float64], old: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether tokens of probability ``old`` have moved beyond the clip, down or up."""
    ratio = np.exp(log_ratio)
    if distance == "kl":
        others = np.maximum(1 - old, 0)
        moved = others * np.log((others + _EPS) / (np.maximum(1 - old * ratio, 0) + _EPS)) - old * log_ratio
        return np.asarray(moved > np.where(ratio > 1, clip.high, clip.low))
    moved = {"ratio": ratio - 1, "log_ratio": log_ratio, "probability": old * (ratio - 1)}[distance]
    return np.asarray((moved < -clip.low) | (moved > clip.high))


def _by_lag(name: str, values: Mapping[int, float]) -> dict[str, float]:
    return {f"{name}_{age}": float(value) for age, value in values.items()}


def _train(reports: Sequence[RankReport]) -> dict[str, float]:
    attempted = [[report.updates[index] for report in reports] for index in range(len(reports[0].updates))]
    updates = [ranks for ranks in attempted if ranks[0].update.finite]
    counts = {
        "train/updates": float(sum(ranks[0].update.taken for ranks in attempted)),
        "train/skipped_updates": float(sum(not (ranks[0].update.taken or ranks[0].update.held) for ranks in attempted)),
        "train/spikes": float(sum(ranks[0].update.spike for ranks in attempted)),
        "train/sampled_tokens": float(sum(ranks[0].tokens for ranks in attempted)),
    }
    if not updates:  # without a finite update there are no means
        return counts
    tokens = max(1, sum(ranks[0].tokens for ranks in updates))
    divergence = sum(rank.distill for ranks in updates for rank in ranks)
    further = {"distill/loss_kl": divergence / tokens} if divergence else {}
    if shift := sum(rank.router_shift for ranks in updates for rank in ranks):
        further["train/router_shift_mean"] = shift / tokens
    if observed := sum(ranks[0].observed for ranks in updates):
        observation = sum(rank.observation for ranks in updates for rank in ranks)
        further["train/observation_loss"] = observation / observed
    means = {
        "train/loss": float(np.mean([sum(rank.loss for rank in ranks) for ranks in updates])),
        "train/grad_norm": float(np.mean([ranks[0].update.grad_norm for ranks in updates])),
        "train/clip_fraction": sum(rank.clipped for ranks in updates for rank in ranks) / tokens,
        "train/entropy": sum(rank.entropy for ranks in updates for rank in ranks) / tokens,
        "train/approx_kl": sum(rank.kl for ranks in updates for rank in ranks) / tokens,
        "train/correction_weight": sum(rank.correction for ranks in updates for rank in ranks) / tokens,
        "train/correction_dropped": sum(rank.dropped for ranks in updates for rank in ranks) / tokens,
        "train/lr": updates[-1][0].update.lr,
    }
    return counts | further | means


def _reference(reports: Sequence[RankReport]) -> dict[str, float]:
    """The KL to the reference in the updates, and the penalty taken from the advantages, per sampled token."""
    references = [report.reference for report in reports if report.reference is not None]
    if not references:
        return {}
    finite = [(rank, report) for report in reports for rank in report.updates if rank.update.finite]
    tokens = sum(rank.tokens for rank, report in finite if report is reports[0])
    sampled = sum(len(report.rollout_logprobs) for report in reports)
    return {
        "train/kl_reference": sum(rank.kl_reference for rank, _ in finite) / max(1, tokens),
        "train/kl_penalty": sum(report.taken for report in references) / max(1, sampled),
        "time/reference_logprob": max(report.seconds for report in references),
    }


def _critic(reports: Sequence[RankReport]) -> dict[str, float]:
    """Values before the updates over all steps; losses and norms as means over finite updates."""
    critics = [report.critic for report in reports if report.critic is not None]
    if not critics:
        return {}
    count, value, returns, squares, error, error_squares = np.sum(
        [critic.moments for critic in critics], axis=0
    ).tolist()
    variance = squares / count - (returns / count) ** 2
    unexplained = error_squares / count - (error / count) ** 2
    values = {
        "critic/value_mean": value / count,
        "critic/return_mean": returns / count,
        # Equal returns leave no variance to explain.
        "critic/explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0,
        "critic/warmup": float(all(update.update.held for update in reports[0].updates)),
    }
    attempted = [[critic.updates[index] for critic in critics] for index in range(len(critics[0].updates))]
    updates = [ranks for ranks in attempted if np.isfinite(ranks[0].grad_norm)]
    if not updates:
        return values
    return values | {
        "critic/loss": float(np.mean([sum(rank.loss for rank in ranks) for ranks in updates])),
        "critic/clip_fraction": sum(rank.clipped for ranks in updates for rank in ranks)
        / max(1, sum(ranks[0].steps for ranks in updates)),
        "critic/grad_norm": float(np.mean([ranks[0].grad_norm for ranks in updates])),
    }


def _differ(prefix: str, counts: RouteCounts) -> dict[str, float]:
    return {
        f"{prefix}/router_mismatch": counts.routers_differ / max(1, counts.routers),
        f"{prefix}/router_mismatch_worst_layer": int(counts.layers_differ.max()) / max(1, counts.tokens),
        f"{prefix}/token_mismatch": counts.tokens_differ / max(1, counts.tokens),
        f"{prefix}/sequence_mismatch": counts.sequence_layers / max(1, counts.sequences),
    }


def _coverage(counts: RouteCounts) -> dict[str, float]:
    return {
        "r3/coverage": counts.present / max(1, counts.needed),
        "r3/fallback_token_fraction": 1.0 - counts.present / max(1, counts.needed),
        "r3/bytes_per_token": counts.stored_bytes / max(1, counts.stored_tokens),
    }


class RouteDifferenceBits:
    """Which MoE layers of each token differ, by sample: bool ``[S, L]`` packed into bits, eight layers per byte."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.of: dict[int, Bits] = {}

    def take(self, ids: Sequence[int], differs_TL: NDArray[np.bool_]) -> None:
        """Add the differences of a micro-batch."""
        self.of.update(by_sample(self._samples, ids, np.packbits(differs_TL, axis=1)))


def token_details(
    samples: Sequence[Sample],
    micro_batches: Sequence[MicroBatches],
    reports: Mapping[int, RankReport],
    replayed: RouteDifferenceBits,
    without_replay: RouteDifferenceBits,
) -> dict[int, TokenDetail]:
    """The detail of every sample by index; ``micro_batches`` and ``reports`` by data rank. For
    ``monitoring.token_detail``."""
    details: dict[int, TokenDetail] = {}
    for data_rank, report in reports.items():
        ids = [index for batch in micro_batches[data_rank] for index in batch]
        for index, part in zip(ids, _parts(samples, ids), strict=True):
            details[index] = _detail(report, part, samples[index], replayed.of.get(index), without_replay.of.get(index))
    return details


def _parts(samples: Sequence[Sample], ids: Sequence[int]) -> Iterator[slice]:
    """The slice of each sample's sampled tokens in a report; a sequence's first token is never sampled."""
    end = 0
    for index in ids:
        start, end = end, end + int(samples[index].loss_mask[1:].sum())
        yield slice(start, end)


def _detail(
    report: RankReport, part: slice, sample: Sample, replayed: Bits | None, without_replay: Bits | None
) -> TokenDetail:
    engine, sampled = report.rollout_logprobs[part], report.sampled
    assert report.trainer_logprobs is not None, "a step with token details runs the pass"
    return TokenDetail(
        gap=report.trainer_logprobs[part] - engine,
        gap_without_replay=None
        if report.logprobs_without_replay is None
        else report.logprobs_without_replay[part] - engine,
        entropy=None if sampled is None else sampled.entropy[part],
        flags=np.zeros(len(engine), np.uint8) if sampled is None else sampled.flags[part],
        layers=0 if sample.routing is None else sample.routing.moe_layers,
        differs=replayed,
        differs_without_replay=without_replay,
    )
