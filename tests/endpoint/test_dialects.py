"""Official clients over the endpoint: their types take every reply, and what they give back is found again."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from support.endpoint_sessions import BASH, MODEL, call, served

from agent_rl.render import ChatRenderer
from agent_rl.types import BranchCause
from tools import Reasoning, ToolCall, tool_format

TOOL = {"name": "bash", "description": "Runs a command."}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TURNS = ["<think>\nlook\n</think>\n\nFirst. {ls}", "{a}\n{b}", "<think>\nso\n</think>\n\nDone."]


def linear(served: Any) -> None:
    """One branch; no sampled token was encoded again; each row came once."""
    (branch,) = served.session.tree.branches()
    assert branch.cause is BranchCause.START
    assert served.engine.scripted.rows_sent == len(branch.tokens) - 1
    assert int(branch.loss_mask.sum()) == sum(len(node.sampled) for node in served.session.tree.nodes)
    assert served.session.tree.echo_differs == 0


@pytest.fixture
def texts() -> list[str]:
    return [text.format(ls=call("ls"), a=call("a"), b=call("b")) for text in TURNS]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(serve: Any, texts: list[str], stream: bool) -> None:
    async with serve(*texts) as served:
        client = await served.clients(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0))
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        finishes = []
        for _ in range(3):
            message, finish = await chat_turn(client, messages, BASH, stream)
            finishes.append(finish)
            messages.append(message)
            for call in message.get("tool_calls") or ():
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})
        assert finishes == ["tool_calls", "tool_calls", "stop"]
        assert messages[2]["content"] == "First."
        arguments = [call["function"]["arguments"] for call in messages[4]["tool_calls"]]
        assert arguments == ['{"command":"a"}', '{"command":"b"}']
        assert messages[-1]["content"] == "Done."
        linear(served)


async def chat_turn(client: Any, messages: list[Any], tool: Any, stream: bool) -> tuple[Any, str]:
    request = {"model": "m", "messages": messages, "tools": [tool]}
    if not stream:
        reply = await client.chat.completions.create(**request)
        type(reply).model_validate(reply.model_dump(), strict=True)
        return reply.choices[0].message.model_dump(exclude_none=True), reply.choices[0].finish_reason
    async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
        async for _ in events:
            pass
        reply = await events.get_final_completion()
    assert reply.usage.completion_tokens > 0
    message = reply.choices[0].message.model_dump(exclude_none=True)
    for tool_call in message.get("tool_calls", ()):
        tool_call["function"].pop("parsed_arguments", None)
        tool_call.pop("index", None)
    return message, reply.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(serve: Any, texts: list[str], stream: bool) -> None:
    async with serve(*texts) as served:
        client = await served.clients(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0))
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}]
        request = {"model": "m", "instructions": "s", "tools": [{"type": "function", **TOOL, "parameters": PARAMETERS}]}
        for _ in range(3):
            if stream:
                async with client.responses.stream(input=items, **request) as events:
                    async for _ in events:
                        pass
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(input=items, **request)
                type(reply).model_validate(reply.model_dump(), strict=True)
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
            for item in reply.output:
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "seen"})
        assert reply.output_text == "Done."
        types = [item["type"] for item in items[1:5]]
        assert types == ["reasoning", "message", "function_call", "function_call_output"]
        linear(served)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(serve: Any, texts: list[str], stream: bool) -> None:
    async with serve(*texts) as served:
        client = await served.clients(anthropic.AsyncAnthropic(base_url=served.url, api_key="x", max_retries=0))
        messages: list[Any] = [{"role": "user", "content": "u"}]
        system = [
            {"type": "text", "text": "x-anthropic-billing-header: changes"},
            {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}},
        ]
        request = {"model": "m", "max_tokens": 500, "system": system, "tools": [{**TOOL, "input_schema": PARAMETERS}]}
        stops = []
        for turn in range(3):
            system[0]["text"] += str(turn)
            if stream:
                async with client.messages.stream(messages=messages, **request) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(messages=messages, **request)
                type(reply).model_validate(reply.model_dump(), strict=True)
            stops.append(reply.stop_reason)
            messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]})
            used = [b.id for b in reply.content if b.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": i, "content": "seen"} for i in used]
            messages.append({"role": "user", "content": results})
        assert stops == ["tool_use", "tool_use", "end_turn"]
        assert [block["type"] for block in messages[1]["content"]] == ["thinking", "text", "tool_use"]
        del request["max_tokens"]
        counted = await client.messages.count_tokens(messages=messages[:3], **request)
        assert counted.input_tokens == served.session.tree.nodes[1].prompt
        linear(served)


@pytest.mark.parametrize("history", ["keep", "follow"])
async def test_a_program_that_drops_thoughts_begins_no_branch(history: str) -> None:
    renderer = ChatRenderer(MODEL)
    renderer.reasoning = Reasoning("<think>", "</think>", prompt_opens=True)
    thought, tool = f"I could {call('rm')}\n</think>\n\n", call("ls")
    async with served(renderer, f"{thought}First. {tool}", f"{thought}Done.", history=history) as opened:
        client = await opened.clients(anthropic.AsyncAnthropic(base_url=opened.url, api_key="x", max_retries=0))
        tools = [{**TOOL, "input_schema": PARAMETERS}]
        messages: list[Any] = [{"role": "user", "content": "u"}]
        reply = await client.messages.create(model="m", max_tokens=500, messages=messages, tools=tools)
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
        said = [block.model_dump(exclude_none=True) for block in reply.content[1:]]
        seen = {"type": "tool_result", "tool_use_id": reply.content[2].id, "content": "seen"}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [seen]}]
        reply = await client.messages.create(model="m", max_tokens=500, messages=messages, tools=tools)
        assert [block.type for block in reply.content] == ["thinking", "text"]
        linear(opened)


@pytest.mark.parametrize("history", ["keep", "follow"])
async def test_responses_without_their_reasoning_items_begin_no_branch(renderer: ChatRenderer, history: str) -> None:
    thought = "<think>\nlook\n</think>\n\n"
    async with served(renderer, f"{thought}First. {call('ls')}", f"{thought}Done.", history=history) as opened:
        client = await opened.clients(openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key="x", max_retries=0))
        request = {"model": "m", "tools": [{"type": "function", **TOOL, "parameters": PARAMETERS}]}
        items: list[Any] = [{"role": "user", "content": "u"}]
        reply = await client.responses.create(input=items, **request)
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
        assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
        items += [item.model_dump(exclude_none=True) for item in reply.output[1:]]
        items.append({"type": "function_call_output", "call_id": reply.output[2].call_id, "output": "seen"})
        assert (await client.responses.create(input=items, **request)).output_text == "Done."
        linear(opened)


async def test_tools_found_later_are_described_where_they_are_found(
    say: Any, serve: Any, renderer: ChatRenderer
) -> None:
    """Claude Code offers most tools so. No branch begins, and their calls have the types of their schemas."""
    found = {"type": "object", "properties": {"url": {"type": "string"}, "seconds": {"type": "integer"}}}
    search = {"name": "search", "input_schema": {"type": "object"}}
    fetch = {"name": "fetch", "description": "Gets a page.", "input_schema": found, "defer_loading": True}
    said = [tool_format("xml").render(ToolCall(name, {"seconds": "3"})) for name in ("search", "fetch")]
    async with serve(*said, fmt="xml") as served:
        messages: list[Any] = [{"role": "user", "content": "u"}]
        calls = []
        for tools in ([search], [search, fetch], [search, fetch]):
            reply = (await served.post("/v1/messages", messages=messages, tools=tools)).json()["content"]
            calls.append(reply[-1])
            content = [{"type": "tool_reference", "tool_name": "fetch"}]
            result = {"type": "tool_result", "tool_use_id": reply[-1]["id"], "content": content}
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": [result]}]
        inputs = [(call["name"], call["input"]) for call in calls[:2]]
        assert inputs == [("search", {"seconds": "3"}), ("fetch", {"seconds": 3})]
        (branch,) = served.session.tree.branches()
        assert renderer.decode(branch.tokens.tolist()).count("Gets a page.") == 2


async def test_each_dialect_reports_a_full_context_and_an_ended_episode(serve: Any) -> None:
    async with serve("ok", max_tokens=60, max_turns=1) as served:
        openai_client = await served.clients(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x"))
        claude = await served.clients(anthropic.AsyncAnthropic(base_url=served.url, api_key="x"))
        long: list[Any] = [{"role": "user", "content": "word " * 100}]
        with pytest.raises(openai.BadRequestError) as full:
            await openai_client.chat.completions.create(model="m", messages=long)
        assert full.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as full:
            await openai_client.responses.create(model="m", input="word " * 100)
        assert full.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > 60 maximum"):
            await claude.messages.create(model="m", messages=long, max_tokens=5)
        short: list[Any] = [{"role": "user", "content": "u"}]
        await openai_client.chat.completions.create(model="m", messages=short)
        with pytest.raises(openai.BadRequestError) as over:
            await openai_client.chat.completions.create(model="m", messages=[*short, *short])
        assert over.value.code == "episode_ended"
        with pytest.raises(anthropic.BadRequestError, match="the episode is over: max_turns"):
            await claude.messages.create(model="m", messages=[*short, *short], max_tokens=5)
        url = f"http://127.0.0.1:{served.endpoint.port}/v1"
        foreign = await served.clients(openai.AsyncOpenAI(base_url=url, api_key="wrong"))
        with pytest.raises(openai.AuthenticationError):
            await foreign.chat.completions.create(model="m", messages=short)


async def test_models_name_the_context_window(serve: Any) -> None:
    async with serve("ok", max_tokens=300, max_new_tokens=40) as served:
        client = await served.clients(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x"))
        claude = await served.clients(anthropic.AsyncAnthropic(base_url=served.url, api_key="x"))
        (listed,) = (await client.models.list()).data
        named = await client.models.retrieve("any/name")
        assert (listed.id, named.id) == ("agent-rl", "any/name")
        for model in (listed.model_dump(), named.model_dump()):
            assert (model["max_model_len"], model["context_length"]) == (300, 300)
        found = await claude.models.retrieve("agent-rl")
        assert (found.max_input_tokens, found.max_tokens) == (300, 40)
        assert [model.id async for model in claude.models.list()] == ["agent-rl"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_all_sampled_tokens_are_returned(serve: Any, stream: bool) -> None:
    async with serve("First. " + call("ls")) as served:
        client = await served.clients(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x"))
        request: Any = {"model": "m", "messages": [{"role": "user", "content": "u"}], "tools": [BASH], "logprobs": True}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                choice = (await events.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**request)).choices[0]
        (node,) = served.session.tree.nodes
        assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * len(node.sampled)
        assert "".join(entry.token for entry in choice.logprobs.content) == node.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses/compact", "/v1/embeddings"])
async def test_an_address_that_does_not_exist_names_those_that_do(serve: Any, path: str) -> None:
    async with serve("ok") as served:
        answer = await served.post(path, prompt="u")
        expected = f"POST {path}: not served; conversations go to /v1/chat/completions, /v1/responses, /v1/messages"
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "u"}, {"role": "assistant", "content": "I"}]),
        ("messages", [{"role": "robot", "content": "u"}]),
        ("messages", []),
        ("messages", 3),
    ],
)
async def test_an_unsupported_request_is_refused(serve: Any, field: str, value: Any) -> None:
    async with serve("ok") as served:
        body = {"messages": [{"role": "user", "content": "u"}], field: value}
        answer = await served.post("/v1/chat/completions", **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert served.engine.requests == 0
