"""The resources of the viewer's page: exact to the token, and one clear line for whatever a run's directory lacks."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.trajectories import trajectory
from support.viewer_runs import EXPERTS, GROUPS, LAYERS, branched, damage, episode, evaluation, write_run, write_step

from agent_rl.config.loader import MODELS
from agent_rl.controller.config_changes import ConfigChange, append_change
from agent_rl.errors import UserError
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.rollout.jsonl_zst import encode_frame, encode_rows, read_rows
from agent_rl.rollout.records import encode_trajectory, read_trajectories, rows_path, step_stem, write_trajectories
from agent_rl.rollout.token_details import read_detail
from agent_rl.types import BranchCause, Group, StopReason, TrainingDecision, TrainingStatus
from agent_rl.viewer.api import Resources
from agent_rl.viewer.index import Index


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def read(directory: Path, path: str, **query: str) -> dict[str, Any]:
    """A resource of the only run, through JSON."""
    answer: dict[str, Any] = json.loads(Resources([directory]).body(f"0/{path}", query))
    assert isinstance(answer["notes"], list)
    return answer


def error(directory: Path, path: str, **query: str) -> str:
    found = read(directory, path, **query)["error"]
    assert "\n" not in found["text"]
    return f"{found['kind']}: {found['text']}"


def detail_of(directory: Path, step: int, number: int, branch: int = 0) -> Any:
    return read_detail(step_stem(directory, step), number, branch)


def test_a_run_is_summarized(run: Path) -> None:
    found = read(run, "run")
    assert (found["kind"], found["state"], found["steps"], found["total"]) == ("train", "stopped", 2, 4)
    assert found["filed"] == ["1", "2", "eval-2-sampled"]
    assert (found["detail"], found["resumes"], found["format"]) == (["1", "2"], [1], 4)
    assert found["facts"] == {"group_size": 2, "moe_layers": LAYERS, "num_experts": EXPERTS, "top_k": 2}
    (line,) = Resources([run]).read("runs")["runs"]
    assert (line["name"], line["pass_at_1"], line["guard"]) == ("demo", [0.5, 0.1, 0.9], 0)


def test_a_run_says_where_it_comes_from_and_what_changed(run: Path) -> None:
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"forked_from": "runs/first@2"}))
    append_change(run, ConfigChange(2, 0.0, {"train.lr": (1e-3, 1e-4), "train.steps": (2, 4)}))
    assert {"forked from runs/first@2", "config changed after step 2: train.lr, train.steps"} <= set(
        read(run, "run")["notes"]
    )
    (run / "config_history.jsonl").write_text('{"step": 1, "values": [3]}\n{"step": "x"}\n')
    assert "config_history.jsonl, line 2: damaged; shown up to there" in read(run, "run")["notes"]


def test_metrics_are_read_without_the_trajectories(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes 10 ms for 1,000 steps, and the curves wait for it."""
    looks = list[Path]()
    monkeypatch.setattr(Index, "refresh", lambda index: looks.append(index.directory))
    resources = Resources([run])
    for path, count in (("0/metrics", 0), ("0/live", 0), ("runs", 1), ("0/run", 2)):
        resources.read(path)
        assert len(looks) == count


