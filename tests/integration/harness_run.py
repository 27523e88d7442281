"""A training run whose agent program works in real sandboxes, over a scripted engine; all else is the real thing.

A group's first episode makes the task's true fix and the others nothing, so that there is something to learn.

    python harness_run.py DIR [section.key=value ...]

``DIR/requests`` has a line for each request that reached the engine. While ``DIR/hold`` exists, none gets a response.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.scripted_engine import ScriptedEngine

from agent_rl.config import EngineConfig, HarnessConfig, RunConfig
from agent_rl.config.loader import load_config
from agent_rl.controller.checkpoints import TrainerRestarts
from agent_rl.controller.rollout_runtime import RolloutRuntime, TaskRuntime, open_task_runtime
from agent_rl.controller.run_state import RunState
from agent_rl.controller.train import TrainingRun, run_to_last_step
from agent_rl.endpoint.episode import agent_binds
from agent_rl.endpoint.server import EndpointServer, serve_endpoint
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.utilization import EngineUtilization
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.monitoring.console import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.group import Limiter
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Completion, TokenIds
from agent_rl.utils.http import AsyncHttp
from tools import ToolCall
from tools.formats import ToolCallFormat, tool_format


class Scripted:
    """The engine, as a run asks for it; it publishes by taking the step's number as its version."""

    def __init__(
        self, directory: Path, model_spec: ModelSpec, runtime: TaskRuntime, renderer: ChatRenderer, fmt: ToolCallFormat
    ) -> None:
        self.model_spec, self.fleet, self.gate, self.load = model_spec, Fleet(), GenerationGate(), EngineUtilization()
        self.fleet.add("starting")  # one that never comes up
        self.sleep = EngineSleep(self.fleet, self.gate, {}, EngineConfig(), AsyncHttp(1.0))
        self._directory, self._task_runtime, self._renderer, self._format = directory, runtime, renderer, fmt
        self._answers = ScriptedEngine(self._turn, layout=model_spec.layout)
        self._sessions: dict[str, list[str]] = defaultdict(list)

    async def publish(self, step: int) -> dict[str, float]:
        self._answers.weight_version = str(step)
        return {}

    async def generate(self, *arguments: Any, session: str, **options: Any) -> Completion:
        with (self._directory / "requests").open("a") as file:
            file.write(f"{session}\n")
        if (self._directory / "hold").exists():
            await asyncio.Event().wait()
        return await self._answers.generate(*arguments, session=session, **options)

    def _turn(self, session: str, turn: int, tokens: TokenIds) -> Sequence[int]:
        name = session.rpartition("-")[0]
        sessions = self._sessions[name]
        if session not in sessions:
            sessions.append(session)
        task = next(task for task in self._task_runtime.tasks("train") if task.id == name)
        fix = ToolCall("bash", {"command": f"git apply <<'END'\n{self._task_runtime.env.gold(task)}END"})
        call = fix if (turn, session) == (0, sessions[0]) else ToolCall("bash", {"command": "true"})
        text = self._format.render(call)
        return [*self._renderer._encoder.encode(text), self._renderer.end_of_turn_id]


async def main(directory: Path, overrides: Sequence[str]) -> None:
    config = load_config(directory / "config.yaml", overrides)
    state, harness = RunState(config), config.rollout.harness
    assert harness is not None
    async with (
        RayTrainer(config) as trainer,
        serve_endpoint(harness.dialects) as endpoint,
        open_task_runtime(config, display := Display(config.name), agent_binds(endpoint, harness)) as task_runtime,
    ):
        runtime = open_scripted(directory, config, task_runtime, endpoint)
        marked = with_mark(config, harness)

        def begin() -> TrainingRun:
            run = TrainingRun(marked, state, display, runtime, trainer)
            run.sync = runtime.engine  # type: ignore[assignment]
            return run

        with display:
            await run_to_last_step(begin, TrainerRestarts(config.train.restarts))


def open_scripted(
    directory: Path, config: RunConfig, task_runtime: TaskRuntime, endpoint: EndpointServer
) -> RolloutRuntime:
    renderer = ChatRenderer(config.model)
    fmt = tool_format(config.rollout.tool_format or renderer.tool_format)
    engine: Any = Scripted(directory, read_model_spec(config.model), task_runtime, renderer, fmt)
    return RolloutRuntime(task_runtime, engine, renderer, fmt, Limiter(config.rollout.concurrency), endpoint)


def with_mark(config: RunConfig, harness: HarnessConfig) -> RunConfig:
    """``config`` with the mark of this start's processes in the environment of its program, which a sandbox keeps
    off."""
    marked = harness.model_copy(update={"env": {"TEST_MARK": os.environ["TEST_MARK"]}})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"harness": marked})})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
