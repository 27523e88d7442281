"""A chat endpoint as a policy: conversations survive the conversion to tokens; each failure has its own error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.local_server import serving
from support.memory_env import TASK, MemoryEnvironment

from agent_rl.commands.policy import PolicyChoice
from agent_rl.config import RunConfig
from agent_rl.errors import EngineRejected, EngineUnreachable, UserError
from agent_rl.rollout.chat_tokens import ChatTextRenderer, NativeToolCalls, read_messages, read_native
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.openai_policy import ChatEndpoint, ChatEngine
from agent_rl.types import FinishReason, SamplingParams, StopReason
from tools import ToolCall
from tools.formats import tool_format

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
PLAIN = EpisodeRules(routes=None)


@asynccontextmanager
async def endpoint(answer: Answer) -> AsyncIterator[str]:
    """An endpoint whose chat completions are ``answer``'s."""

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        status, said = answer(body)
        return status, orjson.dumps(said)

    async with serving(handle) as url:
        yield f"{url}/v1"


def said(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@given(st.lists(st.tuples(st.text(), st.text(min_size=1)), max_size=4), st.text(), st.text(min_size=1))
def test_a_conversation_is_read_back_as_it_was_written(turns: list[tuple[str, str]], system: str, user: str) -> None:
    renderer = ChatTextRenderer()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    tokens = renderer.initial_prompt(messages, None)
    for observation, answer in turns:
        tokens += [*answer.encode(errors="replace"), 256]
        tokens += renderer.observation(observation, stop=256)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    plain = [{**m, "content": m["content"].encode(errors="replace").decode()} for m in messages]
    assert read_messages(tokens) == plain


async def test_an_episode_over_an_endpoint() -> None:
    fmt, asked = tool_format("hermes"), []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        calls = [ToolCall("echo", {"text": "fix"}), ToolCall("submit", {})]
        return 200, said(fmt.render(calls[len(asked) - 1]))

    async with endpoint(answer) as url, ChatEngine(ChatEndpoint(url, "some-model"), timeout=5, retries=0) as engine:
        trajectory = await run_episode(MemoryEnvironment(), TASK, engine, ChatTextRenderer(), fmt, PLAIN)
    assert (trajectory.resolved, trajectory.stop) == (True, StopReason.SUBMITTED)
    assert asked[0]["model"] == "some-model"
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][2]["content"] == fmt.render(ToolCall("echo", {"text": "fix"}))
    assert asked[1]["messages"][3]["content"] == "fix"
    assert "echo" in asked[0]["messages"][0]["content"], "the tools are described in the system message"


async def ask(url: str, **options: Any) -> Any:
    tokens = ChatTextRenderer().initial_prompt([{"role": "user", "content": "hello"}], None)
    async with ChatEngine(ChatEndpoint(url, "m"), timeout=5, retries=2, backoff=0.001) as engine:
        return await engine.generate(tokens, SamplingParams(), session="s", **{"routes_from": None, **options})


