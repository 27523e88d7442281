from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent_rl.rollout.group import DroppedGroup, Rollout
from agent_rl.rollout.metrics import missing_token_fraction, rollout_metrics
from agent_rl.types import Group, StopReason, Trajectory, Turn
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, Span, SpanKind


def turn(sampled: int, *, failure: str | None = None, seconds: float = 1.0) -> Turn:
    return Turn("", None, {}, failure, "", 5, sampled, 0, 0, "0", seconds, seconds / 10)


def trajectory(reward: float | None, stop: StopReason, turns: tuple[Turn, ...], tokens: int) -> Trajectory:
    arrays = (np.zeros(tokens, kind) for kind in (np.int32, np.bool_, np.float32))
    solved = reward == 1.0
    return Trajectory("t", "e", *arrays, None, stop, reward, solved, turns, (), (), grade_seconds=0.5)


def metrics_of(*members: Trajectory, seconds: float = 1.0) -> dict[str, float]:
    return dict(rollout_metrics(Rollout((Group("a", members),), (), seconds=seconds)))


def test_the_metrics_of_a_step() -> None:
    won = trajectory(1.0, StopReason.SUBMITTED, (turn(10), turn(20, failure="no call", seconds=4.0)), 60)
    lost = trajectory(0.0, StopReason.MAX_TURNS, (turn(30),), 40)
    groups = (Group("a", (won, lost), infrastructure_failures=2), Group("b", (lost, lost)))
    metrics = rollout_metrics(Rollout(groups, (DroppedGroup("c", ("x", "y", "z")),), seconds=2.0))
    reward = {"mean": 0.25, "std": np.std([1, 0, 0, 0]), "pass_rate": 0.25, "groups_uniform": 0.5}
    counts = {"trajectories": 4, "parse_failures": 1, "infrastructure_failures": 5, "groups_dropped": 1}
    means = {"turns": 5 / 4, "tokens": 180 / 4, "sampled_tokens": 120 / 4, "grade_seconds": 0.5}
    means |= {"generate_seconds": 8 / 5, "tool_seconds": 0.8 / 5}
    stops = dict.fromkeys(("context_full", "time_limit", "parse_failures", "program_failed"), 0)
    stops |= {"submitted": 0.25, "max_turns": 0.75}
    assert metrics == pytest.approx(
        {f"reward/{name}": value for name, value in reward.items()}
        | {f"rollout/{name}": value for name, value in counts.items()}
        | {f"rollout/{name}_mean": value for name, value in means.items()}
        | {f"rollout/stop/{name}": value for name, value in stops.items()}
        | {"rollout/tokens_per_second": 180 / 2, "rollout/sampled_tokens_per_second": 120 / 2}
        | {"rollout/suspected_hacks": 0, "rollout/retractions": 0, "rollout/thinking_tokens": 0}
        | {"rollout/thinking_truncated": 0, "rollout/compactions": 0, "rollout/subagents": 0}
        | {"rollout/branch_tokens_mean": 180 / 4, "rollout/summary_tokens_mean": 0}
    )


def test_tokens_of_thoughts_are_averaged_over_trajectories() -> None:
    thought = trajectory(1.0, StopReason.SUBMITTED, (replace(turn(10), thinking_tokens=6), turn(5)), 60)
    plain = trajectory(0.0, StopReason.SUBMITTED, (turn(30),), 40)
    assert metrics_of(thought, plain)["rollout/thinking_tokens"] == 3


def test_kept_tokens_are_averaged_over_the_tokens_that_have_some() -> None:
    plain = trajectory(1.0, StopReason.SUBMITTED, (turn(3),), 3)
    masked = replace(plain, kept=KeptTokens.from_rows([[1, 2, 3], [], [4]]))
    assert metrics_of(masked, plain)["rollout/kept_tokens"] == 2
    assert "rollout/kept_tokens" not in metrics_of(plain)


def test_retractions_are_counted() -> None:
    spans = (Span(0, 3, "1", "e", SpanKind.PREFILLED), Span(3, 9, "1", "e", SpanKind.RECOMPUTED))
    routing = Routing(np.zeros((9, 1, 1), np.uint8), np.ones(9, np.bool_), spans, 4)
    plain = trajectory(1.0, StopReason.SUBMITTED, (turn(24),), 30)
    lost = replace(plain, routing=routing, turns=(replace(turn(6), retractions=2),))
    masks = [np.arange(30) < sampled for sampled in (24, 6)]
    members = [replace(one, loss_mask=mask) for one, mask in zip((plain, lost), masks, strict=True)]
    metrics = metrics_of(*members)
    assert metrics["rollout/retractions"] == 2
    assert metrics["r3/recomputed_token_fraction"] == 6 / 30


def test_episodes_of_an_earlier_start_do_not_count_in_speeds() -> None:
    now = trajectory(1.0, StopReason.SUBMITTED, (turn(10),), 60)
    before = replace(trajectory(0.0, StopReason.SUBMITTED, (turn(30),), 40), recovered=True)
    metrics = metrics_of(now, before, before, before, seconds=2.0)
    assert metrics["rollout/tokens_per_second"] == 60 / 2
    assert metrics["rollout/sampled_tokens_per_second"] == 10 / 2
    assert metrics["time/rollout_recovered"] == 0.75
    assert metrics["rollout/tokens_mean"] == 180 / 4
    metrics = metrics_of(before, before, seconds=1e-4)
    assert metrics["time/rollout_recovered"] == 1.0
    assert not [name for name in metrics if "per_second" in name]


def test_a_step_that_lost_every_group_has_only_counts() -> None:
    metrics = rollout_metrics(Rollout((), (DroppedGroup("c", ("x",)),), seconds=2.0))
    assert metrics == {"rollout/infrastructure_failures": 1, "rollout/groups_dropped": 1}


def test_a_trajectory_without_reward_in_a_group_is_refused() -> None:
    broken = replace(trajectory(1.0, StopReason.SUBMITTED, (), 5), stop=StopReason.SANDBOX_FAILURE, reward=None)
    with pytest.raises(ValueError, match="has no reward"):
        metrics_of(broken)


def test_the_fraction_of_tokens_without_routes() -> None:
    known = np.array([True] * 30 + [False] * 10 + [True] * 20 + [False])
    routing = Routing(np.zeros((61, 1, 1), np.uint8), known, (), 4)
    sampled = {"loss_mask": np.ones(61, np.bool_), "tokens": np.zeros(61, np.int32)}
    some = replace(trajectory(1.0, StopReason.SUBMITTED, (turn(10),), 61), routing=routing, **sampled)
    idle = trajectory(0.0, StopReason.CONTEXT_FULL, (), 40)
    metrics = metrics_of(some, idle)
    assert metrics["r3/missing_token_fraction"] == pytest.approx(10 / 60), "the last row is nobody's to send"
    none = replace(some, routing=None)
    assert missing_token_fraction([some, none]) == pytest.approx(70 / 120)
    assert missing_token_fraction([]) == 0.0
