from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load_file, save_file
from support.memory_env import FIX, SUBMIT, MemoryEnvironment, TurnsEngine, call, run_memory_episode
from support.plain_values import plain

from agent_rl.errors import AgentRlError
from agent_rl.rollout.group import GroupSettings, Limiter, collect_groups
from agent_rl.rollout.jsonl_zst import encode_rows, read_row, read_rows
from agent_rl.rollout.records import read_trajectories, row_messages, step_stem, steps_on_disk, write_trajectories
from agent_rl.rollout.step_index import read_step_index
from agent_rl.rollout.token_details import read_detail
from agent_rl.types import BranchCause, Group, StopReason, TokenDetail, TrainingDecision, TrainingStatus, Trajectory
from envs import Task


@pytest.fixture
async def groups() -> tuple[Group, ...]:
    """Three groups of two real episodes, sampled with two weight versions."""

    async def run(task: Task) -> Trajectory:
        engine = TurnsEngine([call("echo", text=task.id), FIX, SUBMIT], versions=["1", "1", "2"])
        return replace(await run_memory_episode(engine), task_id=task.id)

    tasks = MemoryEnvironment().tasks("train")[:3]
    return (await collect_groups(tasks, run, GroupSettings(size=2), limiter=Limiter(4))).groups


@pytest.fixture
def first(groups: tuple[Group, ...]) -> Trajectory:
    return groups[0].trajectories[0]


def rewritten(directory: Path, *trajectories: Trajectory) -> tuple[Trajectory, ...]:
    """The trajectories, written and read."""
    write_trajectories(directory, 1, [Group("t", trajectories)])
    return read_trajectories(directory, 1)[0].trajectories


def assert_same(ours: Trajectory, theirs: Trajectory) -> None:
    """``theirs`` was read: its rows of routes are sorted."""
    routing = replace(ours.routing, experts=np.sort(ours.routing.experts, axis=2))
    assert plain(replace(ours, routing=routing)) == plain(theirs)


def test_what_is_read_is_what_was_written(groups: tuple[Group, ...], tmp_path: Path) -> None:
    groups = (replace(groups[0], infrastructure_failures=2), *groups[1:])
    write_trajectories(tmp_path, 7, groups)
    for ours, theirs in zip(groups, read_trajectories(tmp_path, 7), strict=True):
        assert (ours.task_id, ours.infrastructure_failures) == (theirs.task_id, theirs.infrastructure_failures)
        for a, b in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert_same(a, b)
    assert steps_on_disk(tmp_path) == [7]


def test_each_trajectory_is_a_line_of_json(groups: tuple[Group, ...], tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, 1, groups)
    rows = [json.loads(line) for line in zstandard.ZstdDecompressor().decompress(path.read_bytes()).splitlines()]
    assert rows == list(read_rows(path))
    assert [row["arrays"]["key"] for row in rows] == [f"{n:05d}" for n in range(6)]
    row = rows[0]
    assert (row["stop"], row["reward"], row["patch"]) == ("submitted", 1.0, "diff")
    assert [turn["tool"] for turn in row["turns"]] == ["echo", "echo", "submit"]
    assert row["messages"][3] == {"role": "tool", "content": {"observed": 0, "rest": ""}}
    assert row_messages(row)[3] == {"role": "tool", "content": row["task_id"]}
    assert [version for _, _, version in row["branches"][0]["versions"]] == ["1", "2"]


def test_trajectories_are_written_without_routes(groups: tuple[Group, ...], tmp_path: Path) -> None:
    write_trajectories(tmp_path, 1, groups, routes=False)
    back = read_trajectories(tmp_path, 1)[0].trajectories[0]
    assert back.routing is None
    assert np.array_equal(back.tokens, groups[0].trajectories[0].tokens)


def test_damaged_routes_are_named(groups: tuple[Group, ...], tmp_path: Path) -> None:
    arrays = write_trajectories(tmp_path, 1, groups).with_name("step-000001.safetensors")
    tensors = load_file(arrays)
    tensors["00003/routes"][40] ^= 1
    save_file(tensors, arrays)
    with pytest.raises(AgentRlError, match="routes of trajectory 00003: its checksum does not match"):
        read_trajectories(tmp_path, 1)


def test_any_text_of_a_model_and_any_stop_reason_can_be_written(first: Trajectory, tmp_path: Path) -> None:
    odd = {"a": 10**30, "b": "\ud800", "c": [None, {"d": "\u0000"}]}
    turn = replace(first.turns[0], arguments=odd, text="\udfff")
    back = rewritten(tmp_path, *(replace(first, turns=(turn,), stop=stop) for stop in StopReason))
    assert {(str(t.turns[0].arguments), t.turns[0].text) for t in back} == {(str(odd), "\udfff")}
    assert [t.stop for t in back] == list(StopReason)


