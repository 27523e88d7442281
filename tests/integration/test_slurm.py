"""The script of ``agent-rl launch slurm`` on a real Slurm of two nodes, through every ending of a job.

The ordinary tests put a program in the run's place that saves at SIGTERM as a run does; the exhaustive ones train.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from killed_run import exact, write_config
from support.slurm_cluster import SlurmCluster, slurm_cluster

from agent_rl.commands.launch import SlurmJob, slurm_script
from agent_rl.config.loader import install_model, load_config
from agent_rl.controller.async_rollout.task_ledger import faults, gaps, read_ledger
from agent_rl.monitoring.metrics_log import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAVES = """
import json, pathlib, signal, sys, time
state = pathlib.Path("state.json")
steps = json.loads(state.read_text()) if state.exists() else []
print("resumes after", len(steps), flush=True)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
while len(steps) < int(sys.argv[1]):
    steps.append(len(steps) + 1)
    time.sleep(0.2)
    if stopped:
        state.write_text(json.dumps(steps))
        sys.exit(143)
state.write_text(json.dumps(steps))
sys.exit(int(sys.argv[2]))
"""

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as directory,
        slurm_cluster(Path(directory)) as cluster,
    ):
        yield cluster


def script(directory: Path, command: Sequence[object], *, nodes: int = 1, requeues: int = 20) -> Path:
    """The launcher's script with ``command`` in the place of ``agent-rl train``."""
    job = SlurmJob("5", nodes, (f"--chdir={directory}", "--output=log"), (f"export PYTHONPATH={ROOT}",), 60, requeues)
    text = slurm_script(load_config(ROOT / "configs" / "quickstart.yaml", ["engine.placement=ray"]), [], job)
    line = f"command=({shlex.join(map(str, command))})"
    text, count = re.subn(r"(?m)^command=\(/.*\)$", lambda _: line, text)
    assert count == 1
    path = directory / "run.sbatch"
    path.write_text(text)
    return path


def saves(directory: Path, steps: int, *, code: int = 0, requeues: int = 20) -> Path:
    (directory / "saves.py").write_text(SAVES)
    return script(directory, [sys.executable, "saves.py", steps, code], requeues=requeues)


def log(directory: Path) -> str:
    path = directory / "log"
    return path.read_text() if path.exists() else ""


