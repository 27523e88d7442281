"""The commands ``agent-rl serve`` and ``agent-rl eval --harness``, over an engine that says what it is given."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.endpoint_sessions import BASH, HELLO, MODEL, call
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.commands.serve import run_serve
from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from agent_rl.controller import rollout_runtime as runtime
from agent_rl.endpoint.server import EndpointServer
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.errors import UserError
from agent_rl.rollout.openai_policy import ChatEndpoint
from agent_rl.types import BranchCause
from agent_rl.viewer.api import Resources
from tools import ToolCall, tool_format

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
PROGRAM = Path(__file__).parent / "programs" / "quickstart_agent.py"


@pytest.fixture
def submitting(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands open an engine that submits at once."""
    engine = say(tool_format("xml").render(ToolCall("finish", {"command": "submit"})))

    @asynccontextmanager
    async def opened(config: Any, model: Path, model_spec: Any, *rest: Any, **options: Any) -> AsyncIterator[Any]:
        async def info() -> Any:
            return SimpleNamespace(dtype="float32")

        engine.model_spec, engine.gate, engine.urls, engine.info = model_spec, GenerationGate(), ["scripted"], info
        yield engine

    monkeypatch.setattr(runtime, "open_engine", opened)


@pytest.mark.bubblewrap
def test_eval_with_a_program(tmp_path: Path, submitting: None) -> None:
    program = shlex.join([sys.executable, str(PROGRAM)])
    options = ["--harness", program, "--tasks", "1", "--out", str(tmp_path / "out")]
    overrides = [f"model={MODEL}", f"runs_dir={tmp_path}", "env.options.heldout_tasks=1"]
    result = CliRunner().invoke(app, ["eval", str(QUICKSTART), *options, *overrides])
    assert result.exit_code == 0, result.output
    (outcome,) = json.loads((tmp_path / "out" / "report.json").read_text())["outcomes"]
    assert (outcome["stops"], outcome["turns_mean"], outcome["error"]) == (["submitted"], 1.0, "")


@pytest.mark.parametrize(
    ("harness", "line"),
    [
        ("command: ./agent, directory: agents/none", "directory: agents/none: no such directory; install the agent"),
        ("command: A=1 no-such-agent --yolo, location: host", "command: no-such-agent: no such program; install it"),
        (
            "command: /opt/agent-rl/harness/bin/agent, directory: docs",
            "command: /opt/agent-rl/harness/bin/agent: no su",
        ),
        ('command: "agent \'open"', "command: No closing quotation"),
    ],
)
def test_a_missing_program_is_reported_before_anything_starts(harness: str, line: str) -> None:
    overrides = [f"model={MODEL}", f"rollout.harness={{{harness}}}"]
    result = CliRunner().invoke(app, ["eval", str(QUICKSTART), *overrides])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"rollout.harness.{line}")


