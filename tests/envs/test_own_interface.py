"""The usual interface says what it said before there were others: the shipped model knows its prompts by heart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from agent_rl.config import OWN_SCAFFOLD
from envs.mini import generate, to_record
from envs.mini.environment import opening
from envs.scaffolds.own import AGENT_RL
from sandbox import SandboxSpec


class NoSandbox:
    id, spec = "none", SandboxSpec()


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def test_prompts_and_tools_are_those_of_ever() -> None:
    assert AGENT_RL.name == OWN_SCAFFOLD, "the config knows the name without the package"
    mini = [list(opening(to_record(task).problem_statement)) for task in generate("train", 20, 0)]
    tools = AGENT_RL.tools(NoSandbox(), style="full", timeout=90.0)  # type: ignore[arg-type]
    assert digest(list(AGENT_RL.opening("An {issue}.", "/testbed", "full"))) == "f58dd93bd59b69aa"
    assert digest(list(AGENT_RL.opening("An {issue}.", "/testbed", "concise"))) == "01a04d7c91a55838"
    assert digest(mini) == "b1f0e8b030619b69"
    assert digest(list(tools.schemas())) == "26636a10a577dfd2"


def test_nothing_is_added_to_what_tools_answer() -> None:
    assert AGENT_RL.with_remark("text", 3, 50) == "text"
    assert not AGENT_RL.fixed
    assert not AGENT_RL.defaults
