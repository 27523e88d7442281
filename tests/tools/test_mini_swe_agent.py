"""mini-swe-agent's calls and answers, against what its own templates make of the same outputs (recorded)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox import Sandbox, SandboxSpec
from tools import ParseFailure, ToolCall, tool_format
from tools.mini_swe_agent import mini_swe_agent_tools

RECORDED = json.loads((Path(__file__).parent / "mini-swe-agent-recorded.json").read_text())
BLOCK = "```mswea_bash_command\n{}\n```"
FORMAT = tool_format("mini-swe-agent")
NO_SANDBOX: Any = SimpleNamespace(id="none", spec=SandboxSpec())


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (f"THOUGHT: look.\n\n{BLOCK.format('ls -la')}", "ls -la"),
        (BLOCK.format("\n  ls\npwd  \n"), "ls\npwd"),
        ("```mswea_bash_command  \n\nls\n``` and more", "ls"),
        (BLOCK.format("cat <<'EOF'\n``\nEOF"), "cat <<'EOF'\n``\nEOF"),
    ],
)
def test_one_block_is_a_call(text: str, command: str) -> None:
    assert FORMAT.parse(text) == ToolCall("bash", {"command": command})
    assert FORMAT.parse(FORMAT.render(ToolCall("bash", {"command": command}))) == ToolCall("bash", {"command": command})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *((text, 0) for text in ("no block", "```bash\nls\n```", "```mswea_bash_command ls```")),
        (BLOCK.format("a") + BLOCK.format("b"), 2),
    ],
)
def test_another_number_of_blocks_gets_the_recorded_error(text: str, count: int) -> None:
    assert FORMAT.parse(text) == ParseFailure(RECORDED["format_errors"][str(count)])


@pytest.mark.bubblewrap
async def test_observations_are_those_recorded(sandbox: Sandbox) -> None:
    tools = mini_swe_agent_tools(sandbox, timeout=20.0)
    for case in RECORDED["observations"]:
        result = await tools.call(ToolCall("bash", {"command": case["command"]}))
        assert result.text == case["text"]
        assert result.failed == (case["returncode"] != 0)
    result = await tools.call(ToolCall("bash", {"command": "echo $PAGER $LESS; nothing-such; echo after"}))
    assert result.text == (
        "<returncode>0</returncode>\n<output>\ncat -R\nbash: line 1: nothing-such: command not found\nafter\n</output>"
    )
    late = await mini_swe_agent_tools(sandbox, timeout=0.5).call(ToolCall("bash", {"command": "echo begun; sleep 60"}))
    named = "Command ['bash', '-c', 'echo begun; sleep 60'] timed out after 0.5 seconds"
    assert late.text == RECORDED["late"].replace("LATE", named)


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("command", "submitted"),
    [
        ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo diff", True),
        ("printf '\\n  COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT  '", True),
        ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; false", False),
        ("echo well; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", False),
    ],
)
async def test_a_first_line_submits(sandbox: Sandbox, command: str, submitted: bool) -> None:
    assert (await mini_swe_agent_tools(sandbox).call(ToolCall("bash", {"command": command}))).submitted is submitted


async def test_there_is_one_tool() -> None:
    tools = mini_swe_agent_tools(NO_SANDBOX)
    result = await tools.call(ToolCall("python", {"command": "1"}))
    assert (result.failed, result.text) == (True, "there is one tool, bash, with the argument 'command'")
