"""The quickstart's agent as a separate program: it equals the built-in loop, and real tasks grade it."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from support.endpoint_sessions import Saying

from agent_rl.commands.policy import Policy, pick_tasks
from agent_rl.config import HarnessConfig, RunConfig
from agent_rl.config.loader import MODELS, load_config
from agent_rl.controller import preflight
from agent_rl.controller.rollout_runtime import open_rollout_runtime, open_task_runtime
from agent_rl.endpoint import session as session_module
from agent_rl.endpoint.episode import HarnessRun
from agent_rl.endpoint.messages import ChatRequest
from agent_rl.endpoint.server import serve_endpoint
from agent_rl.endpoint.session import HarnessRenderer, Session
from agent_rl.monitoring.console import Display
from agent_rl.render import ChatRenderer
from agent_rl.rollout.conversation_tree import ChatMessage, Node
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.scripted_policies import SOLVERS
from agent_rl.types import Branch, Trajectory
from envs import Task
from tools import tool_format

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "endpoint" / "programs" / "quickstart_agent.py"
HARNESS = HarnessConfig(command=shlex.join([sys.executable, str(PROGRAM)]), location="host")
TASKS = 256

pytestmark = [pytest.mark.bubblewrap, pytest.mark.exhaustive]


def with_program(tmp_path: Path) -> RunConfig:
    overrides = [f"runs_dir={tmp_path}", "name=harness", "engine.port=0", "rollout.temperature=0"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    config = config.model_copy(update={"model": MODELS["tiny-moe"]})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"harness": HARNESS})})


def differing(native: Trajectory, driven: Trajectory) -> list[str]:
    """The parts in which the two differ."""
    assert native.routing is not None
    assert driven.routing is not None
    pairs = {name: (getattr(native, name), getattr(driven, name)) for name in ("tokens", "loss_mask", "reward")}
    pairs |= {"routes": (native.routing.experts, driven.routing.experts), "branches": (1, len(driven.branches))}
    return [name for name, (one, other) in pairs.items() if not np.array_equal(one, other)]


@pytest.mark.sglang
@pytest.mark.timeout(3600)
async def test_the_program_equals_the_built_in_loop(tmp_path: Path) -> None:
    config = with_program(tmp_path)
    checked = preflight.run(config)
    rules = EpisodeRules.from_config(config)
    async with open_rollout_runtime(checked, tmp_path / "logs", Display("harness"), routes=True) as runtime:
        driven_by_program = runtime.runner(rules)
        tasks = await pick_tasks(Policy(runtime.task_runtime, driven_by_program), "heldout", TASKS)
        wrong: dict[str, list[str]] = {}
        for task in tasks:  # one at a time: what shares a batch would change the last bits of logits
            loop = run_episode(runtime.task_runtime.env, task, runtime.engine, runtime.renderer, runtime.format, rules)
            native = await loop
            driven = await asyncio.wait_for(driven_by_program(task), 120)
            if found := differing(native, driven):
                wrong[task.id] = found
        assert not wrong


@pytest.mark.sglang
async def test_a_reply_sampled_in_pieces_until_a_stop_sequence_is_the_beginning_of_the_whole_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PIECE", 2)
    config = with_program(tmp_path)
    checked = preflight.run(config.model_copy(update={"engine": config.engine.model_copy(update={"dtype": "float32"})}))
    rules = EpisodeRules.from_config(checked.config)
    async with open_rollout_runtime(checked, tmp_path / "logs", Display("harness"), routes=True) as runtime:
        rendering = HarnessRenderer(runtime.renderer, runtime.format, describe_tools=False)
        (task,) = await pick_tasks(Policy(runtime.task_runtime, runtime.runner(rules)), "heldout", 1)
        async with runtime.task_runtime.env.start(task) as episode:
            messages = [ChatMessage(m["role"], m["content"]) for m in episode.messages]

        async def sample(stops: tuple[str, ...]) -> tuple[Node, str, Branch]:
            session = Session(f"stops {stops}", runtime.engine, rendering, rules, 4000)
            node = session.begin(ChatRequest(messages, [], 60, False, "m", stops=stops))
            await session.sampling(node)
            session.tree.deliver(node)
            assert node.spoken is not None
            return node, node.spoken.text, session.tree.branches()[0]

        whole, text, all_of_it = await sample(())
        late = range(len(text) // 2, len(text) - 6)
        stop = next(text[at : at + 6] for at in late if text.index(text[at : at + 6]) == at)
        part, shown, some_of_it = await sample((stop,))
        assert (part.stopped, shown) == (stop, text[: text.index(stop)].strip())
        assert session_module.PIECE < len(part.sampled) < len(whole.sampled)
        assert part.sampled == whole.sampled[: len(part.sampled)]
        np.testing.assert_allclose(part.logprobs, whole.logprobs[: len(part.logprobs)], atol=1e-4)
        assert all_of_it.routing is not None
        assert some_of_it.routing is not None
        rows = part.end - 1
        assert np.array_equal(some_of_it.routing.experts[:rows], all_of_it.routing.experts[:rows])
        assert some_of_it.routes_missing == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("policy", "reward"), [("gold", 1.0), ("noop", 0.0)])
async def test_the_true_fix_of_a_real_task_is_rewarded(tmp_path: Path, policy: str, reward: float) -> None:
    config = load_config(ROOT / "configs" / "real.yaml", [f"runs_dir={tmp_path}"])
    rules = EpisodeRules.from_config(config).override(harness=HARNESS, max_tokens=1 << 20, max_new_tokens=1 << 20)
    renderer, fmt = ChatRenderer(MODELS["tiny-moe"]), tool_format("hermes")
    async with open_task_runtime(config, Display("real")) as task_runtime, serve_endpoint() as endpoint:

        async def run(task: Task) -> Trajectory:
            calls = SOLVERS[policy](task_runtime.env, task)
            engine = Saying(renderer, [fmt.render(call) for call in calls])
            return await HarnessRun(endpoint, 1 << 20, task_runtime.env, task, engine, renderer, fmt, rules).run()

        tasks = await pick_tasks(Policy(task_runtime, run), "train", None)
        ended = [await run(task) for task in tasks]
    assert {trajectory.reward for trajectory in ended} == {reward}, [trajectory.error for trajectory in ended]
    assert all(len(trajectory.branches) == 1 for trajectory in ended)
