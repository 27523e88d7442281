"""``agent-rl eval`` over a chat endpoint: a server on this machine, real sandboxes, the command in a process of its
own."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.local_server import serving
from typer.testing import CliRunner

from agent_rl.cli import app, main
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


def answer_with(message: dict[str, Any], asked: list[dict[str, Any]], **fields: Any) -> Any:
    async def handle(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        asked.append(body)
        return 200, orjson.dumps({"choices": [{"message": message, "finish_reason": "stop"}], **fields})

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


USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 60,
    "prompt_tokens_details": {"cached_tokens": 400},
    "completion_tokens_details": {"reasoning_tokens": 40},
}
PRICES = "- {model: 'other*', input: 9, output: 9}\n- {model: 'm*', input: 2, cached_input: 0.5, output: 10}\n"


async def test_the_report_has_the_tokens_that_the_endpoint_counted_and_their_cost(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    message = {"content": tool_format("xml").render(SUBMIT)}
    async with serving(answer_with(message, [], usage=USAGE)) as url:
        code, out, errors = await evaluate(f"{url}/v1", tmp_path, "--samples", "2", "--tasks", "3")
        assert code == 0, (out, errors)
        code, out, errors = await evaluate(
            f"{url}/v1", tmp_path, "--samples", "2", "--tasks", "3", "--prices", str(prices)
        )
    assert code == 0, (out, errors)
    report = read_report(tmp_path)
    each = {"requests": 2, "prompt": 2000, "completion": 120, "cached": 800, "reasoning": 80}
    assert [outcome["usage"] for outcome in report["outcomes"]] == [each] * 3
    assert report["usage"] == {name: 3 * count for name, count in each.items()}
    cost = (1200 * 2 + 800 * 0.5 + 120 * 10) / 1e6
    assert [outcome["cost"] for outcome in report["outcomes"]] == pytest.approx([cost] * 3)
    assert report["cost"] == pytest.approx(3 * cost)
    assert report["price"]["model"] == "m*"
    assert report["seconds_mean"] > 0
    assert (report["model"], report["requested"], report["available"] > 3) == ("m", 3, True)
    assert "6,000 in (2,400 cached), 360 out (240 reasoning)" in out
    assert "0.0120 USD" in out
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": "160"}).output
    assert re.search(r"cost .*\n(.*\n)*.* 0\.01 USD ", listed), listed


async def test_tokens_of_an_endpoint_that_counts_none_are_unknown(tmp_path: Path) -> None:
    async with serving(answer_with({"content": tool_format("xml").render(SUBMIT)}, [])) as url:
        code, out, errors = await evaluate(f"{url}/v1", tmp_path)
    assert code == 0, (out, errors)
    assert re.search("tokens .* unknown", out)
    assert read_report(tmp_path)["usage"] is None


@pytest.mark.parametrize(
    ("prices", "complaint"),
    [
        ("- {model: other, input: 1, output: 2}", "no pattern matches the model m; the patterns are other"),
        ("- {model: m, input: -1, output: 2}", "entry 0 input: Input should be greater than or equal to 0; expected"),
        ("m: 3", "Input should be a valid list; expected a YAML list of {model: PATTERN, input:"),
        ("- [", "cannot be read"),
    ],
)
def test_bad_prices_end_the_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prices: str, complaint: str
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(prices)
    command = ["eval", str(ROOT / "configs/quickstart.yaml"), "--policy", "http://127.0.0.1:9/v1", "--model", "m"]
    monkeypatch.setattr(sys, "argv", ["agent-rl", *command, "--prices", str(file), f"runs_dir={tmp_path}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2
    assert f"--prices {file}: {complaint}" in line
