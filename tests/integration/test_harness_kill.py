"""A controller that is killed while agent programs in sandboxes wait for replies: the next start begins their episodes
anew, and trains each once."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_run import Life, write_config
from support.journal_rows import read_journal

from agent_rl.config.loader import install_model
from agent_rl.controller.async_rollout.task_ledger import faults, gaps, read_ledger
from agent_rl.endpoint.server import DIRECTORY
from agent_rl.monitoring.metrics_log import read_metrics

pytestmark = [pytest.mark.megatron, pytest.mark.bubblewrap, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

PROGRAMS = Path(__file__).parents[1] / "endpoint" / "programs"
GROUP = 2


def write_harness_config(directory: Path) -> None:
    """One step, in which two episodes of one task are a group."""
    install_model(directory / "model")
    harness = {"command": "python3 /opt/agent-rl/harness/talk.py obeys", "directory": str(PROGRAMS)}
    lengths = {"max_tokens": 4000, "max_new_tokens": 2000}
    write_config(
        directory, directory / "model", steps=1, r3={"audit": 0}, sandbox={"backend": "bubblewrap"},
        env={"name": "mini", "options": {"train_tasks": 1, "cache_dir": str(directory / "tasks")}},
        rollout={"group_size": GROUP, "tasks_per_step": 1, "concurrency": GROUP, "harness": harness, **lengths},
        train={"microbatch_tokens": 8192, "lr": 1e-3, "lr_warmup_steps": 0, "mini_steps": 1, "weight_decay": 0.0},
    )  # fmt: skip


def programs(life: Life) -> list[str]:
    """The agent programs of a start that run in its sandboxes."""
    return [command for command in life.alive() if "harness/talk.py" in command]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files of the runs; its path is short, for Ray's sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="k-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


def test_a_killed_episode_in_a_sandbox_begins_anew_and_is_trained_once(tmp_path: Path, temporary: Path) -> None:
    write_harness_config(tmp_path)
    (tmp_path / "hold").touch()
    lives = [first := Life(tmp_path, script="harness_run.py")]
    try:
        assert first.until(lambda: len(requests(tmp_path)) == GROUP), first.text
        assert len(programs(first)) >= GROUP, "the programs wait for their replies in their sandboxes"
        first.kill()
        deadline = time.monotonic() + 60
        while left := first.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        held = requests(tmp_path)
        (tmp_path / "hold").unlink()
        lives.append(second := Life(tmp_path, script="harness_run.py"))
        assert second.finish() == 0, second.text
    finally:
        for life in lives:
            life.close()
    again = Counter(requests(tmp_path)[len(held) :])
    assert not set(held) & set(again), "an episode went on from one that was killed"
    assert sorted(again.values()) == [3] * GROUP
    (row,) = read_metrics(second.run)
    assert (row["rollout/trajectories"], row["train/updates"]) == (GROUP, 1)
    history = read_ledger(second.run)
    assert faults(second.run, history) == gaps(history) == []
    assert [path for path in (second.run / "journal").iterdir() if read_journal(path)] == []
    assert list(temporary.glob(f"{DIRECTORY}*")) == []
    assert second.left() == []


def requests(directory: Path) -> list[str]:
    """The sessions whose requests reached the engine, in order."""
    path = directory / "requests"
    return path.read_text().split() if path.exists() else []
