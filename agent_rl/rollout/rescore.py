"""Old log-probs from the engine itself: each finished trajectory evaluated again ``n`` times, their mean taken.

KwaiKAT's ``mean_8`` (KAT-Coder-Pro V1, kwaikat.github.io/kwaikat-blog/posts/katcoder_1201): what an engine says of a
token is its policy plus noise, of precision, atomics and the kernels chosen for a batch's shape, and the ratio inherits
that noise. The mean of n evaluations has 1 / n of its variance.

The mean is of log-probs, not of probabilities. The noise is added to logits, so in log-probs it has mean 0, while the
log of a mean of probabilities lies about half the noise's variance above; and the loss takes log-probs.

An evaluation starts when the one before is done, so that each meets the batch of its moment: together they would be
batched with each other, and agree for no other reason than that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent_rl.engine.types import Scorer
from agent_rl.errors import EngineError, EngineRejected
from agent_rl.rollout.limiter import Limiter
from agent_rl.types import Branch, Rescored, StopReason, Trajectory


class Rescorer:
    """Gives a finished trajectory back ``rescored``; at most ``limiter.limit`` evaluations are in flight.

    One that sampled nothing, or that ended in a way that is ``skipped`` (the loss leaves it out), is given back as it
    is. Raises EngineError where an evaluation failed past the engine's own retries, or was made with other weights than
    sampled the trajectory: that is the engine's failure and says nothing about the policy. ``failed`` counts those.
    """

    def __init__(self, engine: Scorer, *, n: int, limiter: Limiter, skipped: Collection[StopReason] = ()) -> None:
        self._engine, self._n, self._limiter = engine, n, limiter
        self._skipped = frozenset(skipped)
        self.failed = 0

    async def __call__(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.stop in self._skipped or not trajectory.sampled_tokens:
            return trajectory
        started = time.perf_counter()
        try:
            values = [await self._evaluate_all(trajectory, number) for number in range(self._n)]
        except EngineError:
            self.failed += 1
            raise
        return replace(trajectory, rescored=Rescored(np.stack(values), time.perf_counter() - started))

    async def _evaluate_all(self, trajectory: Trajectory, number: int) -> NDArray[np.float32]:
        """One evaluation of every branch, one behind another."""
        session = f"rescore-{trajectory.task_id}-{number}"
        return np.concatenate([await self._evaluate(branch, session) for branch in trajectory.branches])

    async def _evaluate(self, branch: Branch, session: str) -> NDArray[np.float32]:
        if not branch.sampled_tokens:
            return np.zeros(0, np.float32)
        async with self._limiter:
            scores = await self._engine.rescore(branch.tokens.tolist(), session=session)
        if branch.weight_versions != (scores.weight_version,):
            sampled_with = ", ".join(branch.weight_versions)
            raise EngineRejected(
                f"{session}: a trajectory was sampled with weights {sampled_with} and the engine has "
                f"{scores.weight_version} now: its old log-probs cannot be had any more"
            )
        return np.asarray(scores.logprobs, np.float32)[branch.loss_mask]


def rescore_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``old_logprob/*`` of those among ``trajectories`` that were rescored; empty where none was.

    ``variance``: a token's unbiased variance over the n evaluations, the mean over sampled tokens and the largest; of
    one evaluation, so the mean used has 1 / n of it. ``spread_fraction``: share of tokens whose evaluations differ at
    all. Both only for n > 1. ``rollout_abs_diff``: mean distance of the mean from the log-prob sampled with, in nats.
    """
    pairs = [(trajectory, trajectory.rescored) for trajectory in trajectories if trajectory.rescored is not None]
    if not pairs:
        return {}
    values = np.concatenate([rescored.values for _, rescored in pairs], axis=1).astype(np.float64)
    sampled = np.concatenate([branch.logprobs[branch.loss_mask] for t, _ in pairs for branch in t.branches])
    metrics = {
        "old_logprob/rescored": float(len(pairs)),
        "old_logprob/evaluations": float(len(values)),
        "old_logprob/rollout_abs_diff": float(np.abs(values.mean(axis=0) - sampled).mean()),
        "old_logprob/rescore_seconds_mean": float(np.mean([rescored.seconds for _, rescored in pairs])),
    }
    if len(values) == 1:
        return metrics
    variance = values.var(axis=0, ddof=1)
    return metrics | {
        "old_logprob/variance": float(variance.mean()),
        "old_logprob/variance_max": float(variance.max()),
        "old_logprob/spread_fraction": float((np.ptp(values, axis=0) > 0).mean()),
    }
