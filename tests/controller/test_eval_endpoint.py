"""``agent-rl eval`` over a chat endpoint: a server on this machine, real sandboxes, the command in a process of its
own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.local_server import serving

from tools import ToolCall
from tools.formats import tool_format

pytestmark = [pytest.mark.bubblewrap, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ToolCall("finish", {"command": "submit"})


async def evaluate(url: str, directory: Path, *options: str) -> tuple[int | None, str, list[str]]:
    """Evaluate model "m" at ``url`` on two tasks; exit code, standard output and the lines of standard error."""
    command = ["eval", "configs/quickstart.yaml", "--policy", url, "--model", "m", "--tasks", "2", *options]
    command = [sys.executable, "-m", "agent_rl.cli", *command, f"runs_dir={directory}", "engine.retries=0"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=-1, stderr=-1)
    out, error = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), error.decode().strip().splitlines()


def answer_with(message: dict[str, Any], asked: list[dict[str, Any]]) -> Any:
    async def handle(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        asked.append(body)
        return 200, orjson.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})

    return handle


def read_report(directory: Path) -> Any:
    (report,) = directory.glob("quickstart/eval/*-m-heldout/report.json")
    return json.loads(report.read_text())


@pytest.mark.parametrize("kind", ["text", "native"])
async def test_the_model_receives_its_tools(tmp_path: Path, kind: str) -> None:
    """Although the quickstart's own model knows them: ``describe_tools`` is false in its config."""
    asked: list[dict[str, Any]] = []
    function = {"name": SUBMIT.name, "arguments": json.dumps(SUBMIT.arguments)}
    native = {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    message = native if kind == "native" else {"content": tool_format("xml").render(SUBMIT)}
    async with serving(answer_with(message, asked)) as url:
        code, out, errors = await evaluate(f"{url}/v1", tmp_path, "--tool-calls", kind, "--request", "seed=7")
    assert code == 0, (out, errors)
    opening = asked[-1]
    assert opening["seed"] == 7
    described = opening["messages"][0]["content"]
    if kind == "native":
        assert "finish" in {tool["function"]["name"] for tool in opening["tools"]}
        assert "<function=" not in described
    else:
        assert "Write a call as\n<function=NAME>" in described
    assert read_report(tmp_path)["stops"] == {"submitted": 2}


async def test_nothing_graded_is_no_success_and_leaves_the_directory_free(tmp_path: Path) -> None:
    async def refuse(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        short = len(body["messages"]) == 1  # the question whether it is ready
        return (200, b'{"choices": []}') if short else (400, b'{"message": "messages: no system message, please"}')

    async with serving(refuse) as url:
        code, _, errors = await evaluate(f"{url}/v1", tmp_path, "--out", str(tmp_path / "out"))
    assert code == 1
    assert errors[-1].startswith("error: none of 2 tasks could be graded; 2 of them: EngineRejected: ")
    assert errors[-1].endswith("no system message, please")
    async with serving(answer_with({"content": tool_format("xml").render(SUBMIT)}, [])) as url:
        code, out, errors = await evaluate(f"{url}/v1", tmp_path, "--out", str(tmp_path / "out"), "--greedy")
    assert code == 0, (out, errors)
