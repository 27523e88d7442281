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
from support.endpoint_sessions import MODEL
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.commands.serve import run_serve
from agent_rl.config.loader import load_config
from agent_rl.controller import preflight
from agent_rl.controller import rollout_runtime as runtime
from agent_rl.endpoint.server import EndpointServer
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.errors import UserError
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


@pytest.mark.bubblewrap
async def test_serve_prints_the_environment_of_its_endpoint(
    tmp_path: Path, submitting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(QUICKSTART, [f"model={MODEL}", f"runs_dir={tmp_path}"])
    serving, printed = asyncio.create_task(run_serve(preflight.run(config), port=0)), ""
    try:
        async with asyncio.timeout(20):
            while "export AGENT_RL_MODEL" not in printed:
                assert not serving.done()
                await asyncio.sleep(0.01)
                printed += capsys.readouterr().out
        env = dict(line.split("export ")[1].split("=", 1) for line in printed.splitlines() if "export " in line)
        assert env["AGENT_RL_CONTEXT_WINDOW"] == str(config.rollout.max_tokens)
        headers = {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        body = {"model": env["AGENT_RL_MODEL"], "messages": [{"role": "user", "content": "u"}]}
        async with httpx.AsyncClient(headers=headers) as client:
            for _ in range(config.rollout.max_turns + 1):
                answer = await client.post(f"{env['OPENAI_BASE_URL']}/chat/completions", json=body)
                assert "submit" in answer.json()["choices"][0]["message"]["content"]
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def test_a_response_is_sent_at_once(endpoint: EndpointServer) -> None:
    """Its body waited 40 ms for the program to acknowledge its head."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}") as client:
        seconds = sorted([(await client.get("/v1/models")).elapsed.total_seconds() for _ in range(20)])
    assert seconds[5] < 0.03  # a connection's first answers are acknowledged at once