def test_a_row_of_metrics_that_is_being_written_is_no_step_yet(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')
    assert Resources([run]).read("runs")["runs"][0]["steps"] == read(run, "run")["steps"] == 2


def test_metrics_are_columns(run: Path) -> None:
    found = read(run, "metrics")
    assert (found["steps"], found["columns"]["reward/mean"], found["sampled_tokens"]) == ([1, 2], [0.25, 0.5], [42, 84])
    assert found["units"]["reward/mean"] == "reward"
    assert all(time > 1.7e9 for time in found["time"])


def test_events_of_the_guard_are_shown_up_to_a_damaged_line(run: Path) -> None:
    (run / "guard.jsonl").write_text('{"step": 2, "event": "warn", "text": "k3"}\n[1]\n')
    found = read(run, "run")
    assert found["guard"] == [{"step": 2, "event": "warn", "text": "k3"}]
    assert "guard.jsonl, line 2: damaged; shown up to there" in found["notes"]


def test_a_trajectory_is_exact_to_the_token(run: Path) -> None:
    for number in range(2 * GROUPS):
        found = read(run, f"t/1-{number}")
        whole = read_trajectories(run, 1)[number // 2].trajectories[number % 2]
        (branch,) = found["branches"]
        assert branch["tokens"] == whole.tokens.tolist()
        assert branch["sampled"] == [[5, 9], [11, 14]]
        assert branch["versions"] == [[5, 9, "6"], [11, 14, "7"]]
        assert np.array_equal(np.array(branch["logprobs"], np.float32), whole.logprobs[whole.loss_mask])
        assert (branch["detail"] is None) == (number > 1)
        if number < 2:
            kept = detail_of(run, 1, number)
            for name in ("gap", "gap_without_replay", "entropy"):
                assert np.array_equal(np.array(branch["detail"][name], np.float16), getattr(kept, name))
            assert branch["detail"]["differs_without_replay"] == kept.differs_without_replay.numbers.tolist()
            assert branch["detail"]["differs"] == [0] * 14
            assert branch["detail"]["flags"] == kept.flags.tolist()


def test_a_trajectory_has_turns_times_and_tests(run: Path) -> None:
    found = read(run, "t/1-3")
    assert (found["training_status"], found["siblings"], found["task"]) == ("uniform", ["1-2", "1-3"], "task-1")
    assert found["messages"][2]["content"] == "a.py\n[1 turn left]"
    turns = [(turn["message"], turn["observation_message"], turn["span"]) for turn in found["turns"]]
    assert turns == [(1, 2, [5, 9]), (3, None, [11, 14])]
    times = {"began": 1.8e9, "queue": 0.0, "start": 0.5, "grade_began": 1.5, "grade": 0.5, "total": 2.0}
    assert (found["times"], found["tests"], found["test_log"]) == (times, {"t": "PASSED"}, "log\n")
    assert any("all rewards of its group are equal" in note for note in found["notes"])


def test_routes_are_those_of_the_records(run: Path) -> None:
    routing = read_trajectories(run, 2)[0].trajectories[1].routing
    found = read(run, "routes/2-1", **{"from": "3", "to": "9"})
    assert found["experts"] == routing.experts[3:9].tolist()
    layers = detail_of(run, 2, 1).differs_without_replay.layers
    assert found["differs_without_replay"] == [np.flatnonzero(row).tolist() for row in layers[3:9]]
    assert (found["spans"][0]["start"], found["spans"][0]["stop"], found["rows"]) == (3, 9, 14)
    mapped = read(run, "routes/2-1/map")
    assert mapped["differs_without_replay"] == np.argwhere(layers).tolist()
    assert (mapped["differs"], mapped["layers"], mapped["rows"]) == ([], LAYERS, 14)
    loads = np.array(read(run, "loads/2")["loads"])
    assert (loads.shape, loads.sum()) == ((LAYERS, EXPERTS), 6 * 13 * LAYERS * 2)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"n": "1"}, 6), ({"step": "2..9"}, 7), ({"task": "task-1"}, 4), ({"training_status": "trained,uniform"}, 8),
        ({"resolved": "true"}, 7), ({"reward": "..0.5"}, 6), ({"turns": "2"}, 12), ({"worst_gap": "0.0.."}, 4),
        ({"worst_gap": "9.."}, 0), ({"stop": "max_turns"}, 0), ({"n": "1", "resolved": "false"}, 3),
    ],
)  # fmt: skip
def test_trajectories_are_filtered(run: Path, query: dict[str, str], found: int) -> None:
    answer = read(run, "trajectories", **query)
    assert (answer["total"], answer["found"]) == (13, found)
    assert all(len(column) == found for column in answer["columns"].values())


