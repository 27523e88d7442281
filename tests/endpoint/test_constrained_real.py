"""Constrained replies of the real SGLang server with the shipped model: calls in every format, and exact log-probs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.endpoint_sessions import CHAT, MODEL, served

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.render import ChatRenderer
from tools.formats import TOOL_FORMATS

pytestmark = [pytest.mark.sglang, pytest.mark.exhaustive, pytest.mark.timeout(1800)]
ENGINE_PYTHON = Path(__file__).parents[2] / ".venv-engine" / "bin" / "python"
CALLS = 200
SUBMIT = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}
PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"enum": ["ls", "pwd -P", "cat a b"]},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]},
        "seconds": {"type": "integer"},
    },
    "required": ["command", "lines", "options"],
}
"""No text of its own, so that only white space between tokens could take a call to the length limit. A call has up to
270 tokens of the shipped tokenizer, in the format deepseek-dsml."""
RUN = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS, "strict": True}}


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    limits = {"max_total_tokens": 16384, "max_running_requests": 16, "threads": 1, "request_timeout": 120.0}
    return EngineConfig(python=str(ENGINE_PYTHON), device="cpu", dtype="float32", **limits)


@pytest.fixture(scope="module")
def server(engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EngineServer(engine_config, MODEL, tmp_path_factory.mktemp("engine") / "engine.log")
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
async def engine(server: str, engine_config: EngineConfig) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine([server], read_model_spec(MODEL), engine_config, masks=True) as client:
        yield client


@pytest.mark.parametrize("fmt", [name for name in TOOL_FORMATS.built_in if name != "mini-swe-agent"])
async def test_forced_calls_follow_their_schema_and_end(engine: SGLangEngine, renderer: ChatRenderer, fmt: str) -> None:
    def valid(name: str, arguments: dict[str, Any]) -> bool:
        schema = PARAMETERS if name == "bash" else SUBMIT["function"]["parameters"]
        return Draft202012Validator({**schema, "additionalProperties": False}).is_valid(arguments)

    replies = await forced_replies(engine, renderer, fmt, [RUN, SUBMIT])
    assert Counter(reply["finish_reason"] for reply in replies) == {"tool_calls": CALLS}
    calls = [call["function"] for reply in replies for call in reply["message"]["tool_calls"]]
    assert all(valid(call["name"], json.loads(call["arguments"])) for call in calls)
    assert {call["name"] for call in calls} == {"bash", "submit"}


async def forced_replies(
    engine: SGLangEngine, renderer: ChatRenderer, fmt: str, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The choices of :data:`CALLS` requests that force a call, 16 at a time."""
    slots = asyncio.Semaphore(16)
    async with served(renderer, engine=engine, fmt=fmt, max_new_tokens=512, max_turns=CALLS) as opened:

        async def one(number: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": f"Say {number}."}]
            body = {"messages": messages, "tools": tools, "tool_choice": "required"}
            async with slots:
                response = await opened.client.post(CHAT, json=body, timeout=600)
            (choice,) = response.json()["choices"]
            return choice

        return await asyncio.gather(*(one(number) for number in range(CALLS)))