def test_a_program_with_another_policy_is_refused() -> None:
    result = CliRunner().invoke(app, ["eval", str(QUICKSTART), "--harness", "true", "--policy", "gold"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--harness: an agent program uses the config's model; leave --policy gold out"


class Printed:
    """What a command has printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str], command: asyncio.Task[None]) -> None:
        self._capsys, self._command, self.text = capsys, command, ""

    async def wait_for(self, text: str) -> None:
        async with asyncio.timeout(20):
            while text not in self.text:
                assert not self._command.done(), self.text
                await asyncio.sleep(0.01)
                self.text += self._capsys.readouterr().out


@asynccontextmanager
async def serving(
    config: RunConfig, capsys: pytest.CaptureFixture[str], **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str], Printed]]:
    """A client of ``agent-rl serve``, its variables, and what it prints."""
    command = asyncio.create_task(run_serve(config, **{"port": 0, "record": None, "upstream": None, **options}))
    printed = Printed(capsys, command)
    try:
        await printed.wait_for("export AGENT_RL_MAX_OUTPUT_TOKENS")
        await printed.wait_for("serving, until")
        env = dict(line.split("export ")[1].split("=", 1) for line in printed.text.splitlines() if "export " in line)
        async with httpx.AsyncClient(base_url=env["OPENAI_BASE_URL"], timeout=20) as client:
            yield client, env, printed
    finally:
        command.cancel()
        await asyncio.wait({command})


@pytest.mark.bubblewrap
async def test_serve_prints_the_environment_of_its_endpoint(
    tmp_path: Path, submitting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(QUICKSTART, [f"model={MODEL}", f"runs_dir={tmp_path}"])
    async with serving(config, capsys) as (client, env, _):
        assert env["AGENT_RL_CONTEXT_WINDOW"] == str(config.rollout.max_tokens)
        headers = {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        body = {"model": env["AGENT_RL_MODEL"], "messages": HELLO}
        for _ in range(config.rollout.max_turns + 1):
            answer = await client.post("/chat/completions", json=body, headers=headers)
            assert "submit" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.bubblewrap
async def test_serve_records_the_conversation_and_names_changed_replies(
    tmp_path: Path, submitting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(QUICKSTART, [f"model={MODEL}", f"runs_dir={tmp_path}"])
    async with serving(config, capsys, record=tmp_path / "tried") as (client, _, printed):
        said = (await client.post("/chat/completions", json={"messages": HELLO})).json()["choices"][0]["message"]
        changed = {"role": "assistant", "content": said["content"].replace("submit", "leave")}
        await client.post("/chat/completions", json={"messages": [*HELLO, changed, *HELLO]})
        await printed.wait_for("2 replies: ")
        await printed.wait_for("reply 1 came back changed: text ")
        assert "harness/branches 2" in printed.text
        assert "submit" in printed.text.split("came back changed")[1]
        shown = Resources([tmp_path / "tried"]).read("0/t/0-0")
        assert [branch["cause"] for branch in shown["branches"]] == ["start", "rewrite"]
        assert [turn["branch"] for turn in shown["turns"]] == [0, 1]


@pytest.mark.parametrize("stop", [None, "so"])
async def test_serve_puts_another_chat_endpoint_behind_the_endpoint(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str], stop: str | None
) -> None:
    """The upstream endpoint of the test is agent-rl's own; the first reply answers the check of its readiness."""
    config = load_config(QUICKSTART, [f"runs_dir={tmp_path}"])
    async with serve("ready", "<think>\nlook\n</think>\n\nFirst. " + call("ls"), "Done, so it is.") as model:
        upstream = ChatEndpoint(f"{model.url}/v1", "strong", native_tools=True)
        async with serving(config, capsys, upstream=upstream, record=tmp_path / "tried") as (client, _, printed):
            body = {"messages": [{"role": "system", "content": "s"}, *HELLO], "tools": [BASH]}
            message = (await client.post("/chat/completions", json=body)).json()["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("First.", "look")
            assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
            seen = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"}
            body = {**body, "messages": [*body["messages"], message, seen], "stop": stop}
            answer = (await client.post("/chat/completions", json=body)).json()["choices"][0]["message"]
            assert answer["content"] == ("Done," if stop else "Done, so it is.")
            await printed.wait_for("harness/branches 1, harness/inflation 1")
        request = model.session.tree.nodes[-1]
        assert model.session.tree.branches()[-1].cause is not BranchCause.RETRY
        assert request.new_messages[-1].text == "seen"


def test_an_upstream_needs_the_name_of_its_model() -> None:
    result = CliRunner().invoke(app, ["serve", str(QUICKSTART), "--upstream", "http://127.0.0.1:1/v1"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("--upstream and --model go together")


async def test_a_response_is_sent_at_once(endpoint: EndpointServer) -> None:
    """Its body waited 40 ms for the program to acknowledge its head."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}") as client:
        seconds = sorted([(await client.get("/v1/models")).elapsed.total_seconds() for _ in range(20)])
    assert seconds[5] < 0.03  # a connection's first answers are acknowledged at once
