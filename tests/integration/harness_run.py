"""A training run whose agent program works in real boxes, over a scripted engine; all else is the real thing.

A group's first episode makes the task's true fix and the others nothing, so that there is something to learn.

    python harness_run.py FOLDER [section.key=value ...]

``FOLDER/asked`` has a line for each request that reached the engine. Where ``FOLDER/hold`` is, none is answered.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_rl.config import EngineConfig, HarnessConfig, RunConfig
from agent_rl.config.loader import load_config
from agent_rl.controller.rollout_runtime import Workshop, World, open_workshop
from agent_rl.controller.state import RunState
from agent_rl.controller.train import TrainingRun, run_to_the_end
from agent_rl.controller.trainer_restarts import Restarts
from agent_rl.endpoint.episode import agent_binds
from agent_rl.endpoint.server import Gateway, open_gateway
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import TurnGate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.engine.sleep import EngineSleep
from agent_rl.engine.utilization import EngineLoad
from agent_rl.models.spec import ModelFacts, read_facts
from agent_rl.monitoring.console import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.limiter import Limiter
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Completion, TokenIds
from agent_rl.utils.http import AsyncHttp
from tools import ToolCall
from tools.formats import ToolCallFormat, tool_format


class Scripted:
    """The engine, as a run asks for it; it publishes by taking the step's number as its version."""

    def __init__(
        self, folder: Path, facts: ModelFacts, workshop: Workshop, renderer: ChatRenderer, fmt: ToolCallFormat
    ) -> None:
        self.facts, self.fleet, self.gate, self.load = facts, Fleet(), TurnGate(), EngineLoad()
        self.sleep = EngineSleep(self.fleet, self.gate, {}, EngineConfig(), AsyncHttp(1.0))
        self._folder, self._workshop, self._renderer, self._format = folder, workshop, renderer, fmt
        self._answers = ScriptedEngine(self._turn, layout=facts.layout)
        self._sessions: dict[str, list[str]] = defaultdict(list)

    async def publish(self, step: int) -> dict[str, float]:
        self._answers.weight_version = str(step)
        return {}

    async def until(self, look: Any) -> Any:
        """No further engine comes."""
        await asyncio.Event().wait()

    async def generate(self, *asked: Any, session: str, **options: Any) -> Completion:
        with (self._folder / "asked").open("a") as file:
            file.write(f"{session}\n")
        if (self._folder / "hold").exists():
            await asyncio.Event().wait()
        return await self._answers.generate(*asked, session=session, **options)

    def _turn(self, session: str, turn: int, tokens: TokenIds) -> Sequence[int]:
        name = session.rpartition("-")[0]
        sessions = self._sessions[name]
        if session not in sessions:
            sessions.append(session)
        task = next(task for task in self._workshop.tasks("train") if task.id == name)
        fix = ToolCall("bash", {"command": f"git apply <<'END'\n{self._workshop.env.gold(task)}END"})
        call = fix if (turn, session) == (0, sessions[0]) else ToolCall("bash", {"command": "true"})
        text = self._format.render(call)
        return [*self._renderer._encoder.encode(text), self._renderer.end_of_turn_id]


async def main(folder: Path, overrides: Sequence[str]) -> None:
    config = load_config(folder / "config.yaml", overrides)
    state, harness = RunState(config), config.rollout.harness
    assert harness is not None
    async with (
        RayTrainer(config) as trainer,
        open_gateway(harness.dialects) as gateway,
        open_workshop(config, display := Display(config.name), agent_binds(gateway, harness)) as workshop,
    ):
        world = open_scripted(folder, config, workshop, gateway)
        marked = with_mark(config, harness)

        def begin() -> TrainingRun:
            run = TrainingRun(marked, state, display, world, trainer)
            run.sync = world.engine  # type: ignore[assignment]
            return run

        with display:
            await run_to_the_end(begin, Restarts(config.train.restarts))


def open_scripted(folder: Path, config: RunConfig, workshop: Workshop, gateway: Gateway) -> World:
    renderer, fmt = ChatRenderer(config.model), tool_format(config.rollout.tool_format)
    engine: Any = Scripted(folder, read_facts(config.model), workshop, renderer, fmt)
    return World(workshop, engine, renderer, fmt, Limiter(config.rollout.concurrency), gateway)


def with_mark(config: RunConfig, harness: HarnessConfig) -> RunConfig:
    """``config`` with the mark of this start's processes in the environment of its program, which a box keeps off."""
    marked = harness.model_copy(update={"env": {"TEST_MARK": os.environ["TEST_MARK"]}})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"harness": marked})})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
