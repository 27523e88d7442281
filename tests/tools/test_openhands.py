"""OpenHands' calls and answers, against what its own converter and editor made of the same (recorded)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox import Sandbox, SandboxSpec
from tools import ParseFailure, ToolCall, tool_format
from tools.openhands import openhands_tools
from tools.openhands.toolset import CONTINUE, _check_arguments

RECORDED = json.loads((Path(__file__).parent / "openhands-recorded.json").read_text())
FORMAT = tool_format("openhands")
NO_SANDBOX: Any = SimpleNamespace(id="none", spec=SandboxSpec())


@pytest.mark.parametrize("case", RECORDED["calls"])
async def test_calls_are_read_as_recorded(case: dict[str, Any]) -> None:
    parsed = FORMAT.parse(case["text"])
    if "error" in case:
        assert isinstance(parsed, ToolCall)
        answer = await openhands_tools(NO_SANDBOX).call(parsed)
        assert (answer.failed, answer.text) == (True, f"{case['error']}\n[Error occurred in processing last action]")
    elif "name" in case:
        assert isinstance(parsed, ToolCall)
        assert (parsed.name, _check_arguments(parsed)) == (case["name"], case["arguments"])
        assert FORMAT.parse(FORMAT.render(parsed)) == parsed
    else:
        assert parsed == ParseFailure(CONTINUE)


@pytest.mark.bubblewrap
async def test_the_editors_answers_are_those_recorded(sandbox: Sandbox) -> None:
    await sandbox.write_files({f"/testbed/{path}": text.encode() for path, text in RECORDED["files"].items()})
    tools = openhands_tools(sandbox, timeout=20.0)
    for case in RECORDED["edits"]:
        text = (await tools.call(ToolCall("str_replace_editor", case["arguments"]))).text
        expected = f"EXECUTION RESULT of [str_replace_editor]:\n{case['text']}\n"
        if case["arguments"]["path"] == "/testbed" and "view_range" not in case["arguments"]:
            text, expected = ("\n".join(sorted(listing.split("\n"))) for listing in (text, expected))
        assert text == expected.replace("[Errno 2] ", ""), case["arguments"]


@pytest.mark.bubblewrap
async def test_the_shell_keeps_its_state_and_shows_its_prompt(sandbox: Sandbox) -> None:
    tools = openhands_tools(sandbox, timeout=1.0)

    async def run(command: str) -> str:
        text = (await tools.call(ToolCall("execute_bash", {"command": command}))).text
        return re.sub(r"\[Python Interpreter: \S+\]|\r\n(?=\n\w+@)", "<python>", text)

    head, tail = "EXECUTION RESULT of [execute_bash]:\n", "@openhands-workspace:"
    user = (await sandbox.exec("id -un", timeout=10)).text.strip()
    mark = "#" if user == "root" else "$"
    assert await run("printf 'a\\nb\\n'; false") == (
        f"{head}printf 'a\\nb\\n'; false\r\na\r\nb<python>\n{user}{tail}/testbed {mark} \n"
        "[Command finished with exit code 1]"
    )
    assert f"{user}{tail}/usr {mark} \n[Command finished with exit code 0]" in await run("export WORD=kept; cd /usr")
    assert "echo $WORD >&2\r\nkept<python>" in await run("echo $WORD >&2")
    assert "[Command timed out after 1 seconds. SIGINT was sent to interrupt the command.]" in await run("sleep 60")
    assert "echo $WORD\r\nkept<python>" in await run("echo $WORD")