async def test_each_kind_of_failure_has_its_own_error() -> None:
    count = 0

    def flaky(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal count
        count += 1
        return (503, {"error": "busy"}) if count < 3 else (200, said("cut", "length"))

    async with endpoint(flaky) as url:
        completion = await ask(url)
        assert (count, completion.finish, bytes(completion.tokens)) == (3, FinishReason.LENGTH, b"cut")
        with pytest.raises(EngineRejected, match="no routes"):
            await ask(url, routes_from=0)
    async with endpoint(lambda body: (400, {"error": {"message": "maximum context length is 10"}})) as url:
        assert (await ask(url)).finish is FinishReason.LENGTH
    too_long = (400, {"error": {"message": "Requested token count exceeds the maximum context length of 10 tokens"}})
    async with endpoint(lambda body: too_long if "max_tokens" in body else (200, said("the rest"))) as url:
        completion = await ask(url)
        assert (completion.finish, bytes(completion.tokens[:-1])) == (FinishReason.STOP, b"the rest")
    async with endpoint(lambda body: (200, {"choices": []})) as url:
        with pytest.raises(EngineRejected, match="no chat completion"):
            await ask(url)
    with pytest.raises(EngineUnreachable):
        await ask("http://127.0.0.1:9/v1")


def test_native_calls_are_sent_back_as_the_endpoint_made_them() -> None:
    renderer, schemas = ChatTextRenderer(native_tools=True), [{"type": "function", "function": {"name": "echo"}}]
    tokens = renderer.initial_prompt([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], schemas)
    called = 'I look.\n<tool_call>\n{"name": "echo", "arguments": {"text": "é"}}\n</tool_call>'
    for answer, observation in ((called, "é"), ("no call", "no tool call found"), (called, "é")):
        tokens += [*answer.encode(), 256, *renderer.observation(observation, stop=256)]
    fields = read_native(tokens)
    assert fields["tools"] == schemas
    calls = [message["tool_calls"][0] for message in fields["messages"] if "tool_calls" in message]
    assert [call["function"] for call in calls] == [{"name": "echo", "arguments": json.dumps({"text": "é"})}] * 2
    roles = [message["role"] for message in fields["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    assert [m["tool_call_id"] for m in fields["messages"] if m["role"] == "tool"] == [call["id"] for call in calls]
    assert calls[0]["id"] != calls[1]["id"]
    assert fields["messages"][2]["content"] == "I look."


async def test_an_episode_with_native_tool_calls() -> None:
    """The model receives the tools, its calls run, and it receives the error of a malformed call."""
    asked: list[dict[str, Any]] = []
    turns = [("echo", "{broken"), ("echo", '{"text": "fix"}'), ("submit", "")]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        name, arguments = turns[len(asked) - 1]
        call = {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    renderer, env = ChatTextRenderer(native_tools=True), MemoryEnvironment()
    async with endpoint(answer) as url:
        options = ChatEndpoint(url, "m", native_tools=True, request={"temperature": None, "seed": 3})
        async with ChatEngine(options, timeout=5, retries=0) as engine:
            trajectory = await run_episode(env, TASK, engine, renderer, NativeToolCalls(), PLAIN)
    assert (trajectory.resolved, trajectory.stop) == (True, StopReason.SUBMITTED)
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["echo", "submit"]
    assert asked[0]["messages"][0]["content"] == "S", "the tools are described nowhere else"
    assert (asked[0]["seed"], "temperature" in asked[0]) == (3, False)
    assert "bad JSON in the tool call" in asked[1]["messages"][-1]["content"]
    assert asked[2]["messages"][-1] == {"role": "tool", "tool_call_id": "call00004", "content": "fix"}


@pytest.mark.parametrize("native", [False, True])
async def test_reasoning_of_a_response_is_kept_and_neither_parsed_nor_sent_back(native: bool) -> None:
    fmt, asked = NativeToolCalls() if native else tool_format("hermes"), list[dict[str, Any]]()
    submit = fmt.render(ToolCall("submit", {}))
    thought = f"I could</think>{submit} but no. é"

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        message = {"role": "assistant", "content": "First." if len(asked) == 1 else submit}
        return 200, {"choices": [{"message": {**message, "reasoning_content": thought}, "finish_reason": "stop"}]}

    async with endpoint(answer) as url, ChatEngine(ChatEndpoint(url, "m", native), timeout=5, retries=0) as engine:
        renderer = ChatTextRenderer(native_tools=native)
        trajectory = await run_episode(MemoryEnvironment(), TASK, engine, renderer, fmt, PLAIN)
    first, second = trajectory.turns
    assert (first.tool, second.tool, trajectory.stop) == (None, "submit", StopReason.SUBMITTED)
    kept = f"<think>\nI could<\\/think>{submit} but no. é\n</think>"
    assert first.text == f"{kept}\n\nFirst."
    assert (first.thinking_chars, first.thinking_tokens) == (len(kept), len(kept.encode()))
    assert [m["content"] for m in asked[1]["messages"] if m["role"] == "assistant"] == ["First."]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b'{"error": {"message": "no such key"}}', "401: no such key: the key in OPENAI_API_KEY is not set"),
        (404, b'{"error": {"message": "no model m"}}', "404: no model m: .*--model"),
        (200, b"<!doctype html><p>hello", r"a page \(HTML\) instead of JSON: .*address of a chat API"),
        (400, b'{"message": "max_tokens is unsupported"}', "unsupported; .* --request max_tokens=null"),
        (502, b"<html>bad gateway", "check that the server is running"),
    ],
)
async def test_an_endpoint_that_refuses_is_one_line(status: int, body: bytes, message: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    async def handle(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return status, body

    async with serving(handle) as url, ChatEngine(ChatEndpoint(url, "m"), timeout=5, retries=9) as engine:
        with pytest.raises(UserError, match=message) as error:
            await engine.check_ready()
    assert "\n" not in str(error.value)


async def test_an_address_without_v1_is_a_user_error_with_the_right_address() -> None:
    async def handle(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return (200, orjson.dumps(said("ready"))) if path.startswith("/v1/") else (404, b"not here")

    async with serving(handle) as url:
        async with ChatEngine(ChatEndpoint(url, "m"), timeout=5, retries=0) as engine:
            with pytest.raises(UserError, match=f"maybe {url}/v1"):
                await engine.check_ready()
        async with ChatEngine(ChatEndpoint(f"{url}/v1", "m"), timeout=5, retries=0) as engine:
            await engine.check_ready()


async def test_a_busy_endpoint_is_waited_for_and_an_absent_one_is_not() -> None:
    busy = endpoint(lambda body: (429, {"error": "later"}))
    async with busy as url, ChatEngine(ChatEndpoint(url, "m"), timeout=5, retries=0) as engine:
        await engine.check_ready()
    async with ChatEngine(ChatEndpoint("http://127.0.0.1:9/v1", "m"), timeout=5, retries=9) as engine:
        with pytest.raises(UserError, match="check that the server is running"):
            await engine.check_ready()


@pytest.mark.parametrize(
    "keys",
    [
        {"thinking": "off"},
        {"max_thinking_tokens": 9},
        {"template_options": {"reasoning_effort": "low"}},
        {"top_k": 20},
        {"min_p": 0.1},
    ],
)
def test_keys_that_chat_requests_lack_are_refused_for_an_endpoint(keys: dict[str, Any]) -> None:
    config = RunConfig(name="x", model=Path("m"), env={"name": "mini"}, rollout=keys)
    with pytest.raises(
        UserError, match=rf"rollout\.{next(iter(keys))}: .* --request (chat_template_kwargs|top_k|min_p)="
    ):
        PolicyChoice("http://localhost/v1", "m").rules(config)
    PolicyChoice("gold").rules(config)
