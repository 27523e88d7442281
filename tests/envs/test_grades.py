"""Named parts of rewards, their weights and metrics, and grades that compare the episodes of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.memory_env import FIX, PLAIN, SUBMIT, TASK, MemoryEnvironment, TurnsEngine, run_memory_episode
from support.trajectories import trajectory

from agent_rl.commands.show import show
from agent_rl.config import EnvConfig, RunConfig
from agent_rl.controller.async_rollout.producer import restore, strip
from agent_rl.errors import AgentRlError
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.monitoring.metrics import check_registered
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupSettings, Limiter, Rollout, collect_groups
from agent_rl.rollout.group_grading import group_grading
from agent_rl.rollout.metrics import rollout_metrics, source_metrics
from agent_rl.rollout.records import read_trajectories, write_trajectories
from agent_rl.types import Group, StopReason, Trajectory
from envs import Grade, GradedEpisode, ProtocolError, Task
from envs.grades import checked_grade, weighted
from envs.sources import SourcesEnvironment

PARTS = {"right": 1.0, "short": 0.5}


def graded(**fields: Any) -> Callable[[], Awaitable[Grade]]:
    async def grade() -> Grade:
        return Grade(0.25, resolved=True, **fields)

    return grade


async def episode(rules: EpisodeRules = PLAIN, **fields: Any) -> Trajectory:
    return await run_memory_episode(TurnsEngine([SUBMIT]), MemoryEnvironment(grade=graded(**fields)), rules=rules)


async def test_rewards_of_turns_are_one_for_each_and_reach_records(tmp_path: Path) -> None:
    turns = TurnsEngine([FIX, SUBMIT])
    made = await run_memory_episode(turns, MemoryEnvironment(grade=graded(turn_rewards=[0.5, -1])), rules=PLAIN)
    assert made.turn_rewards == (0.5, -1.0)
    write_trajectories(tmp_path, 1, [Group("t", (made,))])
    ((read,),) = (group.trajectories for group in read_trajectories(tmp_path, 1))
    assert read.turn_rewards == (0.5, -1.0)
    assert restore(Group("t", (strip(made),)), [replace(read, turn_rewards=())]).trajectories[0].turn_rewards
    console = Console(record=True, width=200)
    show(tmp_path, step=1, task=None, sample=None, as_list=False, console=console)
    printed = console.export_text()
    assert printed.index("reward of the turn: 0.5") < printed.index("reward of the turn: -1")
    failed = await run_memory_episode(
        TurnsEngine([FIX, SUBMIT]), MemoryEnvironment(grade=graded(turn_rewards=[1.0])), rules=PLAIN
    )
    assert failed.stop is StopReason.ENVIRONMENT_ERROR
    assert "turn_rewards are 1 numbers; the agent took 2 turns: give one for each" in failed.error


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parts": {"mean": 1.0}}, "'mean' has the name of a metric of every run"),
        ({"parts": {"a/b": 1.0}}, "name 'a/b'; a name is a letter"),
        ({"parts": {3: 1.0}}, "name '3'; a name is a letter"),
        ({"parts": {"right": float("nan")}}, "right = nan; expected a finite number"),
        ({"metrics": {"length": "long"}}, "length = long; expected a finite number"),
        ({"metrics": {f"m{number}": 1.0 for number in range(33)}}, "at most 32 names"),
        ({"parts": [("right", 1.0)]}, "must be a dict"),
        ({"turn_rewards": [0.5, float("inf")]}, "reward of turn 2 is inf; expected a finite number"),
        ({"turn_rewards": ["0.5"]}, "reward of turn 1 is 0.5; expected a finite number"),
        ({"turn_rewards": 0.5}, "turn_rewards are a float; expected a list"),
    ],
)
async def test_parts_with_wrong_names_or_numbers_are_no_reward(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        checked_grade(Grade(1.0, True, **fields))
    failed = await episode(**fields)
    assert (failed.stop, failed.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    assert reason in failed.error


async def test_reward_is_the_weighted_sum_of_the_parts_where_the_config_has_weights() -> None:
    assert (await episode(parts=PARTS)).reward == 0.25
    config = RunConfig(name="x", model=Path("m"), env=EnvConfig(reward_weights={"right": 2.0, "short": -1.0}))
    rules = replace(PLAIN, reward_weights=EpisodeRules.from_config(config).reward_weights)
    of_parts = await episode(rules, parts=PARTS, metrics={"words": 7})
    assert (of_parts.reward, of_parts.resolved, of_parts.parts, of_parts.metrics) == (1.5, True, PARTS, {"words": 7.0})
    lacks_one = await episode(rules, parts={"right": 1.0})
    assert (lacks_one.reward, lacks_one.stop) == (None, StopReason.ENVIRONMENT_ERROR)
    assert "reward_weights names the part 'short'; the grade's parts are: right" in lacks_one.error
    with pytest.raises(ValueError, match="reward_weights"):
        EnvConfig(reward_weights={"right": float("inf")})


def test_each_source_has_weights_of_its_own() -> None:
    sources = {"a": {"env": "mini", "reward_weights": {"right": 2.0}}, "b": {"env": "math"}}
    config = RunConfig.model_validate({"name": "x", "model": "m", "train": {"sources": sources}})
    rules = EpisodeRules.from_config(config)
    assert [rules.weights_of(task) for task in ("a:1", "b:1", "1")] == [{"right": 2.0}, {}, {}]


def test_parts_are_metrics_of_the_step_and_of_each_source() -> None:
    some = replace(trajectory(1.0), parts={"right": 1.0}, metrics={"words": 4.0})
    other = replace(trajectory(0.0), parts={"right": 0.0, "short": 0.5})
    group = Group("shop:t", (some, other))
    values = rollout_metrics(Rollout((group,), (), seconds=1.0)) | source_metrics([group], ["shop"])
    assert {name: values[name] for name in ("reward/right", "reward/short", "env/words")} == {
        "reward/right": 0.5, "reward/short": 0.5, "env/words": 4.0,
    }  # fmt: skip
    assert values["source/shop/reward/right"] == 0.5
    check_registered(values)
    with pytest.raises(AgentRlError, match="rollout/rewards"):
        check_registered(["rollout/rewards"])


async def test_parts_are_in_the_records_of_the_run_and_in_the_report(tmp_path: Path) -> None:
    written = await episode(parts=PARTS, metrics={"words": 7.0})
    write_trajectories(tmp_path, 1, [Group(TASK.id, (written,))])
    ((read,),) = [group.trajectories for group in read_trajectories(tmp_path, 1)]
    assert (read.parts, read.metrics) == (PARTS, {"words": 7.0})
    console = Console(record=True, width=200)
    show(tmp_path, step=1, task=None, sample=None, as_list=False, console=console)
    assert "reward parts: right 1, short 0.5" in console.export_text()

    async def run(task: Task) -> Trajectory:
        return replace(written, task_id=task.id)

    report = await evaluate([TASK], run, policy="engine", limiter=Limiter(1))
    assert report.grades == {"env/words": 7.0, "reward/right": 1.0, "reward/short": 0.5}


class Ranked(MemoryEnvironment):
    """The reward of an episode is its rank by the length of its last message."""

    calls = 0

    async def grade_group(self, task: Task, episodes: Sequence[GradedEpisode]) -> list[Grade]:
        type(self).calls += 1
        lengths = [len(episode.messages[-1]["content"]) for episode in episodes]
        ranks = [sorted(lengths).index(length) / max(1, len(lengths) - 1) for length in lengths]
        return [Grade(rank, rank == 1, parts={"rank": rank}) for rank in ranks]


async def groups(env: Any, rules: EpisodeRules = PLAIN) -> Rollout:
    endings = iter(["a", "abc", "ab"])

    async def run(task: Task) -> Trajectory:
        ended = await run_memory_episode(TurnsEngine([FIX, SUBMIT]), env, rules=rules)
        return replace(ended, task_id=task.id, messages=(*ended.messages, {"role": "tool", "content": next(endings)}))

    grading = group_grading(env, rules)
    return await collect_groups([TASK], run, GroupSettings(3, max_dropped=1), limiter=Limiter(1), grading=grading)


async def test_complete_group_is_graded_once_by_an_environment_that_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranked, "calls", 0)
    rollout = await groups(
        Ranked(grade=graded(parts={"rank": 0.0})), replace(PLAIN, reward_weights={"": {"rank": 10.0}})
    )
    (group,) = rollout.groups
    assert Ranked.calls == 1
    assert [t.reward for t in group.trajectories] == [0.0, 10.0, 5.0]
    assert [t.resolved for t in group.trajectories] == [False, True, False]
    assert group_grading(MemoryEnvironment(), PLAIN) is None


async def test_failed_group_grading_drops_the_group_and_scores_nothing() -> None:
    class Fails(MemoryEnvironment):
        async def grade_group(self, task: Task, episodes: Sequence[GradedEpisode]) -> Any:
            raise OSError("the judge is gone")

    class Short(MemoryEnvironment):
        async def grade_group(self, task: Task, episodes: Sequence[GradedEpisode]) -> Any:
            return [episodes[0].grade]

    class Hangs(MemoryEnvironment):
        async def grade_group(self, task: Task, episodes: Sequence[GradedEpisode]) -> Any:
            await asyncio.Event().wait()

    quick = replace(PLAIN, env=EnvConfig(start_timeout=0.01, grade_timeout=0.01))
    for env, rules, cause in (
        (Fails(), PLAIN, "grading the group: OSError: the judge is gone"),
        (Short(), PLAIN, "list of 3 Grades"),
        (Hangs(), quick, "grading the group"),
    ):
        rollout = await groups(env, rules)
        assert rollout.groups == ()
        assert cause in rollout.dropped[0].cause


async def test_only_sources_that_compare_change_the_grades_of_their_groups() -> None:
    plain = SourcesEnvironment({"a": MemoryEnvironment()}, {"train": [("a", "train")]})
    mixed = SourcesEnvironment({"a": MemoryEnvironment(), "b": Ranked()}, {"train": [("a", "train"), ("b", "train")]})
    assert group_grading(plain, PLAIN) is None
    grading = group_grading(mixed, PLAIN)
    assert grading is not None
    tasks = {task.id: task for task in mixed.tasks("train")}
    said = replace(trajectory(0.5), messages=({"role": "assistant", "content": "x"},))
    assert [t.reward for t in await grading(tasks["a:train-0"], [said])] == [0.5]
    assert [t.reward for t in await grading(tasks["b:train-0"], [said])] == [0.0]


def test_grade_within_the_group_outlives_the_journaled_one() -> None:
    journaled = trajectory(0.0)
    compared = replace(journaled, reward=1.0, resolved=True, parts={"rank": 1.0})
    (restored,) = restore(Group("t", (strip(compared),)), [journaled]).trajectories
    assert (restored.reward, restored.resolved, restored.parts) == (1.0, True, {"rank": 1.0})


def test_weights_without_parts_keep_the_reward_of_the_environment() -> None:
    assert weighted(Grade(0.3, False), {}).reward == 0.3