def test_trajectories_are_sorted_and_cut(run: Path) -> None:
    answer = read(run, "trajectories", sort="-worst_gap_without_replay", limit="3", offset="1")
    every = read(run, "trajectories")["columns"]["worst_gap_without_replay"]
    wanted = sorted((gap for gap in every if gap is not None), reverse=True)
    assert (answer["found"], answer["columns"]["worst_gap_without_replay"]) == (13, wanted[1:4])
    assert read(run, "trajectories", sort="task", limit="1")["columns"]["task"] == ["a"]
    for query in ({"color": "red"}, {"turns": "many"}, {"sort": "x"}, {"limit": "-1"}):
        assert error(run, "trajectories", **query).startswith("unknown: ")


def test_a_step_has_its_groups(run: Path) -> None:
    groups = [(group["trained"], group["members"]) for group in read(run, "steps/1")["groups"]]
    assert groups == [(True, ["1-0", "1-1"]), (False, ["1-2", "1-3"]), (False, ["1-4", "1-5"])]


def test_an_evaluation_leads_to_its_trajectories(run: Path) -> None:
    found = read(run, "eval/step-2/sampled")
    (outcome,) = found["outcomes"]
    (sample,) = outcome["samples"]
    assert (outcome["task_id"], outcome["resolved"], sample["id"]) == ("a", 1, "eval-2-sampled-0")
    assert (sample["resolved"], sample["turns"], sample["tokens"]) == (True, 0, 5)
    assert read(run, "t/eval-2-sampled-0")["task"] == "a"


def test_stamps_change_with_the_files(run: Path) -> None:
    resources = Resources([run])
    before = resources.stamps()
    write_step(run, 3)
    after = resources.stamps()
    assert {path for path in after if after[path] != before.get(path)} == {"0/steps/3"}
    assert json.loads(resources.body("0/run"))["filed"] == ["1", "2", "3", "eval-2-sampled"]
    (run / "trajectories" / "step-000003.jsonl.zst").unlink()
    assert resources.stamps().keys() == before.keys()
    assert json.loads(resources.body("0/trajectories"))["total"] == 13
    assert {"0/steps/2", "0/eval/step-2/sampled", "runs"} <= set(resources.pages())


def test_the_running_step_shows_its_episodes(run: Path) -> None:
    (run / "journal").mkdir()
    journal = run / "journal" / "step-000003.journal"
    whole = episode(0)
    branched = replace(whole, further=(replace(whole.branches[0], parent=0, cause=BranchCause.RETRY),))
    first, second = (b'{"position": 0}\n' + encode_trajectory(one) for one in (branched, episode(1)))
    turn = encode_frame(b'{"position": 1, "episode": "a", "turn": 0}\nof an episode that did not end')
    parts = encode_frame(b"{}"), encode_frame(first), encode_frame(b'{"batch": [0]}\n'), turn, encode_frame(second)[:-5]
    journal.write_bytes(b"".join(parts))
    found = read(run, "live")
    assert (found["step"], found["expected"], [one["task"] for one in found["episodes"]]) == (3, 6, ["task-0"])
    assert [(one["tokens"], one["sampled"]) for one in found["episodes"]] == [(28, 14)]
    assert found["notes"] == []
    write_step(run, 3)
    assert read(run, "live")["step"] is None


def test_a_journal_is_read_on_from_where_it_was_read_to(run: Path) -> None:
    """Its first episode is damaged after it was read: to read it again would end there."""
    (run / "journal").mkdir()
    journal = run / "journal" / "step-000003.journal"
    first, second = (encode_frame(b"{}\n" + encode_trajectory(episode(number))) for number in (0, 2))
    resources = Resources([run])

    def tasks() -> list[str]:
        return [one["task"] for one in resources.read("0/live")["episodes"]]

    journal.write_bytes(encode_frame(b"{}") + first + second[:9])
    assert tasks() == ["task-0"]
    journal.write_bytes(encode_frame(b"{}") + b"\0" * len(first) + second)
    assert tasks() == ["task-0", "task-1"]
    journal.write_bytes(encode_frame(b'{"weights": "other"}') + second)
    assert tasks() == ["task-1"]


