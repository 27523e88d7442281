"""The ranks' reports of one step merged into the metrics of docs/metrics.md. numpy only; runs in the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import Clip
from agent_rl.errors import TrainerError
from agent_rl.train.reports import RankReport, RouteCounts
from r3.mismatch.report import log_ratios, mismatch_metrics


def step_metrics(
    reports: Sequence[RankReport], routes: RouteCounts | None, routes_without_replay: RouteCounts | None, clip: Clip
) -> dict[str, float]:
    """The metrics of the data ranks' reports, whose registered source is this file.

    The route counts are those over all ranks (None where the samples had no routes, or no native pass was run).
    ``mismatch/*`` compares trainer and engine with the same weights: tokens of older ones are left out, and told apart
    by their lag under ``off_policy/*``, where ``clip`` bounds what counts as clipped.
    """
    rollout = np.concatenate([report.rollout_logprobs for report in reports])
    trainer = np.concatenate([report.trainer_logprobs for report in reports])
    lag = np.concatenate([report.lag for report in reports])
    values = _train(reports) | _staleness(lag) | _off_policy(rollout, trainer, lag, clip)
    if (fresh := lag == 0).any():
        values |= _mismatch("mismatch", rollout[fresh], trainer[fresh])
        unreplayed = [
            report.logprobs_without_replay for report in reports if report.logprobs_without_replay is not None
        ]
        if len(unreplayed) == len(reports):
            values |= _mismatch("mismatch_without_replay", rollout[fresh], np.concatenate(unreplayed)[fresh])
    if routes is not None:
        values |= {**_differ("r3", routes), **_coverage(routes)}
    if routes_without_replay is not None:
        values |= _differ("mismatch_without_replay", routes_without_replay)
    values["time/old_logprob"] = max(report.old_logprob_seconds for report in reports)
    values["time/logprob_without_replay"] = max(report.seconds_without_replay for report in reports)
    values["time/update"] = max(report.update_seconds for report in reports)
    return values | _reference(reports)


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
    """How far the weights before this step are from those that sampled, a figure for each lag above 0."""
    logs = {age: log_ratios(trainer, rollout, lag == age) for age in np.unique(lag[lag > 0]).tolist()}
    ratios = {age: np.exp(log) for age, log in logs.items()}
    outside = {age: (ratio < 1 - clip.low) | (ratio > 1 + clip.high) for age, ratio in ratios.items()}
    return (
        _by_lag("off_policy/k3_kl_lag", {age: float(np.mean(ratio - 1 - logs[age])) for age, ratio in ratios.items()})
        | _by_lag("off_policy/ratio_mean_lag", {age: ratio.mean() for age, ratio in ratios.items()})
        | _by_lag("off_policy/clip_fraction_lag", {age: beyond.mean() for age, beyond in outside.items()})
    )


def _by_lag(name: str, values: Mapping[int, float]) -> dict[str, float]:
    return {f"{name}_{age}": float(value) for age, value in values.items()}


def _train(reports: Sequence[RankReport]) -> dict[str, float]:
    tried = [[report.updates[index] for report in reports] for index in range(len(reports[0].updates))]
    updates = [ranks for ranks in tried if ranks[0].update.finite]
    made = {
        "train/updates": float(sum(ranks[0].update.taken for ranks in tried)),
        "train/skipped_updates": float(sum(not ranks[0].update.taken for ranks in tried)),
        "train/spikes": float(sum(ranks[0].update.spike for ranks in tried)),
        "train/sampled_tokens": float(sum(ranks[0].tokens for ranks in tried)),
    }
    if not updates:  # a mean over what is not finite says nothing: the names are left out
        return made
    tokens = max(1, sum(ranks[0].tokens for ranks in updates))
    return made | {
        "train/loss": float(np.mean([sum(rank.loss for rank in ranks) for ranks in updates])),
        "train/grad_norm": float(np.mean([ranks[0].update.grad_norm for ranks in updates])),
        "train/clip_fraction": sum(rank.clipped for ranks in updates for rank in ranks) / tokens,
        "train/entropy": sum(rank.entropy for ranks in updates for rank in ranks) / tokens,
        "train/approx_kl": sum(rank.kl for ranks in updates for rank in ranks) / tokens,
        "train/correction_weight": sum(rank.correction for ranks in updates for rank in ranks) / tokens,
        "train/correction_dropped": sum(rank.dropped for ranks in updates for rank in ranks) / tokens,
        "train/lr": updates[-1][0].update.lr,
    }


def _reference(reports: Sequence[RankReport]) -> dict[str, float]:
    """The KL to the reference in the updates, and what it took from the advantages, a sampled token."""
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
