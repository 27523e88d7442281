"""Metrics of one rollout (agent_rl/monitoring/metrics.py registers them): rewards, work, sources, agent programs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agent_rl.rollout.group import Rollout
from agent_rl.rollout.route_audit import audit_metrics
from agent_rl.types import BranchCause, Group, StopReason, Trajectory
from envs.sources import source_of
from r3.routing import SpanKind


class HasParts(Protocol):
    """What was graded: the parts of its reward, and metrics, by name."""

    @property
    def parts(self) -> Mapping[str, float]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


def rollout_metrics(result: Rollout) -> dict[str, float]:
    """The metrics of one step's groups. If every group was dropped, only the failure counts."""
    trajectories = [trajectory for group in result.groups for trajectory in group.trajectories]
    failures = sum(g.infrastructure_failures for g in result.groups) + sum(len(d.errors) for d in result.dropped)
    metrics: dict[str, float] = {
        "rollout/infrastructure_failures": failures,
        "rollout/groups_dropped": len(result.dropped),
    }
    if not trajectories:
        return metrics
    if any(trajectory.routing is not None for trajectory in trajectories):
        metrics["r3/missing_token_fraction"] = missing_token_fraction(trajectories)
        metrics["r3/recomputed_token_fraction"] = recomputed_token_fraction(trajectories)
        metrics |= audit_metrics(trajectories)
    metrics |= _reward_metrics(result.groups, trajectories) | _work_metrics(result, trajectories)
    metrics |= _mask_metrics(trajectories)
    return metrics | harness_metrics([trajectory for trajectory in trajectories if trajectory.harness])


def source_metrics(groups: Iterable[Group], sources: Iterable[str]) -> dict[str, float]:
    """``source/*`` of the groups of each of ``sources`` (:class:`envs.sources.SourcesEnvironment`) that has any."""
    names, by_source = tuple(sources), defaultdict[str, list[Group]](list)
    for group in groups:
        by_source[source_of(group.task_id, names)].append(group)
    metrics = dict[str, float]()
    for name in names:
        if trajectories := [trajectory for group in by_source[name] for trajectory in group.trajectories]:
            metrics |= {
                f"source/{name}/groups": float(len(by_source[name])),
                f"source/{name}/reward": _mean(reward_of(trajectory) for trajectory in trajectories),
                f"source/{name}/pass_rate": _mean(trajectory.resolved for trajectory in trajectories),
                f"source/{name}/turns_mean": _mean(len(trajectory.turns) for trajectory in trajectories),
                f"source/{name}/tokens_mean": _mean(trajectory.total_tokens for trajectory in trajectories),
                **{f"source/{name}/{key}": value for key, value in grade_metrics(trajectories).items()},
            }
    return metrics


def grade_metrics(trajectories: Iterable[HasParts]) -> dict[str, float]:
    """``reward/NAME`` and ``env/NAME``: the mean of each part and metric over the trajectories whose grade has it."""
    values = defaultdict[str, list[float]](list)
    for trajectory in trajectories:
        for group, numbers in (("reward", trajectory.parts), ("env", trajectory.metrics)):
            for name, number in numbers.items():
                values[f"{group}/{name}"].append(number)
    return {name: _mean(numbers) for name, numbers in sorted(values.items())}