# Incomplete and damaged directories


def test_a_run_killed_in_the_middle_shows_what_it_has(run: Path) -> None:
    """A kill between the arrays and the rows of a step: the step is not there yet."""
    write_step(run, 3)
    (run / "trajectories" / "step-000003.jsonl.zst").unlink()
    assert read(run, "run")["filed"] == ["1", "2", "eval-2-sampled"]
    assert error(run, "steps/3") == f"absent: {run}: no trajectories of 3"


def test_a_run_without_routes_says_so(run: Path) -> None:
    """A dense model's is filed alike: it has no routes, and no layers that could differ."""
    for step in (1, 2):
        write_step(run, step, routes=False)
    assert error(run, "routes/1-0") == "absent: 1-0: its routes were not recorded"
    assert any("no expert loads were recorded" in note for note in read(run, "loads/1")["notes"])
    assert read(run, "run")["facts"]["moe_layers"] is None
    seen = read(run, "t/1-0")["branches"][0]["detail"]
    assert len(seen["gap_without_replay"]) == 7
    assert (seen["differs"], seen["differs_without_replay"]) == (None, None)


def test_a_run_without_detail_says_so(run: Path) -> None:
    write_step(run, 1, details=False)
    found = read(run, "t/1-0")
    assert found["branches"][0]["detail"] is None
    assert any("monitoring.token_detail was off" in note for note in found["notes"])
    assert read(run, "routes/1-0")["differs_without_replay"] is None
    assert "error" not in read(run, "routes/1-0/map")


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("trajectories/step-000001.jsonl.zst", ["t/1-0"]),
        ("trajectories/step-000001.safetensors", ["t/1-0", "routes/1-0"]),
        ("trajectories/step-000001.train.safetensors", ["t/1-0", "loads/1"]),
        ("metrics.jsonl", ["metrics"]),
        ("state.json", ["run"]),
        ("config.yaml", ["run"]),
    ],
)
def test_a_truncated_file_is_one_line(run: Path, name: str, paths: list[str]) -> None:
    damage(run / name)
    if name == "config.yaml":
        (run / name).write_text("a: [")
    for found in (read(run, path) for path in paths):
        lines = [found["error"]["text"]] if isinstance(found.get("error"), dict) else found["notes"]
        assert any(Path(name).name.split(".")[0] in line and "\n" not in line for line in lines), lines
    everything = Resources([run])
    assert all("Traceback" not in json.dumps(everything.read(page), default=str) for page in everything.pages())


def test_a_truncated_index_is_made_again_from_the_rows(run: Path) -> None:
    damage(run / "trajectories/step-000001.index.json.zst")
    found = read(run, "trajectories")
    assert (found["total"], found["notes"]) == (13, [])


def test_damaged_routes_are_one_line(run: Path) -> None:
    path = run / "trajectories" / "step-000001.safetensors"
    tensors = load_file(path)
    tensors["00000/routes"][40] ^= 1
    save_file(tensors, path)
    assert "checksum" in error(run, "routes/1-0")


def test_tokens_have_texts_if_there_is_a_tokenizer(run: Path) -> None:
    for text, note in ((None, "no tokenizer.json"), ("{}", "tokens are shown as numbers")):
        if text:
            (run / "tokenizer.json").write_text(text)
        found = read(run, "t/1-0")
        assert found["branches"][0]["pieces"] is None
        assert any(note in line for line in found["notes"])
    shutil.copy(MODELS["tiny-moe"] / "tokenizer.json", run)
    pieces = read(run, "t/1-0")["branches"][0]["pieces"]
    assert len(pieces) == 14
    assert "".join(pieces)


