"""The default scaffold keeps its texts: the shipped model was trained with them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from agent_rl.config import DEFAULT_SCAFFOLD
from envs.mini import generate, to_record
from envs.mini.environment import initial_messages
from envs.scaffolds.default import AGENT_RL
from sandbox import SandboxSpec


class NoSandbox:
    id, spec = "none", SandboxSpec()


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def test_prompts_tools_and_results_are_those_of_the_shipped_model() -> None:
    assert AGENT_RL.name == DEFAULT_SCAFFOLD
    mini = [list(initial_messages(to_record(task).problem_statement)) for task in generate("train", 20, 0)]
    tools = AGENT_RL.tools(NoSandbox(), style="full", timeout=90.0)  # type: ignore[arg-type]
    assert digest(list(AGENT_RL.initial_messages("An {issue}.", "/testbed", "full"))) == "f58dd93bd59b69aa"
    assert digest(list(AGENT_RL.initial_messages("An {issue}.", "/testbed", "concise"))) == "01a04d7c91a55838"
    assert digest(mini) == "b1f0e8b030619b69"
    assert digest(list(tools.schemas())) == "26636a10a577dfd2"
    assert AGENT_RL.with_turn_note("text", 3, 50) == "text"
