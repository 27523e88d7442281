"""Agent programs as their makers publish them, in a task's sandbox without a network: one branch, tokens as sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.agent_programs import AGENTS, ROOT
from support.endpoint_sessions import Saying
from support.endpoint_sessions import drive as drive_episode
from tokenizers import Tokenizer

from agent_rl.config import HarnessConfig
from agent_rl.config.loader import install_model, load_config
from agent_rl.endpoint.server import EndpointServer
from agent_rl.render import ChatRenderer
from agent_rl.types import BranchCause, StopReason, Trajectory
from sandbox import SandboxPool, open_backend
from tools import ToolCall, tool_format

MINI = "mini-swe-agent", "mini-swe-agent"
CLAUDE = "claude-code", "claude-code/node_modules/@anthropic-ai/claude-code-linux-x64"
CODEX = "codex", "codex/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
WORDS = "mini-swe-agent/litellm/litellm_core_utils/tokenizers/anthropic_tokenizer.json"
SUMMARY = "<summary>A summary.</summary>"
ASKED = "CONTEXT CHECKPOINT COMPACTION", "REMINDER: Do NOT call any tools"
CONTEXT = 200_000  # the shipped tokenizer has 1,024 tokens: prompts are long

pytestmark = pytest.mark.bubblewrap


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    opened = SandboxPool(open_backend("bubblewrap", run_id="programs"))
    yield opened
    await opened.close()


def harness(name: str, directory: str) -> HarnessConfig:
    """The harness of the shipped config, with the program that the tests installed."""
    found = load_config(ROOT / "configs" / f"harness-{name}.yaml").rollout.harness
    assert found is not None
    return found.model_copy(update={"directory": AGENTS / directory})


def calling(*calls: tuple[str, dict[str, object]]) -> str:
    return "\n".join(tool_format("hermes").render(ToolCall(name, arguments)) for name, arguments in calls)


@pytest.fixture
def run_program(say: Any, drive: Any, renderer: ChatRenderer, pool: SandboxPool) -> Callable[..., Any]:
    """Runs a program with an engine that says ``said``, and checks its one branch."""

    async def run(name: str, directory: str, *said: str) -> Trajectory:
        engine = say(*said)
        trajectory = await drive(engine, harness(name, directory), pool, max_tokens=CONTEXT)
        assert (trajectory.stop, trajectory.error) == (StopReason.SUBMITTED, "")
        assert [turn.text for turn in trajectory.turns] == list(said)
        assert len(trajectory.branches) == 1
        assert trajectory.harness == {"rewrites": 0, "retries": 0, "echo_differs": 0}
        sampled = [token for text in said for token in [*renderer._encoder.encode(text), renderer.end_of_turn_id]]
        assert trajectory.tokens[trajectory.loss_mask].tolist() == sampled
        assert engine.scripted.rows_sent == len(trajectory.tokens) - 1, "each row is sent once"
        assert trajectory.routes_missing == 0
        assert "b/made.txt" in trajectory.patch
        return trajectory

    return run


@pytest.mark.skipif(not (AGENTS / MINI[1]).is_dir(), reason="mini-swe-agent is not installed (make agents)")
async def test_mini_swe_agent(run_program: Any) -> None:
    said = [
        "<think>\nlook\n</think>\n\nFirst I look. " + calling(("bash", {"command": "ls"})),
        calling(("bash", {"command": "echo 'a b' >made.txt"}), ("bash", {"command": "cat made.txt"})),
        "Done. " + calling(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
    ]
    trajectory = await run_program(*MINI, *said)
    assert "a b" in trajectory.turns[1].observation


@pytest.mark.exhaustive
async def test_claude_code(run_program: Any) -> None:
    """It adds arguments to the edit, and offers the tool that it found in all later requests."""
    said = [
        "<think>\nlook\n</think>\n\nFirst I look. " + calling(("Bash", {"command": "ls", "description": "Lists"})),
        calling(
            ("Bash", {"command": "echo 'a b' >made.txt", "description": "Writes"}),
            ("Bash", {"command": "cat made.txt", "description": "Reads"}),
        ),
        calling(("ToolSearch", {"query": "select:WebFetch", "max_results": 1})),
        calling(("Edit", {"file_path": "/testbed/none", "old_string": "a", "new_string": "b"})),
        "<think>\nso\n</think>\n\nDone.",
    ]
    trajectory = await run_program(*CLAUDE, *said)
    assert "a b" in trajectory.turns[1].observation
    assert '"name":"WebFetch"' in trajectory.turns[2].observation
    assert "File does not exist" in trajectory.turns[3].observation


@pytest.mark.exhaustive
async def test_claude_code_with_a_sub_agent(say: Any, drive: Any, renderer: ChatRenderer, pool: SandboxPool) -> None:
    agent = {"description": "look", "prompt": "say hi", "subagent_type": "general-purpose", "run_in_background": False}
    said = [calling(("Agent", agent)), "hi", "Done."]
    engine = say(*said)
    trajectory = await drive(engine, harness(*CLAUDE), pool, max_tokens=CONTEXT)
    assert (trajectory.stop, [turn.text for turn in trajectory.turns]) == (StopReason.SUBMITTED, said)
    assert [branch.cause for branch in trajectory.branches] == [BranchCause.START, BranchCause.TOOLS]
    assert [renderer.decode(branch.tokens[branch.loss_mask].tolist()) for branch in trajectory.branches] == [
        f"{said[0]}<|im_end|>{said[2]}",
        said[1],
    ]


@pytest.mark.exhaustive
async def test_codex(run_program: Any) -> None:
    said = [
        "<think>\nlook\n</think>\n\nFirst I look. " + calling(("exec_command", {"cmd": "ls"})),
        calling(("exec_command", {"cmd": "echo 'a b' | tee made.txt"}), ("exec_command", {"cmd": "pwd"})),
        "<think>\nso\n</think>\n\nDone.",
    ]
    trajectory = await run_program(*CODEX, *said)
    assert "a b" in trajectory.turns[1].observation


class Summarizing(Saying):
    """Answers a request for a summary by one, and other requests by ``said``."""

    def __init__(self, renderer: ChatRenderer, said: Sequence[str]) -> None:
        super().__init__(renderer, [SUMMARY, *said])
        self._decode, self._summaries = renderer.decode, 0

    def _next(self, session: str, turn: int, tokens: Sequence[int]) -> Sequence[int]:
        asked = any(phrase in self._decode(tokens[-1000:]) for phrase in ASKED)
        self._summaries += asked
        return self._said[0 if asked else 1 + turn - self._summaries]


@pytest.fixture
def words(tmp_path: Path) -> ChatRenderer:
    """The shipped model's renderer with the 65,000 tokens of a tokenizer that mini-swe-agent's packages contain."""
    install_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(AGENTS / WORDS))
    tokenizer.normalizer = tokenizer.post_processor = None
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    end = {"eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(end))
    return ChatRenderer(tmp_path / "model")


@pytest.mark.exhaustive
@pytest.mark.skipif(not (AGENTS / WORDS).exists(), reason="mini-swe-agent is not installed (make agents)")
@pytest.mark.parametrize(
    ("program", "call", "calls"),
    [
        (CLAUDE, ("Bash", {"command": "seq 1 300", "description": "counts"}), 2),
        (CODEX, ("exec_command", {"cmd": "seq 1 4000"}), 3),
    ],
    ids=["claude-code", "codex"],
)
async def test_a_program_compacts_before_its_context_is_full(
    endpoint: EndpointServer, words: ChatRenderer, pool: SandboxPool, program: Any, call: Any, calls: int
) -> None:
    engine, limits = Summarizing(words, [*[calling(call)] * calls, "Done."]), {"max_tokens": 16_000}
    trajectory = await drive_episode(endpoint, words, engine, harness(*program), pool, **limits, max_new_tokens=1000)
    said = [turn.text for turn in trajectory.turns]
    print(program[0], [(turn.prompt_tokens, turn.text[:20]) for turn in trajectory.turns])
    assert (trajectory.stop, trajectory.error) == (StopReason.SUBMITTED, "")
    assert [text for text in said if text != SUMMARY] == [*[calling(call)] * calls, "Done."]
    assert calling(call) in said[said.index(SUMMARY) :], "it goes on"
    assert trajectory.turns[-1].prompt_tokens < max(turn.prompt_tokens for turn in trajectory.turns)
    sampled = sum(turn.completion_tokens for turn in trajectory.turns)
    assert sum(branch.sampled_tokens for branch in trajectory.branches) == sampled, "the summary is trained"