def test_metrics_that_are_not_finite_are_gaps(run: Path) -> None:
    log = MetricsLog(run)
    log.append(3, {"reward/mean": float("nan"), "train/loss": float("inf")})
    log.close()
    found = read(run, "metrics")
    assert found["columns"]["reward/mean"] == [0.25, 0.5, None]
    assert found["columns"]["train/loss"] == [None, None, None]
    assert "train/loss: not a number in step 3" in found["notes"]


def test_infrastructure_failures_only(tmp_path: Path) -> None:
    failed = replace(trajectory(0.0, stop=StopReason.SANDBOX_FAILURE), reward=None)
    write_trajectories(tmp_path, 0, [Group("t", (failed,), 4)])
    assert read(tmp_path, "trajectories")["columns"]["reward"] == [None]
    assert read(tmp_path, "steps/0")["groups"][0]["infrastructure_failures"] == 4
    assert any("infrastructure failures only" in note for note in read(tmp_path, "run")["notes"])


def test_the_directory_of_an_evaluation_is_shown(tmp_path: Path) -> None:
    directory = evaluation(tmp_path)
    found = read(directory, "run")
    assert (found["kind"], found["state"], found["evaluations"][0]["pass_at_1"]) == ("eval", "stopped", 1.0)
    assert read(directory, "trajectories", hacks="1..")["columns"]["task"] == ["a/b"]
    solved, failed = read(directory, "t/eval-0"), read(directory, "t/eval-1")
    assert (solved["test_log"], len(solved["turns"]), solved["branches"]) == ("log\n", 2, [])
    assert (failed["error"], failed["turns"]) == ("SandboxError: gone", [])
    samples = [one["samples"] for one in read(directory, "eval/eval")["outcomes"]]
    assert [[sample["id"] for sample in one] for one in samples] == [["eval-0"], ["eval-1"]]
    again = EpisodeResult("a/b", 1, False, "submitted", 4, 1.0)
    EvaluationDirectory(directory, {"env": "mini"}).record(again, episode(0))
    (outcome, _) = read(directory, "eval/eval")["outcomes"]
    assert (outcome["graded"], outcome["resolved"], outcome["turns_mean"]) == (2, 1, 3.0)
    assert [sample["resolved"] for sample in outcome["samples"]] == [True, False]
    resources = Resources([directory])
    before = resources.stamps()
    (directory / "report.json").write_text("{}")
    after = resources.stamps()
    assert {path for path in after if after[path] != before[path]} == {"0/steps/eval", "0/eval/eval"}
    (directory / "results.jsonl").write_text("nonsense\n")
    assert any("not a result of an evaluation" in note for note in read(directory, "run")["notes"])


