"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import orjson

from agent_rl.endpoint.messages import (
    Ask,
    Loose,
    Refusal,
    Reply,
    bounded,
    joined,
    minted,
    offered,
    read_body,
    refuse_unless,
)
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import Spoken, ToolCall

_TEXT = ("text", "refusal")
_ROLES: Mapping[str, Literal["system", "user", "tool"]] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
)


class _Function(Loose):
    name: str
    arguments: str = "{}"


class _Call(Loose):
    id: str = ""
    function: _Function


class _Message(Loose):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None


class _Described(Loose):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Loose):
    type: str = "function"
    function: _Described | None = None


class _Request(Loose):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    top_logprobs: int | None = None


class Chat:
    """See :class:`agent_rl.endpoint.messages.Dialect`."""

    def read(self, body: bytes) -> Ask:
        asked = read_body(_Request, body)
        refuse_unless(asked.n in (None, 1), "n above 1")
        refuse_unless(asked.tool_choice in (None, "auto"), "a forced tool_choice")
        refuse_unless((asked.response_format or {}).get("type", "text") == "text", "response_format")
        refuse_unless(not asked.top_logprobs, "top_logprobs")
        return Ask(
            messages=[_message(message, at) for at, message in enumerate(asked.messages)],
            tools=[
                offered(tool.function.name, tool.function.description, tool.function.parameters)
                for tool in asked.tools or ()
                if tool.function is not None
            ],
            max_tokens=bounded(
                asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
            ),
            stream=bool(asked.stream),
            model=asked.model,
            usage_wanted=bool((asked.stream_options or {}).get("include_usage")),
        )

    def reply(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.spoken.text or None, **_extras(reply.spoken)}
        if reply.spoken.calls:
            message["tool_calls"] = [_call(reply, number) for number in range(len(reply.spoken.calls))]
        choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
        return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        yield _chunk(reply, {"role": "assistant", "content": ""})
        extras = _extras(reply.spoken)
        if extras:
            yield _chunk(reply, extras)
        if reply.spoken.text:
            yield _chunk(reply, {"content": reply.spoken.text})
        for number in range(len(reply.spoken.calls)):
            yield _chunk(reply, {"tool_calls": [{"index": number, **_call(reply, number)}]})
        yield _chunk(reply, {}, reply.finish)
        if ask.usage_wanted:
            yield _event({**_head(reply, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        code = {"key": "invalid_api_key", "full": "context_length_exceeded", "ended": "episode_ended"}
        text = refusal.text
        if refusal.kind == "full":
            text = (
                f"This model's maximum context length is {refusal.most} tokens. However, your messages resulted in "
                f"{refusal.tokens} tokens. Please reduce the length of the messages."
            )
        kind = "authentication_error" if refusal.kind == "key" else "invalid_request_error"
        return {"error": {"message": text, "type": kind, "param": None, "code": code.get(refusal.kind)}}


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call that a program gives back. Raises Refusal where they are no JSON object."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise Refusal("bad", f"{where}: no JSON object")
    return arguments


def write_arguments(call: ToolCall) -> str:
    """The arguments of a sampled call, as JSON."""
    return orjson.dumps(dict(call.arguments)).decode()


def _message(message: _Message, at: int) -> ChatMessage:
    text = message.content if isinstance(message.content, str) else joined(message.content, _TEXT, f"messages.{at}")
    role = _ROLES.get(message.role)
    if role is not None:
        return ChatMessage(role, text)
    if message.role != "assistant":
        raise Refusal(
            "bad", f"messages.{at}.role: {message.role!r}, expected system, developer, user, assistant or tool"
        )
    calls, reasoning = message.tool_calls, message.reasoning_content or ""
    if not calls:
        return ChatMessage("assistant", text, reasoning=reasoning)
    read = [ToolCall(c.function.name, read_arguments(c.function.arguments, f"messages.{at}.tool_calls")) for c in calls]
    return ChatMessage("assistant", text, tuple(read), reasoning, minted(*(call.id for call in calls)))


def _extras(spoken: Spoken) -> dict[str, Any]:
    """What the API has no field for: thoughts, and why no call was found."""
    extras: dict[str, Any] = {"reasoning_content": spoken.reasoning} if spoken.reasoning else {}
    return extras | ({"parse_failure": spoken.failure} if spoken.failure else {})


def _call(reply: Reply, number: int) -> dict[str, Any]:
    call = reply.spoken.calls[number]
    function = {"name": call.name, "arguments": write_arguments(call)}
    return {"id": reply.call_id(number), "type": "function", "function": function}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _chunk(reply: Reply, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return _event({**_head(reply, "chat.completion.chunk"), "choices": [choice]})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
