"""``agent-rl sft`` of the shipped model in processes of its own: kills, Ctrl-C, and what other commands do with it."""

from __future__ import annotations

import io
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from marked import ROOT, MarkedProcess, kill_rank
from rich.console import Console

from agent_rl.commands.runs import list_runs
from agent_rl.config.loader import MODELS, load_recorded
from agent_rl.controller.fork import fork
from agent_rl.controller.run_models import resolve_run
from agent_rl.monitoring.metrics_log import read_metrics

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

CLOCK = re.compile("^time/|per_second")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Path], MarkedProcess]]:
    """Starts ``agent-rl sft CONFIG``."""
    started: list[MarkedProcess] = []

    def begin(config: Path) -> MarkedProcess:
        command = ["-m", "agent_rl.cli", "sft", config]
        started.append(MarkedProcess(tmp_path, command, cwd=ROOT, path=[ROOT]))
        return started[-1]

    yield begin
    for process in started:
        process.close()
    deadline = time.monotonic() + 60
    while left := [line for process in started for line in process.alive()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def config_of(directory: Path, name: str, eval_every: int | None = None) -> Path:
    sft = {"data": [{"path": str(ROOT / "tests/captured/quickstart")}], "batch_rows": 16, "epochs": 2}
    sft |= {} if eval_every is None else {"eval_every": eval_every}
    train = {"lr": 1e-3, "checkpoint_every": 2, "device": "cpu"}
    held = {"validation_share": 0.2, "validation_every": 3}
    data = {"base": "quickstart", "name": name, "model": str(MODELS["tiny-moe"]), "runs_dir": str(directory)}
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**data, "sft": sft | held, "train": train, "eval": {"tasks": 4}}))
    return path


def wait_for_step(process: MarkedProcess, run: Path, step: int) -> None:
    wait_for(process, lambda: len(read_metrics(run)) >= step)


def wait_for(process: MarkedProcess, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert not process.ended, process.text
        assert time.monotonic() < deadline, process.text
        time.sleep(0.01)


def exact(run: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not CLOCK.search(name)} for row in read_metrics(run)]


def test_killed_run_resumes_bit_for_bit(start: Callable[[Path], MarkedProcess], tmp_path: Path) -> None:
    whole = start(config_of(tmp_path, "whole"))
    assert whole.process.wait(900) == 0, whole.text
    config, run = config_of(tmp_path, "killed"), tmp_path / "killed"
    for step, sign in ((3, signal.SIGKILL), (6, signal.SIGINT)):
        process = start(config)
        wait_for_step(process, run, step)
        process.process.send_signal(sign)
        code = process.process.wait(120)
        assert code == (-signal.SIGKILL if sign is signal.SIGKILL else 130), process.text
    assert "stopped; start again to resume" in process.text
    last = start(config)
    wait_for_step(last, run, 8)
    kill_rank(last.mark)
    assert last.process.wait(900) == 0, last.text
    assert f"resuming from {run}/checkpoints/step-" in last.text
    assert last.text.count("a trainer rank died: ") == 1
    assert exact(run) == exact(tmp_path / "whole")
    assert exact(run)[-1]["sft/epoch"] == 2
    for file in ("model/model.safetensors", f"checkpoints/step-{len(exact(run)):06d}/rank-00000.safetensors"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    check_other_commands(run, len(exact(run)))


@pytest.mark.sglang
@pytest.mark.bubblewrap
def test_run_killed_within_an_evaluation_resumes_bit_for_bit(
    start: Callable[[Path], MarkedProcess], tmp_path: Path
) -> None:
    whole = start(config_of(tmp_path, "whole", eval_every=1))
    assert whole.process.wait(1200) == 0, whole.text
    config, run = config_of(tmp_path, "killed", eval_every=1), tmp_path / "killed"
    evaluated = [int(key.partition("/")[0].removeprefix("step-")) for key in evaluations(tmp_path / "whole")]
    assert evaluated == [0, len(exact(tmp_path / "whole")) // 2, len(exact(tmp_path / "whole"))]
    for step in evaluated[:2]:
        process = start(config)
        wait_for(process, lambda step=step: (run / "weights" / f"step-{step:06d}" / "model.safetensors").exists())
        process.process.kill()
        process.process.wait(120)
    last = start(config)
    assert last.process.wait(1200) == 0, last.text
    assert exact(run) == exact(tmp_path / "whole")
    assert evaluations(run).keys() == evaluations(tmp_path / "whole").keys()
    assert list((run / "weights").iterdir()) == []
    assert (run / "model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()


def evaluations(run: Path) -> dict[str, Any]:
    return json.loads((run / "state.json").read_bytes())["evaluations"]


def check_other_commands(run: Path, steps: int) -> None:
    exported = resolve_run(Path(f"{run}@{steps}"), "model")
    assert (exported / "model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    forked = fork(run, str(steps), "longer", ["sft.epochs=3"])
    assert load_recorded(forked / "config.yaml").sft is not None
    assert len(read_metrics(forked)) == steps
    list_runs([run], console := Console(file=io.StringIO(), width=200))
    assert f"{steps} of {steps}" in console.file.getvalue()
    assert "finished" in console.file.getvalue()
