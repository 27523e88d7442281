"""The environment's comparison of a complete group: :class:`envs.GradesGroups` gives its trajectories new grades."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agent_rl.rollout.episode import EpisodeRules
from agent_rl.types import Trajectory
from envs import Environment, Grade, GradedEpisode, GradesGroups, ProtocolError, Task
from envs.grades import checked_grade, weighted
from envs.model_calls import recorded_calls
from sandbox import bounded

GroupGrading = Callable[[Task, Sequence[Trajectory]], Awaitable[list[Trajectory]]]
"""Returns the trajectories of a complete group with their final grades."""


def group_grading(env: Environment, rules: EpisodeRules) -> GroupGrading | None:
    """How ``env`` grades groups, within the time limit of a grading; None if it grades each episode alone."""
    if not isinstance(env, GradesGroups):
        return None

    async def grade(task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        episodes = [GradedEpisode(t.messages, t.stop.value, _grade_of(t)) for t in trajectories]
        with recorded_calls() as calls:
            async with bounded(rules.env.grading_timeout, "grading the group"):
                grades = await env.grade_group(task, episodes)
        if not isinstance(grades, Sequence) or len(grades) != len(trajectories):
            raise ProtocolError(f"grade_group must return a list of {len(trajectories)} Grades, one for each episode")
        weights = rules.weights_of(task.id)
        turns = [len(trajectory.turns) for trajectory in trajectories]
        checked = [weighted(checked_grade(*pair), weights) for pair in zip(grades, turns, strict=True)]
        first, *others = (_with_grade(*pair) for pair in zip(trajectories, checked, strict=True))
        return [replace(first, model_calls=(*first.model_calls, *calls)), *others]

    return grade


def _grade_of(trajectory: Trajectory) -> Grade:
    assert trajectory.reward is not None, "a group has no infrastructure failures"
    return Grade(
        reward=trajectory.reward,
        resolved=trajectory.resolved,
        patch=trajectory.patch,
        tests=trajectory.tests,
        log=trajectory.test_log,
        suspected_hack=trajectory.suspected_hack,
        parts=trajectory.parts,
        metrics=trajectory.metrics,
        turn_rewards=trajectory.turn_rewards,
    )


def _with_grade(trajectory: Trajectory, grade: Grade) -> Trajectory:
    return replace(
        trajectory,
        reward=grade.reward,
        resolved=grade.resolved,
        tests=grade.tests,
        test_log=grade.log,
        parts=grade.parts,
        metrics=grade.metrics,
        turn_rewards=tuple(grade.turn_rewards),
    )
