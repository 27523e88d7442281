"""Episodes of ``mini`` in each family's conversation: real SGLang, real sandboxes, real Megatron, scripted turns.

The model is random, so the engine is made to sample the turns (see forced_tokens.py). Routes, log-probs, cached
prefixes and the end of a turn are those of decoding.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration_run import REAL
from scripted_server import ARGUMENTS, Sampled, ScriptedEngine
from support.contexts import context_of
from support.family_models import FAMILIES, write_model
from support.family_templates import FORMS

from agent_rl.config import EngineConfig, RolloutConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.render import ChatRenderer
from agent_rl.render.chat import Encoder
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.types import StopReason, Trajectory
from envs import Environment, Task
from envs.mini import MiniEnvironment
from envs.mini.generator import MiniTask, generate
from sandbox import SandboxSpec
from tools import ToolCall
from tools.formats import tool_format

torch = pytest.importorskip("torch", reason="needs the trainer environment")

pytestmark = [*REAL, pytest.mark.timeout(300)]

ENGINE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-engine/bin/python"
ORDINARY = ("gpt_oss", "qwen3_moe")
GAPS = {"olmoe": 1e-4}
"""As in tests/engine/test_families.py."""
LIMITS = RolloutConfig(describe_tools=False, max_turns=6, max_tokens=1000, max_new_tokens=200)
REMOVE = ToolCall("execute_bash", {"cmd": "rm *.py"})
SUBMIT = ToolCall("finish", {"command": "submit"})


@dataclass(frozen=True)
class Played:
    """An episode, and what the engine received and sampled in it."""

    trajectory: Trajectory
    responses: Sequence[Sampled]


class Author:
    """Writes turns as a model of the family would."""

    def __init__(self, kind: str, directory: Path) -> None:
        model = FORMS[kind].chat_model(kind)
        model.tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(model.template)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(model.eos_token_ids)}))
        self.control = FORMS[kind].control.split()
        self.renderer = ChatRenderer(directory)
        self.format = tool_format(self.renderer.tool_format)
        self._encoder = Encoder(model.tokenizer)

    @property
    def special(self) -> set[int]:
        return set(self._encoder.special.values())

    def turn(self, said: ToolCall | str, thought: str | None = None, *, ends: bool = True) -> list[int]:
        """The tokens of a turn. Without a ``thought`` it only closes thoughts that the prompt opened."""
        marks, end = self.renderer.reasoning, self.renderer.end_of_turn_id
        text = said if isinstance(said, str) else self.format.render(said)
        if thought is not None or marks.prompt_opens:
            following = "<|start|>assistant" if self.format.name == "harmony" else "\n\n"
            text = f"{'' if marks.prompt_opens else marks.open}{thought or ''}\n{marks.close}{following}{text}"
        tokens = self._encoder.encode(text)
        return tokens if tokens[-1] == end or not ends else [*tokens, end]

    def scripts(self, tasks: Sequence[MiniTask]) -> Iterator[list[list[int]]]:
        """The turns of an episode of each of five tasks."""
        views = [ToolCall("file_editor", {"command": "view", "path": f"/testbed/{task.path}"}) for task in tasks]
        fixes = [
            ToolCall("file_editor", {**view.arguments, "command": "str_replace", "old_str": t.old, "new_str": t.new})
            for view, t in zip(views, tasks, strict=True)
        ]
        yield [self.turn(call) for call in (views[0], fixes[0], SUBMIT)]
        thought = self.format.render(REMOVE).removesuffix("<|call|>")  # which would end the turn
        yield [self.turn(views[1], thought), self.turn(fixes[1]), self.turn(SUBMIT)]
        broken, view, _ = self.format.render(views[2]).partition("view")
        yield [self.turn(broken + view), self.turn(fixes[2]), self.turn(SUBMIT)]
        written = " ".join(f"{token[0]}''{token[1:]}" for token in self.control)
        yield [self.turn(call) for call in (ToolCall("execute_bash", {"cmd": f"echo '{written}'"}), views[3], SUBMIT)]
        yield [self.turn("so much to say " * 99, ends=False), self.turn(views[4]), self.turn(SUBMIT)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture
async def env(tasks: Path) -> AsyncIterator[Environment]:
    async with context_of("bubblewrap", SandboxSpec()) as context:
        made = MiniEnvironment(context, train_tasks=5, heldout_tasks=1, cache_dir=tasks)
        await made.prepare("train")
        yield made


@pytest.fixture(scope="module")
def world(megatron_shim: None) -> Iterator[None]:
    from support.megatron_world import world_of_one

    with world_of_one():
        yield


@pytest.mark.long
@pytest.mark.parametrize("kind", ORDINARY)
@pytest.mark.usefixtures("world")
async def test_scripted_episodes_are_trained_as_sampled(kind: str, env: Any, tmp_path: Path) -> None:
    await check_family(kind, env, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ORDINARY])
@pytest.mark.usefixtures("world")
async def test_scripted_episodes_of_every_other_family(kind: str, env: Any, tmp_path: Path) -> None:
    await check_family(kind, env, tmp_path)


async def check_family(kind: str, env: Any, directory: Path) -> None:
    """Play the five scripts; check what was executed, which tokens are trained, and that the trainer agrees."""
    model = write_model(directory / "model", kind, seed=0, vocab_size=1088)
    author = Author(kind, model)
    played = await play(author, model, env, directory / "engine.log")
    check_execution(author, [episode.trajectory for episode in played])
    for episode in played:
        check_loss_mask(author, episode)
    differing, gaps = compare_with_trainer(model, [episode.trajectory for episode in played])
    trained = sum(episode.trajectory.sampled_tokens for episode in played)
    turns = sum(len(episode.trajectory.turns) for episode in played)
    print(f"| `{kind}` | {author.format.name} | {turns} | {trained} | {differing} | {gaps.max():.1e} |")
    assert differing == 0
    assert gaps.mean() < GAPS.get(kind, 2e-5)


async def play(author: Author, model: Path, env: Any, log: Path) -> list[Played]:
    spec = read_model_spec(model)
    limits = {"max_total_tokens": 8192, "max_running_requests": 8, "request_timeout": 60.0}
    config = EngineConfig(python=str(ENGINE_PYTHON), device="cpu", dtype="float32", extra_args=ARGUMENTS, **limits)
    rules = EpisodeRules(LIMITS)

    async def episode(task: Task, turns: list[list[int]]) -> Played:
        async with ScriptedEngine(server.url, spec, config, turns) as engine:
            trajectory = await run_episode(env, task, engine, author.renderer, author.format, rules)
            return Played(trajectory, engine.responses)

    async with EngineServer(config, model, log) as server, SGLangEngine(server.url, spec, config):
        scripts = author.scripts(generate("train", 5, 0))
        return await asyncio.gather(*map(episode, env.tasks("train"), scripts))


def check_execution(author: Author, trajectories: Sequence[Trajectory]) -> None:
    assert [t.error for t in trajectories] == [""] * 5
    assert {t.stop for t in trajectories} == {StopReason.SUBMITTED}
    assert [t.reward for t in trajectories] == [1, 1, 1, 0, 0]
    called = [[turn.tool for turn in t.turns] for t in trajectories]
    editor, submit = "file_editor", "finish"
    assert called[:2] == [[editor, editor, submit]] * 2, "the call in the thought was not executed"
    assert called[2:] == [[None, editor, submit], ["execute_bash", editor, submit], [None, editor, submit]]
    _, thinking, malformed, printing, truncated = (t.turns[0] for t in trajectories)
    assert "rm *.py" in thinking.text
    assert thinking.thinking_tokens > 0
    assert malformed.parse_failure == malformed.observation != ""
    assert printing.observation == " ".join(author.control)
    assert (truncated.completion_tokens, truncated.parse_failure) == (LIMITS.max_new_tokens, truncated.observation)


def check_loss_mask(author: Author, episode: Played) -> None:
    """Exactly the tokens that the engine sampled are trained, and each prompt is the trajectory up to its turn."""
    trajectory, expected = episode.trajectory, np.zeros(len(episode.trajectory.tokens), bool)
    assert len(episode.responses) == len(trajectory.turns) >= 3
    markers = []
    for response, turn in zip(episode.responses, trajectory.turns, strict=True):
        begin, end = len(response.prompt), len(response.prompt) + len(response.tokens)
        assert trajectory.tokens[:begin].tolist() == response.prompt
        assert trajectory.tokens[begin:end].tolist() == response.tokens
        expected[begin:end] = True
        observed = trajectory.tokens[end : end + turn.observation_tokens].tolist()
        markers.append([token for token in observed if token in author.special])
        assert turn is trajectory.turns[-1] or observed
    assert np.array_equal(trajectory.loss_mask, expected)
    assert trajectory.routes_missing == 0
    if trajectory.turns[0].tool == "execute_bash":
        assert markers[0] == markers[1], "the control tokens that a tool printed are text"


def compare_with_trainer(model: Path, trajectories: Sequence[Trajectory]) -> tuple[int, Any]:
    """The routers of all rows that chose other experts than the engine, and the differences of the log-probs of
    sampled tokens, with the engine's routes."""
    from agent_rl.config import ParallelConfig
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

    policy = PolicyModel.build(model, ParallelConfig(), device=torch.device("cpu"))
    differing, gaps = 0, []
    for trajectory in trajectories:
        assert trajectory.routing is not None
        experts, present = trajectory.routing.experts, trajectory.routing.present
        batch = PackedBatch.from_sequences([torch.from_numpy(trajectory.tokens)])
        routes = PackedRoutes(torch.from_numpy(experts), torch.from_numpy(present))
        (own,) = policy.forward_logprobs([batch], None, record=True)
        (replayed,) = policy.forward_logprobs([batch], [routes], record=True)
        assert own.routes is not None
        assert replayed.routes is not None
        for used in (own.routes, replayed.routes):
            differing += int((np.sort(used.numpy()) != np.sort(experts))[present].any(-1).sum())
        mask = trajectory.loss_mask
        gaps.append(np.abs(replayed.logprobs.numpy() - trajectory.logprobs)[mask])
    return differing, np.concatenate(gaps)
