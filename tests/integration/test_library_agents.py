"""Agents of libraries that force calls or send stop sequences, with the shipped model on the real SGLang server: one
branch an episode, and a step of the real trainer with what was sampled.

The model chooses among the calls that each grammar allows. CodeAgent has no grammar, so the engine is made to sample
its turns (see forced_tokens.py).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration_run import REAL
from scripted_server import ARGUMENTS, ScriptedEngine
from support import endpoint_sessions
from support.agent_programs import AgentProgram, programs

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.config.loader import install_model
from agent_rl.endpoint.server import serve_endpoint
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.render import ChatRenderer
from agent_rl.types import Sample, StopReason, Trajectory, drawn_mask
from sandbox import SandboxPool, open_backend

pytestmark = [*REAL, pytest.mark.exhaustive, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
CONTEXT, MICROBATCH = 32768, 16384  # the shipped tokenizer has 1,024 tokens: prompts are long
SCRIPTED = "smolagents, CodeAgent"
NAMES = (SCRIPTED, "smolagents, ToolCallingAgent", "pydantic-ai, output_type", "langchain, structured output")
EPISODES = 4
"""Of each agent; the scripted one has one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a longer context."""
    directory = tmp_path_factory.mktemp("model") / "model"
    install_model(directory)
    config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    opened = SandboxPool(open_backend("bubblewrap", run_id="library-agents"))
    yield opened
    await opened.close()


def chosen(program: AgentProgram) -> Any:
    """``rollout.harness`` of the program, whose calls have choices as arguments."""
    harness = program.config()
    return harness.model_copy(update={"env": {**harness.env, "CHOICES": "1"}})


async def episodes(model: Path, config: EngineConfig, pool: SandboxPool, log: Path) -> dict[str, list[Trajectory]]:
    """Those of each agent."""
    spec, renderer, found = read_model_spec(model), ChatRenderer(model), dict[str, list[Trajectory]]()
    rows = {program.name: program for program in programs()}
    said = [[*renderer._encoder.encode(text), renderer.end_of_turn_id] for text in rows[SCRIPTED].script()]
    limits = {"max_tokens": CONTEXT, "max_new_tokens": 120, "time_limit": 240.0}
    async with (
        EngineServer(config, model, log) as server,
        SGLangEngine([server.url], spec, config, masks=True) as engine,
        ScriptedEngine(server.url, spec, config, said) as scripted,
        serve_endpoint() as endpoint,
    ):
        for name in NAMES:
            asked: Any = scripted if name == SCRIPTED else engine
            for _ in range(1 if name == SCRIPTED else EPISODES):
                episode = endpoint_sessions.drive(endpoint, renderer, asked, chosen(rows[name]), pool, **limits)
                found.setdefault(name, []).append(await episode)
    return found


def check_episodes(name: str, trajectories: list[Trajectory]) -> None:
    """Some end by their answer. These have one branch, which trains what was sampled."""
    ended = [each for each in trajectories if each.stop is StopReason.SUBMITTED]
    print(name, [(each.stop.value, len(each.turns), len(each.branches), each.error) for each in trajectories])
    assert ended
    for each in ended:
        assert each.harness == {"rewrites": 0, "retries": 0, "echo_differs": 0}
        (branch,) = each.branches
        assert branch.sampled_tokens == sum(turn.completion_tokens for turn in each.turns)
        assert (branch.routes_missing, branch.routing is None) == (0, False)


@pytest.mark.usefixtures("megatron_shim", "one_ray")
async def test_one_branch_an_episode_and_one_step_without_mismatch(
    model: Path, pool: SandboxPool, tmp_path: Path
) -> None:
    from agent_rl.train.ray_trainer import RayTrainer

    missing = [each.name for each in programs() if each.name in NAMES and not each.installed]
    if missing:
        pytest.skip(f"not installed: python -m support.agent_programs install '{missing[0]}'")
    limits = {"max_total_tokens": 65536, "threads": 1, "request_timeout": 120.0, "start_timeout": 600.0}
    python = str(ROOT / ".venv-engine/bin/python")
    engine = EngineConfig(python=python, device="cpu", dtype="float32", extra_args=ARGUMENTS, **limits)
    found = await episodes(model, engine, pool, tmp_path / "engine.log")
    samples, owners = [], []
    for name, trajectories in found.items():
        check_episodes(name, trajectories)
        for number, trajectory in enumerate(trajectories):
            for branch in trajectory.branches:
                advantage, at = (-1.0) ** len(owners), {"trajectory": 100 * NAMES.index(name) + number}
                parts = branch.tokens, branch.loss_mask, branch.logprobs, advantage, branch.routing
                samples.append(Sample(*parts, kept=branch.kept, **at))
                owners.append(name)
    train = {"device": "cpu", "microbatch_tokens": MICROBATCH, "lr": 1e-3}
    config = RunConfig.model_validate({"name": "test", "model": model, "engine": engine.model_dump(), "train": train})
    async with RayTrainer(config) as trainer:
        gaps: dict[str, list[float]] = {name: [] for name in NAMES}
        read = await trainer.routes(samples, replay=True, temperature=1.0)
        for name, sample, (mine, _) in zip(owners, samples, read, strict=True):
            drawn = drawn_mask(sample)
            gaps[name] += np.abs(mine[drawn] - sample.logprobs[drawn]).tolist()
        metrics = await trainer.step(samples, measure_without_replay=True)
    print({name: (len(gap), float(np.mean(gap)), max(gap)) for name, gap in gaps.items()})
    print({name: metrics[name] for name in sorted(metrics) if "mismatch" in name or "sampled" in name})
    assert all(np.mean(gap) < 5e-6 and max(gap) < 2e-4 for gap in gaps.values())
    assert metrics["train/updates"] == 1
    assert metrics["train/sampled_tokens"] == sum(drawn_mask(sample).sum() for sample in samples)
    assert (metrics["r3/coverage"], metrics["r3/router_mismatch"]) == (1, 0)
    assert metrics["mismatch/logprob_abs_diff"] < 5e-6
    assert metrics["mismatch/k3_kl"] < 1e-8
