"""OpenHands' calls and answers, against what its own converter and editor made of the same (recorded)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import Sandbox, SandboxSpec, open_backend
from tools import ParseFailure, ToolCall, tool_format
from tools.openhands import openhands_tools
from tools.openhands.format import CONTINUE
from tools.openhands.toolset import _check_arguments

RECORDED = json.loads((Path(__file__).parent / "openhands-recorded.json").read_text())
FORMAT = tool_format("openhands")


@pytest.mark.parametrize("case", RECORDED["calls"])
async def test_calls_are_read_as_there(case: dict[str, Any]) -> None:
    class NoSandbox:
        id, spec = "none", SandboxSpec()

    parsed = FORMAT.parse(case["text"])
    if "error" in case:
        assert isinstance(parsed, ToolCall)
        answer = await openhands_tools(NoSandbox()).call(parsed)  # type: ignore[arg-type]
        assert (answer.failed, answer.text) == (True, f"{case['error']}\n[Error occurred in processing last action]")
    elif "name" in case:
        assert isinstance(parsed, ToolCall)
        assert (parsed.name, _check_arguments(parsed)) == (case["name"], case["arguments"])
        assert FORMAT.parse(FORMAT.render(parsed)) == parsed
    else:
        assert parsed == ParseFailure(CONTINUE)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    backend = open_backend("bubblewrap", run_id="tests-openhands")
    try:
        yield await backend.start(SandboxSpec(workdir="/testbed"))
    finally:
        await backend.close()


@pytest.mark.bubblewrap
async def test_the_editor_answers_as_there(sandbox: Sandbox) -> None:
    await sandbox.write_files({f"/testbed/{path}": text.encode() for path, text in RECORDED["files"].items()})
    tools = openhands_tools(sandbox, timeout=20.0)
    for case in RECORDED["edits"]:
        text = (await tools.call(ToolCall("str_replace_editor", case["arguments"]))).text
        expected = f"EXECUTION RESULT of [str_replace_editor]:\n{case['text']}\n"
        if case["arguments"]["path"] == "/testbed" and "view_range" not in case["arguments"]:
            text, expected = ("\n".join(sorted(listing.split("\n"))) for listing in (text, expected))
        assert text == expected.replace("[Errno 2] ", ""), case["arguments"]


@pytest.mark.bubblewrap
async def test_the_shell_goes_on_and_shows_its_prompt(sandbox: Sandbox) -> None:
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
