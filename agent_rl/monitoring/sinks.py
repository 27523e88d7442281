"""Metric sinks besides ``metrics.jsonl``: TensorBoard files, Weights & Biases, MLflow.

Each sink uses the service's own library, imported at the first step. Address, key and mode come from that library's
environment variables (``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``, ...). A resumed run continues the same run of
the service and writes repeated steps again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agent_rl.config import MonitoringConfig, RunConfig, SinkName
from agent_rl.errors import UserError

_PACKAGES: Mapping[SinkName, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "agent-rl[wandb]"),
    "mlflow": ("mlflow", "agent-rl[mlflow]"),
}


class Sink(Protocol):
    """Receives the metrics of each step. Steps increase, except after a resume from a checkpoint."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkRun:
    """A run as a sink sees it: directory, permanent id and config."""

    directory: Path
    run_id: str
    config: RunConfig

    @property
    def name(self) -> str:
        """The run's name in the services."""
        return self.config.monitoring.run_name or self.config.name


class TensorBoard:
    """Event files in the directory ``tensorboard`` of a run."""

    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter  # slow import (protobuf)

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. Charts use the global step as axis, because the service's counter cannot go back."""

    def __init__(self, run: SinkRun) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=run.config.monitoring.project,
            name=run.name,
            group=run.config.monitoring.group,
            tags=run.config.monitoring.tags,
            id=run.run_id,
            resume="allow",
            dir=str(run.directory),
        )
        # A run that was resumed with other values has the newest; W&B refuses such values in init.
        self._run.config.update(run.config.model_dump(mode="json"), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow in the experiment ``monitoring.project``."""

    def __init__(self, run: SinkRun) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        monitoring = run.config.monitoring
        project, tags = monitoring.project, {"agent_rl.run_id": run.run_id, **dict.fromkeys(monitoring.tags, "")}
        if monitoring.group is not None:
            tags["group"] = monitoring.group
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        existing = self._client.search_runs([number], f"tags.`agent_rl.run_id` = '{run.run_id}'", max_results=1)
        self._run = existing[0] if existing else self._client.create_run(number, run_name=run.name, tags=tags)
        if not existing:
            self._client.log_dict(self._run.info.run_id, run.config.model_dump(mode="json"), "config.yaml")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(values["time/ended"] * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run.info.run_id)


def sink_factories(run: SinkRun) -> dict[str, Callable[[], Sink]]:
    """Factories of the configured sinks, called at the first step."""
    factories: Mapping[SinkName, Callable[[], Sink]] = {
        "tensorboard": partial(TensorBoard, run.directory),
        "wandb": partial(WeightsAndBiases, run),
        "mlflow": partial(MLflow, run),
    }
    return {name: factories[name] for name in run.config.monitoring.sinks}


def check_sinks(monitoring: MonitoringConfig) -> None:
    """Raises UserError if a sink's library is not installed."""
    for name in monitoring.sinks:
        module, extra = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise UserError(f"monitoring.sinks: {name} requires a library that is not installed: pip install '{extra}'")