def wait_for(text: str, directory: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while text not in log(directory):
        assert time.monotonic() < deadline, log(directory)
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def limited(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job that reaches its limit while the other tests run on the other node. Slurm checks limits once in a while,
    and sends the signal between 10 and 60 s after the start."""
    directory = tmp_path_factory.mktemp("limited")
    return cluster.submit(saves(directory, 200), "--time=1", "--signal=B:USR1@50"), directory


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_job_ends_with_the_exit_code_of_the_run(cluster: SlurmCluster, tmp_path: Path, code: int, state: str) -> None:
    job = cluster.submit(saves(tmp_path, 2, code=code))
    ended = cluster.ended(job, 60)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == (state, f"{code}:0", "0")


def test_preempted_job_requeues_itself_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.submit(saves(tmp_path, 20))
    wait_for("resumes after 0", tmp_path)
    (tmp_path / "short.sh").write_text("#!/bin/sh\nsleep 1\n")
    node = cluster.state(job)["NodeList"]
    urgent = cluster.submit(tmp_path / "short.sh", "--partition=high", "-w", node, "--exclusive", "--output=other")
    assert cluster.ended(urgent, 60)["JobState"] == "COMPLETED"
    ended = cluster.ended(job, 90)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(tmp_path)
    assert re.search(r"resumes after [1-9]", log(tmp_path))


@pytest.mark.long
def test_requeued_job_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.submit(saves(tmp_path, 20))
    wait_for("resumes after 0", tmp_path)
    cluster.call("scontrol", "requeue", job)
    ended = cluster.ended(job, 90)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(tmp_path)
    assert re.search(r"resumes after [1-9]", log(tmp_path))


def test_cancelled_job_saves_and_stays_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.submit(saves(tmp_path, 300))
    wait_for("resumes after 0", tmp_path)
    cluster.call("scancel", job)
    ended = cluster.ended(job, 60)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    assert (tmp_path / "state.json").exists(), log(tmp_path)


@pytest.mark.long
def test_job_requeues_itself_before_its_time_limit(cluster: SlurmCluster, limited: tuple[str, Path]) -> None:
    job, directory = limited
    ended = cluster.ended(job, 240)
    assert ended["JobState"] == "COMPLETED", log(directory)
    assert int(ended["Restarts"]) >= 1
    assert "requeues itself" in log(directory)
    assert re.search(r"resumes after [1-9]", log(directory))


def wait_for_step(directory: Path, start: int, timeout: float = 300) -> None:
    """Wait until the run has printed a line about a step in its ``start``-th start, from 1."""
    deadline = time.monotonic() + timeout
    while len(starts := log(directory).split(": starts on ")) <= start or not re.search(r"step \d+: ", starts[start]):
        assert time.monotonic() < deadline, log(directory)
        time.sleep(0.1)


def end_in_every_way(cluster: SlurmCluster, batch: Path) -> None:
    """Preempt, requeue, time out and cancel a job on two nodes, each in a step, then submit it until it ends."""
    run = batch.parent
    job = cluster.submit(batch, "--time=60", "--signal=B:USR1@120")
    wait_for_step(run, 1)
    (run / "short.sh").write_text("#!/bin/sh\nsleep 1\n")
    urgent = cluster.submit(run / "short.sh", "--partition=high", "--nodes=2", "--exclusive", "--output=other")
    assert cluster.ended(urgent, 120)["JobState"] == "COMPLETED"
    wait_for_step(run, 2)
    cluster.call("scontrol", "requeue", job)
    wait_for_step(run, 3)
    hours, minutes, seconds = map(int, cluster.state(job)["RunTime"].split(":"))
    limit = 60 * hours + minutes + 1 + (seconds > 0)  # 60 to 120 s from now
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    wait_for("caught USR1", run, 90)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_for_step(run, 4)
    assert cluster.state(job)["Restarts"] == "3"
    cluster.call("scancel", job)
    assert cluster.ended(job, 120)["JobState"] == "CANCELLED"
    assert cluster.ended(cluster.submit(batch, "--time=60"), 400)["JobState"] == "COMPLETED", log(run)
    assert log(run).count(": starts on ") == 5


@pytest.mark.exhaustive
@pytest.mark.megatron
def test_run_on_two_nodes_resumes_bit_for_bit(cluster: SlurmCluster, tmp_path: Path) -> None:
    install_model(tmp_path / "model")
    rows = []
    for name in ("undisturbed", "disturbed"):
        run = tmp_path / name
        write_config(run, tmp_path / "model", steps=30, checkpoint_every=2)
        command = ["env", f"PYTHONPATH={ROOT}:{ROOT / 'tests'}:{HERE}", sys.executable, HERE / "recorded_run.py", run]
        batch = script(run, [*command, "train.ray_address=auto"], nodes=2)
        if name == "disturbed":
            end_in_every_way(cluster, batch)
            assert "resuming from" in log(run), "no start found a checkpoint"
        else:
            assert cluster.ended(cluster.submit(batch), 300)["JobState"] == "COMPLETED", log(run)
        rows.append([exact(row) for row in read_metrics(run / "rec")])
        assert faults(run / "rec", read_ledger(run / "rec")) == gaps(read_ledger(run / "rec")) == []
    assert rows[0] == rows[1]


@pytest.mark.exhaustive
@pytest.mark.megatron
@pytest.mark.sglang
def test_quickstart_on_two_nodes_trains_through_every_ending(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path}", "train.steps=5", "train.checkpoint_every=1", "eval.tasks=0"]
    command = [sys.executable, "-m", "agent_rl.cli", "train", ROOT / "configs" / "quickstart.yaml", *overrides]
    end_in_every_way(cluster, script(tmp_path, [*command, "engine.placement=ray", "train.ray_address=auto"], nodes=2))
    run = tmp_path / "quickstart"
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5]
    assert faults(run, read_ledger(run)) == gaps(read_ledger(run)) == []
