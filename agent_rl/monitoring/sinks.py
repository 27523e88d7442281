"""Where a run's metrics go besides ``metrics.jsonl``: TensorBoard's files, Weights & Biases, MLflow.

Each service is spoken to by its own library, which is imported when the first step is written, and takes its address,
key and mode from that library's environment variables (``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``, ...). A run
that is resumed goes on in the same run of the service; steps that are done again are written there again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agent_rl.config import RunConfig, SinkName
from agent_rl.errors import UserError

_PACKAGES: Mapping[SinkName, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "agent-rl[wandb]"),
    "mlflow": ("mlflow", "agent-rl[mlflow]"),
}


class Sink(Protocol):
    """Takes the metrics of a step, ever later ones but where a run goes on from a checkpoint."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkRun:
    """What a service is told of a run: its directory, its id for good, its config."""

    directory: Path
    run_id: str
    config: RunConfig


class TensorBoard:
    """Event files in the directory ``tensorboard`` of a run."""

    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter  # imports protobuf: not needed by a reader

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases whose charts have the global step as their axis: its own counter only ever grows."""

    def __init__(self, run: SinkRun) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=run.config.monitoring.project,
            name=run.config.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.directory),
            config=run.config.model_dump(mode="json"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, in the experiment that ``monitoring.project`` names."""

    def __init__(self, run: SinkRun) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        project, tag = run.config.monitoring.project, {"agent_rl.run_id": run.run_id}
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        held = self._client.search_runs([number], f"tags.`agent_rl.run_id` = '{run.run_id}'", max_results=1)
        self._run = held[0] if held else self._client.create_run(number, run_name=run.config.name, tags=tag)
        if not held:
            self._client.log_dict(self._run.info.run_id, run.config.model_dump(mode="json"), "config.yaml")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(values["time/ended"] * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run.info.run_id)


def openers(run: SinkRun) -> dict[str, Callable[[], Sink]]:
    """The sinks of ``monitoring.sinks``, to be opened when the first step is written."""
    made: Mapping[SinkName, Callable[[], Sink]] = {
        "tensorboard": partial(TensorBoard, run.directory),
        "wandb": partial(WeightsAndBiases, run),
        "mlflow": partial(MLflow, run),
    }
    return {name: made[name] for name in run.config.monitoring.sinks}


def check_sinks(config: RunConfig) -> None:
    """Raises UserError where a sink's library is not installed."""
    for name in config.monitoring.sinks:
        module, extra = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise UserError(f"monitoring.sinks names {name}, whose library is not installed: pip install '{extra}'")
