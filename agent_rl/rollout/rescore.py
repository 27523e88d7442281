"""Old log-probs from the engine: every finished trajectory is evaluated again ``n`` times and the mean is used.

This is KwaiKAT's ``mean_8`` (KAT-Coder-Pro V1, kwaikat.github.io/kwaikat-blog/posts/katcoder_1201). A log-prob from the
engine is the policy's plus noise from precision, atomics and the kernels chosen for a batch's shape, and the ratio
inherits that noise. The mean of n evaluations has 1 / n of its variance.

The mean is taken of log-probs, not of probabilities. The noise is additive in logits, so it has mean 0 in log-probs,
while the log of a mean probability is biased upwards by about half the noise's variance. The loss uses log-probs.

Each evaluation starts after the previous one has finished, so that they run in different batches. Evaluations batched
together would have correlated noise.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError, EngineRejected
from agent_rl.rollout.group import Limiter
from agent_rl.types import Branch, Rescored, StopReason, Trajectory


class Rescorer:
    """Returns a finished trajectory with ``rescored`` set. At most ``limiter.limit`` evaluations are in flight.

    A trajectory without sampled tokens, or with a stop reason in ``skipped`` (excluded from the loss), is returned
    unchanged. Raises EngineError if an evaluation failed past the engine's retries, or ran with other weights than the
    trajectory's. ``failed`` counts these errors.
    """

    def __init__(self, engine: SGLangEngine, *, n: int, limiter: Limiter, skipped: Collection[StopReason] = ()) -> None:
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
        """One evaluation of all branches, one after another."""
        session = f"rescore-{trajectory.task_id}-{number}"
        return np.concatenate([await self._evaluate(branch, session) for branch in trajectory.branches])

    async def _evaluate(self, branch: Branch, session: str) -> NDArray[np.float32]:
        values, version = await sampled_logprobs(self._engine, self._limiter, branch, session)
        if len(values) and branch.weight_versions != (version,):
            sampled_with = ", ".join(branch.weight_versions)
            raise EngineRejected(
                f"{session}: the trajectory was sampled with weights {sampled_with}, but the engine now has "
                f"{version}: its old log-probs cannot be computed"
            )
        return values


async def sampled_logprobs(
    engine: SGLangEngine, limiter: Limiter, branch: Branch, session: str
) -> tuple[NDArray[np.float32], str]:
    """The engine's log-probs of the sampled tokens of ``branch``, and the version of its weights ("" without a sampled
    token)."""
    if not branch.sampled_tokens:
        return np.zeros(0, np.float32), ""
    async with limiter:
        scores = await engine.rescore(branch.tokens.tolist(), session=session)
    return np.asarray(scores.logprobs, np.float32)[branch.loss_mask], scores.weight_version


def rescore_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``old_logprob/*`` of the rescored ``trajectories``; empty if there are none.

    ``variance``: the unbiased variance of a token's n evaluations, as mean and maximum over sampled tokens; the mean
    that is used has 1 / n of it. ``spread_fraction``: share of tokens whose evaluations differ. Both only for n > 1.
    ``rollout_abs_diff``: mean distance of the rescored mean from the sampled log-prob, in nats.
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
