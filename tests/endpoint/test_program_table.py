"""The compatibility table of docs/how-to/agent-programs.md: each installed program takes an ordinary episode in a
sandbox without a network, and is trained on exactly the tokens that were sampled for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.agent_programs import PAGE, AgentProgram, page, programs

from agent_rl.render import ChatRenderer
from agent_rl.types import StopReason
from sandbox import SandboxPool, open_backend

CONTEXT = 200_000  # the shipped tokenizer has 1,024 tokens: prompts are long


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    opened = SandboxPool(open_backend("bubblewrap", run_id="table"))
    yield opened
    await opened.close()


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(), "run python -m support.agent_programs table"


@pytest.mark.exhaustive
@pytest.mark.bubblewrap
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
async def test_an_ordinary_episode(
    say: Any, drive: Any, renderer: ChatRenderer, pool: SandboxPool, program: AgentProgram
) -> None:
    if not program.installed:
        pytest.skip(f"not installed: python -m support.agent_programs install '{program.name}'")
    said = program.script()
    trajectory = await drive(say(*said), program.config(), pool, max_tokens=CONTEXT, time_limit=500.0)
    assert (trajectory.stop, trajectory.error) == (StopReason.SUBMITTED, "")
    assert "b/made.txt" in trajectory.patch
    assert len(trajectory.turns) == len(said)
    assert len(trajectory.branches) == program.branches
    assert sum(bool(turn.left_out) for turn in trajectory.turns) == program.side_requests
    assert trajectory.harness == {"rewrites": program.branches - 1, "retries": 0, "echo_differs": 0}
    sampled = [token for branch in trajectory.branches for token in branch.tokens[branch.loss_mask].tolist()]
    assert len(sampled) == sum(turn.completion_tokens for turn in trajectory.turns if not turn.left_out)
    if not program.says:  # what it says is not cut
        spoken = map(renderer._encoder.encode, said[program.side_requests :])
        assert sampled == [token for ids in spoken for token in [*ids, renderer.end_of_turn_id]]
    assert trajectory.routes_missing == 0