def harness_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``harness/*`` of trajectories driven by an agent program; empty if there are none."""
    if not trajectories:
        return {}
    shared = sum(branch.shared for trajectory in trajectories for branch in trajectory.branches)
    total = sum(trajectory.total_tokens for trajectory in trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    left_out = sum(turn.completion_tokens for turn in turns if turn.left_out)
    return {
        "harness/left_out_token_fraction": left_out / max(1, sum(turn.completion_tokens for turn in turns)),
        "harness/branches": _mean(len(trajectory.branches) for trajectory in trajectories),
        "harness/inflation": total / max(1, total - shared),
        **{
            f"harness/{count}": float(sum(trajectory.harness[count] for trajectory in trajectories))
            for count in ("rewrites", "retries", "echo_differs")
        },
    }


def missing_token_fraction(trajectories: Iterable[Trajectory]) -> float:
    """Share of the tokens replayed by the trainer for which the engine sent no routes."""
    counts = [(trajectory.routes_missing, trajectory.routes_needed) for trajectory in trajectories]
    return sum(missing for missing, _ in counts) / max(1, sum(needed for _, needed in counts))


def recomputed_token_fraction(trajectories: Iterable[Trajectory]) -> float:
    """Share of the sampled tokens whose rows belong to a retracted request and may differ from the rows used for
    sampling."""
    rows = sampled = 0
    for trajectory in trajectories:
        sampled += trajectory.sampled_tokens
        for branch in trajectory.branches:
            for span in branch.routing.spans if branch.routing else ():
                rows += (span.stop - span.start) * (span.kind is SpanKind.RECOMPUTED)
    return rows / max(1, sampled)


def _reward_metrics(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [reward_of(trajectory) for trajectory in trajectories]
    uniform = [len({reward_of(t) for t in group.trajectories}) == 1 for group in groups]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/pass_rate": _mean(trajectory.resolved for trajectory in trajectories),
        "reward/groups_uniform": _mean(uniform),
        "rollout/suspected_hacks": sum(bool(trajectory.suspected_hack) for trajectory in trajectories),
        **grade_metrics(trajectories),
    }


def _work_metrics(rollout: Rollout, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = sum(turn.completion_tokens for turn in turns)
    tokens = sum(trajectory.total_tokens for trajectory in trajectories)
    branches = [branch for trajectory in trajectories for branch in trajectory.branches]
    summaries = [turn for turn in turns if turn.summary]
    metrics = {
        "rollout/trajectories": float(len(trajectories)),
        "rollout/compactions": len(summaries) / len(trajectories),
        "rollout/subagents": sum(branch.cause is BranchCause.SUBAGENT for branch in branches) / len(trajectories),
        "rollout/branch_tokens_mean": tokens / len(branches),
        "rollout/summary_tokens_mean": _mean(turn.completion_tokens for turn in summaries),
        "rollout/turns_mean": len(turns) / len(trajectories),
        "rollout/tokens_mean": tokens / len(trajectories),
        "rollout/sampled_tokens_mean": sampled / len(trajectories),
        "rollout/thinking_tokens": sum(turn.thinking_tokens - turn.inserted_tokens for turn in turns)
        / len(trajectories),
        "rollout/thinking_truncated": _mean(turn.inserted_tokens > 0 for turn in turns),
        "rollout/parse_failures": float(sum(turn.parse_failure is not None for turn in turns)),
        "rollout/retractions": float(sum(turn.retractions for turn in turns)),
        "rollout/generate_seconds_mean": _mean(turn.generate_seconds for turn in turns),
        "rollout/tool_seconds_mean": _mean(turn.tool_seconds for turn in turns),
        "rollout/grade_seconds_mean": _mean(trajectory.grade_seconds for trajectory in trajectories),
    }
    if controlled := [trajectory.mutant_seconds for trajectory in trajectories if trajectory.mutant_seconds]:
        metrics["grading/mutant_seconds"] = _mean(controlled)
    for reason in StopReason:
        if not reason.infrastructure:
            metrics[f"rollout/stop/{reason}"] = _mean(trajectory.stop is reason for trajectory in trajectories)
    return metrics | _speeds(trajectories, rollout.seconds)


def _mask_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``rollout/kept_tokens``; empty if all tokens were drawn from the whole vocabulary."""
    masks = [branch.kept for trajectory in trajectories for branch in trajectory.branches if branch.kept is not None]
    masked = sum(int((kept.counts > 0).sum()) for kept in masks)
    return {"rollout/kept_tokens": sum(len(kept.ids) for kept in masks) / masked} if masked else {}


def _speeds(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Tokens per second over ``seconds`` of the episodes that this process ran; recovered episodes are excluded."""
    fresh = [trajectory for trajectory in trajectories if not trajectory.recovered]
    recovered = {"time/rollout_recovered": 1 - len(fresh) / len(trajectories)} if len(fresh) < len(trajectories) else {}
    if not fresh:
        return recovered
    sampled = sum(turn.completion_tokens for t in fresh for turn in t.turns[t.replayed_turns :])
    return recovered | {
        "rollout/tokens_per_second": sum(trajectory.total_tokens for trajectory in fresh) / seconds,
        "rollout/sampled_tokens_per_second": sampled / seconds,
    }


def reward_of(trajectory: Trajectory) -> float:
    """The reward of a trajectory. Raises ValueError if it has none."""
    if trajectory.reward is None:
        raise ValueError(f"task {trajectory.task_id}: a trajectory with stop reason {trajectory.stop} has no reward")
    return trajectory.reward


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else 0.0
