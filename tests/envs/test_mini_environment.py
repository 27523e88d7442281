"""The mini environment with real sandboxes: verification, the cache, and episodes that are graded."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs import EnvContext, GradingError, TaskRecordError
from envs.mini import MiniEnvironment, generate, to_record, verify_records
from envs.swe import diff_files, grade_patch
from envs.swe.diff.git_diff import patched_paths
from tools import ToolCall

pytestmark = pytest.mark.bubblewrap


@pytest.fixture
def env(context: EnvContext, tmp_path: Path) -> MiniEnvironment:
    return MiniEnvironment(context, train_tasks=6, heldout_tasks=4, cache_dir=tmp_path)


def modification_times(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}


async def test_tasks_are_verified_once_and_then_read(env: MiniEnvironment, tmp_path: Path) -> None:
    assert modification_times(tmp_path) == {}
    await env.prepare()
    tasks = env.tasks("train")
    assert len(tasks) == 6
    assert all(task.record["verified"] for task in tasks)
    written = modification_times(tmp_path)
    assert len(written) == 2
    again = MiniEnvironment(env._context, train_tasks=6, heldout_tasks=4, cache_dir=tmp_path)
    assert [task.id for task in again.tasks("train")] == [task.id for task in tasks]
    assert modification_times(tmp_path) == written


async def test_tasks_can_be_listed_inside_a_running_loop(env: MiniEnvironment) -> None:
    assert len(env.tasks("heldout_family")) == 4


async def test_unknown_split_is_one_clear_line(env: MiniEnvironment) -> None:
    with pytest.raises(TaskRecordError, match="no split 'dev'; it has train, heldout, heldout_family"):
        env.tasks("dev")


async def test_a_task_whose_gold_patch_does_not_help_is_refused(context: EnvContext) -> None:
    first, second = (to_record(task) for task in generate("train", 2, seed=0))
    no_fix = first.model_copy(
        update={"gold_patch": second.gold.replace(next(iter(patched_paths(second.gold))), "other.py")}
    )
    with pytest.raises(ExceptionGroup) as caught:
        await verify_records(context, [second, no_fix])
    assert caught.group_contains(GradingError, match=f"task {first.id}: its gold patch does not resolve it")


async def test_a_task_that_is_not_broken_is_refused(context: EnvContext) -> None:
    task = generate("train", 1, seed=0)[0]
    whole = to_record(task).model_copy(update={"files": {**task.fixed, "notes.txt": "a\n"}})
    patch = "diff --git a/notes.txt b/notes.txt\n--- a/notes.txt\n+++ b/notes.txt\n@@ -1 +1 @@\n-a\n+b\n"
    with pytest.raises(ExceptionGroup) as caught:
        await verify_records(context, [whole.model_copy(update={"gold_patch": patch})])
    assert caught.group_contains(GradingError, match="the tests pass without the fix")


@pytest.mark.slow
async def test_an_episode_is_solved_with_the_tools(env: MiniEnvironment) -> None:
    await env.prepare("train")
    task = env.tasks("train")[0]
    mini = generate("train", 1, seed=0)[0]
    async with env.start(task) as episode:
        assert [message["content"] for message in episode.messages] == ["Fix the bug.", mini.issue]
        seen = await episode.tools.call(ToolCall("file_editor", {"command": "view", "path": mini.path}))
        assert seen.text == mini.files[mini.path].rstrip("\n")
        edit = {"command": "str_replace", "path": mini.path, "old_str": mini.old, "new_str": mini.new}
        assert (await episode.tools.call(ToolCall("file_editor", edit))).text == "edited"
        assert (await episode.tools.call(ToolCall("finish", {}))).submitted
        assert (await episode.grade()).resolved


@pytest.mark.slow
async def test_breaking_another_function_costs_the_reward(env: MiniEnvironment) -> None:
    await env.prepare("train")
    mini = next(task for task in generate("train", 6, seed=0) if sum(len(some) for some in task.cases.values()) > 1)
    record = next(env._record(task) for task in env.tasks("train") if task.id == mini.id)
    gold = await grade_patch(env._context, record, record.gold)
    assert gold.resolved
    other = next(name for functions in mini.cases.values() for name, _ in functions if f"`{name}(" not in mini.issue)
    fixed_and_broken = {path: text.replace(f"def {other}(", "def gone(") for path, text in mini.fixed.items()}
    grade = await grade_patch(env._context, record, diff_files(mini.files, fixed_and_broken))
    assert not grade.resolved


async def test_a_task_of_several_issues_states_them_one_after_another(context: EnvContext, tmp_path: Path) -> None:
    env = MiniEnvironment(context, train_tasks=1, heldout_tasks=1, issues=2, cache_dir=tmp_path)
    await env.prepare("train")
    (task,) = env.tasks("train")
    first, *others = generate("train", 9, seed=0)
    second = next(other for other in others if first.files.keys().isdisjoint(other.files))
    finish = ToolCall("finish", {"command": "submit"})
    async with env.start(task) as episode:
        assert episode.messages[1]["content"] == first.issue
        fix = {"command": "str_replace", "path": first.path, "old_str": first.old, "new_str": first.new}
        assert (await episode.tools.call(ToolCall("file_editor", fix))).text == "edited"
        result = await episode.tools.call(finish)
        assert (result.text, result.submitted) == (f"{second.issue}\n{second.files[second.path]}", False)
        assert (await episode.tools.call(finish)).submitted
        grade = await episode.grade()
    assert (grade.reward, grade.resolved) == (0.5, False)