def test_a_directory_that_is_read_only_is_not_written_to(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    everything = Resources([run])
    for page in everything.pages():
        assert "error" not in everything.read(page)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_directory_that_is_deleted_while_it_is_viewed_is_one_line(run: Path) -> None:
    resources = Resources([run])
    pages = [*resources.pages(), "0/t/1-0", "0/live"]
    shutil.rmtree(run)
    resources.stamps()
    for page in pages[1:]:
        assert resources.read(page)["error"] == {"kind": "absent", "text": f"{run}: no longer exists"}
    assert resources.read("runs")["runs"][0]["state"] == "empty"


def test_an_empty_directory_is_a_run_without_anything(tmp_path: Path) -> None:
    found = read(tmp_path, "run")
    assert (found["kind"], found["state"], found["filed"]) == ("empty", "empty", [])
    assert read(tmp_path, "metrics")["notes"] == ["no step has finished yet"]
    with pytest.raises(UserError, match="not a directory"):
        Resources([tmp_path / "absent"])


@pytest.mark.parametrize(
    "path",
    ["", "x", "9/run", "0", "0/", "0/foo", "0/t/1", "0/t/1-x", "0/t/..-1", "0/steps/../1", "0/routes/1-0/x", "0/t"],
)
def test_an_unknown_path_is_one_line(run: Path, path: str) -> None:
    assert Resources([run]).read(path)["error"]["kind"] in ("unknown", "absent")


def test_hostile_text_is_json(tmp_path: Path) -> None:
    hostile = "</script>\x00\x1b[31m\u202e\ud800"
    turn = replace(episode(0).turns[0], text=hostile, arguments={"n": 10**30, hostile: [hostile]})
    odd = replace(episode(0), turns=(turn,), task_id=hostile, patch=hostile)
    write_trajectories(tmp_path, 1, [Group(hostile, (odd,))])
    found = read(tmp_path, "t/1-0")
    assert (found["turns"][0]["arguments"]["n"], found["patch"][-1]) == (str(10**30), "?")
    assert "error" not in read(tmp_path, "trajectories")


def test_each_branch_has_its_own_turns_detail_and_routes(tmp_path: Path) -> None:
    """The second branch shares 5 tokens with the first, and samples other 7 after 7."""
    directory = branched(tmp_path)
    found = read(directory, "t/1-0")
    assert [turn["branch"] for turn in found["turns"]] == [0, 0, 1]
    root, retry = found["branches"]
    assert (root["parent"], root["cause"], len(root["tokens"])) == (None, "start", 14)
    assert (retry["parent"], retry["shared"], retry["cause"], retry["sampled"]) == (0, 5, "rewrite", [[7, 14]])
    assert retry["versions"] == [[7, 14, "7"]]
    assert read(directory, "trajectories", branches="2..")["columns"]["tokens"] == [28]
    (whole,) = read_trajectories(directory, 1)[0].trajectories
    for number, name in enumerate(("1-0", "1-0.1")):
        kept, shown = detail_of(directory, 1, 0, number), found["branches"][number]["detail"]
        assert np.array_equal(np.array(shown["gap_without_replay"], np.float16), kept.gap_without_replay)
        layers = np.argwhere(kept.differs_without_replay.layers).tolist()
        assert read(directory, f"routes/{name}/map")["differs_without_replay"] == layers
        assert read(directory, f"routes/{name}")["experts"] == whole.branches[number].routing.experts.tolist()
    for name in ("1-0.2", "1-0.x"):
        assert error(directory, f"routes/{name}/map") == f"absent: {name}: 1-0 has 2 branches, numbered from 0"


def test_a_trajectory_of_no_turn(tmp_path: Path) -> None:
    strip = replace(trajectory(0.0), loss_mask=np.zeros(5, bool), logprobs=np.zeros(5, np.float32), versions=())
    empty = [TrainingDecision(TrainingStatus.EMPTY, 0.0)]
    write_trajectories(tmp_path, 1, [Group("t", (strip,))], decisions=empty, details={})
    (branch,) = read(tmp_path, "t/1-0")["branches"]
    assert (branch["sampled"], branch["versions"], branch["logprobs"], branch["detail"]) == ([], [], [], None)


def test_a_run_whose_process_lives_on_this_host_is_running(run: Path) -> None:
    for host, state in ((socket.gethostname(), "running"), ("elsewhere", "stopped")):
        (run / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": host}))
        assert read(run, "run")["state"] == state


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("fuzzed")
    write_step(directory, 1)
    return directory, next(read_rows(rows_path(step_stem(directory, 1))))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_row_is_shown_or_is_one_line(row: tuple[Path, dict[str, Any]], data: st.DataObject) -> None:
    directory, whole = row
    key = data.draw(st.sampled_from(sorted(whole)))
    changed = {**whole, key: data.draw(JSON)}
    trajectories = directory / "trajectories"
    (trajectories / "step-000002.jsonl.zst").write_bytes(encode_rows([changed])[0])
    shutil.copy(trajectories / "step-000001.safetensors", trajectories / "step-000002.safetensors")
    resources = Resources([directory])
    for page in ("runs", "0/run", "0/trajectories", "0/steps/2", "0/t/2-0", "0/routes/2-0", "0/routes/2-0/map"):
        assert resources.body(page)
