"""Metrics of a run in the services beside TensorBoard, each by its own library and without a network.

The libraries are in no environment of the project; where they are: ``pytest -m exhaustive tests/test_sinks.py``.
Without them only the arguments are checked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from agent_rl.config import RunConfig
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.monitoring.sinks import SinkRun, check_sinks, sink_factories


@pytest.mark.parametrize(
    ("keys", "name", "group", "tags"),
    [
        ({}, "demo", None, ()),
        ({"run_name": "fresh", "group": "ablation", "tags": ["a", "b"]}, "fresh", "ablation", ("a", "b")),
    ],
)
def test_services_are_given_the_runs_name_group_and_tags(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    keys: dict[str, Any],
    name: str,
    group: str | None,
    tags: tuple[str, ...],
) -> None:
    wandb, client = MagicMock(), MagicMock()
    client.search_runs.return_value = []
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    monitoring = {"sinks": ["wandb", "mlflow"], **keys}
    config = RunConfig.model_validate({"name": "demo", "model": "m", "monitoring": monitoring})
    for sink in sink_factories(SinkRun(tmp_path, "abc123", config)).values():
        sink()
    sent = wandb.init.call_args.kwargs
    assert (sent["name"], sent["group"], sent["tags"], sent["id"]) == (name, group, tags, "abc123")
    recorded, how = wandb.init.return_value.config.update.call_args
    assert (recorded[0]["train"]["lr"], how) == (config.train.lr, {"allow_val_change": True})
    sent = client.create_run.call_args.kwargs
    grouped = {} if group is None else {"group": group}
    assert sent == {"run_name": name, "tags": {"agent_rl.run_id": "abc123", **dict.fromkeys(tags, ""), **grouped}}


def write(directory: Path, sink: str) -> None:
    """Steps 1 and 2, then, of the run resumed after step 1, steps 2 and 3."""
    data = {"name": "demo", "model": "m", "runs_dir": str(directory)}
    data |= {"monitoring": {"sinks": [sink], "project": "tests"}}
    config, lines = RunConfig.model_validate(data), list[str]()
    check_sinks(config.monitoring)
    config.run_dir.mkdir(exist_ok=True)
    for done in (0, 1):
        log = MetricsLog(config.run_dir, sink_factories(SinkRun(config.run_dir, "abc123", config)), lines.append)
        log.forget_after(done)
        for step in (done + 1, done + 2):
            log.append(step, {"reward/mean": step / 10 + done, "train/loss": float("nan")})
        log.close()
    assert lines == []


@pytest.mark.exhaustive
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, "wandb")
    files = sorted((tmp_path / "demo" / "wandb").glob("offline-run-*-abc123/run-abc123.wandb"))
    assert files
    assert any(b"reward/mean" in path.read_bytes() for path in files)


@pytest.mark.exhaustive
def test_mlflow_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write(tmp_path, "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, round(point.value, 1)) for point in history] == [(1, 0.1), (2, 0.2), (2, 1.2), (3, 1.3)]
