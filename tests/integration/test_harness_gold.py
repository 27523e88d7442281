"""Real tasks over the harness endpoint: an agent program that makes the true fix, and one that submits at once."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from agent_rl.commands.policy import Policy, pick_tasks
from agent_rl.config import HarnessConfig
from agent_rl.config.builtin import MODELS
from agent_rl.config.loader import load_config
from agent_rl.controller.rollout_runtime import open_task_runtime
from agent_rl.endpoint.episode import HarnessRun
from agent_rl.endpoint.server import serve_endpoint
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.monitoring.console import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import SOLVERS
from agent_rl.types import Trajectory
from envs import Task
from r3.payload import RouteLayout
from tools import tool_format

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "endpoint" / "programs" / "quickstart_agent.py"

LAYOUT = RouteLayout(2, (0, 1), 32, 2)
pytestmark = [pytest.mark.bubblewrap, pytest.mark.exhaustive]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("policy", "reward"), [("gold", 1.0), ("noop", 0.0)])
async def test_real_tasks(tmp_path: Path, policy: str, reward: float) -> None:
    config = load_config(ROOT / "configs" / "real.yaml", [f"runs_dir={tmp_path}"])
    harness = HarnessConfig(command=shlex.join([sys.executable, str(PROGRAM)]), location="host")
    rules = EpisodeRules.from_config(config).override(harness=harness, max_tokens=1 << 20, max_new_tokens=1 << 20)
    renderer, fmt = ChatRenderer(MODELS["tiny-moe"]), tool_format("hermes")
    async with open_task_runtime(config, Display("real")) as task_runtime, serve_endpoint() as endpoint:

        async def run(task: Task) -> Trajectory:
            calls = SOLVERS[policy](task_runtime.env, task)
            said = [[*renderer._encoder.encode(fmt.render(call)), renderer.end_of_turn_id] for call in calls]
            engine = ScriptedEngine(lambda session, turn, tokens: said[turn], layout=LAYOUT)
            return await HarnessRun(endpoint, 1 << 20, task_runtime.env, task, engine, renderer, fmt, rules).run()

        tasks = await pick_tasks(Policy(task_runtime, run), "train", None)
        ended = [await run(task) for task in tasks]
    print(policy, len(ended), [trajectory.reward for trajectory in ended])
    assert {trajectory.reward for trajectory in ended} == {reward}, [trajectory.error for trajectory in ended]
    assert all(len(trajectory.branches) == 1 for trajectory in ended)
