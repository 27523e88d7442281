"""A chat endpoint as a policy: the conversation survives its way through tokens, failures are told apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_server import serving

from agent_rl.errors import EngineRejected, EngineUnreachable
from agent_rl.rollout.chat_policy import ChatEngine, ChatTextRenderer, read_messages
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.types import FinishReason, SamplingParams, StopReason
from tools import ToolCall
from tools.formats import tool_format

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
PLAIN = EpisodeRules(routes=None)


@asynccontextmanager
async def endpoint(answer: Answer) -> AsyncIterator[str]:
    """An endpoint that answers chat completions as it is told."""

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
    tokens = renderer.opening(messages, None)
    for observation, answer in turns:
        tokens += [*answer.encode(errors="replace"), 256]
        tokens += renderer.observation(observation, stop_included=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    plain = [{**m, "content": m["content"].encode(errors="replace").decode()} for m in messages]
    assert read_messages(tokens) == plain


async def test_an_episode_over_an_endpoint(kit: SimpleNamespace) -> None:
    fmt, asked = tool_format("hermes"), []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        calls = [ToolCall("echo", {"text": "fix"}), ToolCall("submit", {})]
        return 200, said(fmt.render(calls[len(asked) - 1]))

    env = kit.MemoryEnvironment()
    async with endpoint(answer) as url, ChatEngine(url, "some-model", timeout=5, retries=0) as engine:
        trajectory = await run_episode(env, env.tasks("heldout")[0], engine, ChatTextRenderer(), fmt, PLAIN)
    assert (trajectory.resolved, trajectory.stop) == (True, StopReason.SUBMITTED)
    assert asked[0]["model"] == "some-model"
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][2]["content"] == fmt.render(ToolCall("echo", {"text": "fix"}))
    assert asked[1]["messages"][3]["content"] == "fix"
    assert "echo" in asked[0]["messages"][0]["content"], "the tools are described in the system message"


async def ask(url: str, **options: Any) -> Any:
    tokens = ChatTextRenderer().opening([{"role": "user", "content": "hello"}], None)
    async with ChatEngine(url, "m", timeout=5, retries=2, backoff=0.001) as engine:
        return await engine.generate(tokens, SamplingParams(), session="s", **{"routes_from": None, **options})


async def test_trouble_is_told_apart() -> None:
    count = 0

    def flaky(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal count
        count += 1
        return (503, {"error": "busy"}) if count < 3 else (200, said("cut", "length"))

    async with endpoint(flaky) as url:
        completion = await ask(url)
        assert (count, completion.finish, bytes(completion.tokens)) == (3, FinishReason.LENGTH, b"cut")
        with pytest.raises(EngineRejected, match="has no routes"):
            await ask(url, routes_from=0)
    async with endpoint(lambda body: (400, {"error": {"message": "maximum context length is 10"}})) as url:
        assert (await ask(url)).finish is FinishReason.LENGTH
    too_long = (400, {"error": {"message": "Requested token count exceeds the maximum context length of 10 tokens"}})
    async with endpoint(lambda body: too_long if "max_tokens" in body else (200, said("the rest"))) as url:
        completion = await ask(url)
        assert (completion.finish, bytes(completion.tokens[:-1])) == (FinishReason.STOP, b"the rest")
    async with endpoint(lambda body: (404, {"error": {"message": "no model m"}})) as url:
        with pytest.raises(EngineRejected, match="no model m"):
            await ask(url)
    async with endpoint(lambda body: (200, {"choices": []})) as url:
        with pytest.raises(EngineRejected, match="no chat completion"):
            await ask(url)
    with pytest.raises(EngineUnreachable):
        await ask("http://127.0.0.1:9/v1")