def test_a_write_that_fails_leaves_the_old_files_and_no_scraps(groups: tuple[Group, ...], tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, 1, groups)
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    broken = replace(groups[0].trajectories[0], messages=({"role": "user", "content": object()},))
    with pytest.raises(TypeError):
        write_trajectories(tmp_path, 1, [Group("t", (broken,))])
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_a_step_without_groups_is_empty_and_an_absent_one_is_named(tmp_path: Path) -> None:
    write_trajectories(tmp_path, 3, [])
    assert read_trajectories(tmp_path, 3) == ()
    with pytest.raises(AgentRlError, match=r"step-000002\.jsonl"):
        read_trajectories(tmp_path, 2)


def test_rows_of_another_format_are_refused(groups: tuple[Group, ...], tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, 1, groups)
    rows = [{**row, "format": 2} for row in read_rows(path)]
    path.write_bytes(encode_rows(rows)[0])
    with pytest.raises(AgentRlError, match="format 2, expected 3 or 4"):
        read_trajectories(tmp_path, 1)


def test_rows_have_their_training_status(groups: tuple[Group, ...], tmp_path: Path) -> None:
    decisions = [TrainingDecision(TrainingStatus.TRAINED, 0.5)] * 3 + [TrainingDecision(TrainingStatus.DROPPED)] * 3
    rows = list(read_rows(write_trajectories(tmp_path, 1, groups, decisions=decisions)))
    written = [(row["training_status"], row["advantage"]) for row in rows]
    assert written == [("trained", 0.5)] * 3 + [("dropped", None)] * 3
    columns, _ = read_step_index(step_stem(tmp_path, 1)) or ({}, [])
    assert columns["training_status"] == [row["training_status"] for row in rows]


def test_an_episode_accounts_for_its_time(groups: tuple[Group, ...]) -> None:
    for trajectory in (t for group in groups for t in group.trajectories):
        times = [trajectory.start_seconds, *(turn.began for turn in trajectory.turns), trajectory.grade_began]
        assert times == sorted(times)
        assert trajectory.grade_began + trajectory.grade_seconds <= trajectory.seconds
        assert trajectory.began > 1.7e9
        assert trajectory.queue_seconds >= 0


def test_messages_that_repeat_a_turn_are_not_written_twice(first: Trajectory, tmp_path: Path) -> None:
    turn = replace(first.turns[0], text="I look. " * 500, observation="a file " * 500)
    contents = "the task", turn.text, f"{turn.observation}\n[3 turns left]", "something else"
    roles = "user", "assistant", "tool", "user"
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, contents, strict=True))
    odd = replace(first, turns=(turn,), messages=messages)
    (row,) = read_rows(write_trajectories(tmp_path, 1, [Group("t", (odd,))]))
    assert len(json.dumps(row["messages"])) < 300
    assert row_messages(row) == list(messages)


def test_one_row_is_found_without_those_before_it(tmp_path: Path) -> None:
    rows = [{"number": number, "text": "x" * 300_000} for number in range(8)]
    data, places = encode_rows(rows)
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(data)
    assert [offset for offset, _ in places] != [0] * 8
    assert [read_row(path, place) for place in places] == rows == list(read_rows(path))
    path.write_bytes(data[:-7])
    with pytest.raises(AgentRlError, match=r"rows\.jsonl\.zst: damaged"):
        list(read_rows(path))


def test_every_branch_is_kept(groups: tuple[Group, ...], tmp_path: Path) -> None:
    first, second = groups[0].trajectories[:2]
    further = replace(second.branches[0], parent=0, shared=3, cause=BranchCause.REWRITE)
    program = replace(first, further=(further,), harness={"rewrites": 1})
    write_trajectories(tmp_path, 1, [Group("t", (program, second))], details={(0, 1): DETAIL})
    one, other = read_trajectories(tmp_path, 1)[0].trajectories
    (found,) = one.further
    assert_same(first, replace(one, further=(), harness={}))
    found = replace(found, routing=replace(found.routing, experts=further.routing.experts))
    assert plain(found) == plain(further)
    assert (one.harness, other.further) == ({"rewrites": 1}, ())
    stem = step_stem(tmp_path, 1)
    assert read_detail(stem, 0) is None
    assert read_detail(stem, 0, 1) is not None
    columns, _ = read_step_index(stem) or ({}, [])
    assert columns["branches"] == [2, 1]
    assert columns["tokens"] == [len(first.tokens) + len(second.tokens), len(second.tokens)]
    assert columns["worst_gap"] == [0.5, None]


DETAIL = TokenDetail(np.array([-0.5], np.float32), None, None, np.zeros(1, np.uint8), 0, None, None)
