"""Requests, responses and errors of the endpoint, independent of the API dialect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ParsedTurn, ToolCall
from tools.formats import with_typed_arguments

MAX_BODY = 32 << 20
"""Maximum bytes of a request body; a context of 1 M tokens takes about 4 MB."""

Finish = Literal["stop", "tool_calls", "length"]
ToolChoice = Literal["auto", "none", "required"]
_TOOL_CHOICES: Mapping[str | None, ToolChoice] = MappingProxyType(
    {None: "auto", "auto": "auto", "none": "none", "required": "required", "any": "required"}
)
_ISSUED_ID = re.compile(r"(?:[a-z]+_)?([0-9a-f]{16})(?:_\d+)?")
OPENING = "Calling tools:\n"
_MAX_CHARS = 1 << 20


class RequestRejected(Exception):
    """A request that gets no reply. ``kind`` is the reason, which each dialect maps to its own error codes; ``text``
    describes it.

    ``bad``: the request is invalid. ``route``: no such address. ``key``: no session has its key. ``ended``: the episode
    is over. ``full``: the conversation has ``tokens`` tokens, the limit is ``limit``. ``large``: the body is too long.
    """

    def __init__(
        self,
        kind: Literal["bad", "route", "key", "ended", "full", "large"],
        text: str,
        *,
        tokens: int = 0,
        limit: int = 0,
    ) -> None:
        super().__init__(text)
        self.kind, self.text, self.tokens, self.limit = kind, text, tokens, limit

    @property
    def status(self) -> int:
        """The HTTP status; clients retry none of them."""
        return {"key": 401, "route": 404, "large": 413}.get(self.kind, 400)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request. ``tools`` are OpenAI function schemas. ``deferred_tools`` may be called but are not described in
    the prompt; a tool search returns them. Sampling parameters are ignored in favor of the run's; of ``max_tokens``
    the smaller value applies. ``stops``: texts that end the reply and are not part of it. ``tool_choice`` none: the
    reply has no calls; the tools stay in the prompt, so that the conversation keeps its prefix. ``forced_tool``: the
    tool that a required call names, None for any. ``response_schema``: the JSON schema of a reply that is no call.
    ``strict_tools``: the tools whose calls must follow their schemas."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stream: bool
    model: str
    include_usage: bool = False
    deferred_tools: Sequence[Mapping[str, Any]] = ()
    stops: tuple[str, ...] = ()
    tool_choice: ToolChoice = "auto"
    forced_tool: str | None = None
    logprobs: bool = False
    response_schema: Mapping[str, Any] | None = None
    strict_tools: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A sampled reply. ``id`` is part of every identifier that the client receives and returns. ``stopped``: the stop
    sequence that ended it. ``logprobs``: the text and log-prob of each token, if the request wants them."""

    id: str
    spoken: ParsedTurn
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    thinking_tokens: int
    cached_tokens: int
    created: int
    model: str
    stopped: str = ""
    logprobs: Sequence[tuple[str, float]] | None = None

    def call_id(self, number: int, prefix: str = "call") -> str:
        return f"{prefix}_{self.id}_{number}"


class Dialect(Protocol):
    """One API: parses its requests, formats its responses and errors."""

    def read(self, body: bytes) -> ChatRequest:
        """Raises RequestRejected."""
        ...

    def response(self, response: ChatResponse) -> dict[str, Any]: ...

    def events(self, response: ChatResponse, request: ChatRequest) -> Iterator[bytes]:
        """The response as server-sent events; the last item ends the stream."""
        ...

    def error(self, error: RequestRejected) -> dict[str, Any]: ...


class RequestModel(BaseModel):
    """Base of parsed requests. Unknown fields are accepted and ignored."""

    model_config = ConfigDict(extra="allow")


T = TypeVar("T", bound=RequestModel)


def parse_request(kind: type[T], body: bytes) -> T:
    """``body`` as a request of ``kind``. Raises RequestRejected with a one-line message."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        raise RequestRejected("bad", f"{field}: {first['msg']}") from None


async def read_request_body(request: Request) -> bytes:
    """The body of ``request``. Raises RequestRejected for more than :data:`MAX_BODY` bytes."""
    declared = request.headers.get("content-length", "")
    parts, size = list[bytes](), 0
    if not declared.isdigit() or int(declared) <= MAX_BODY:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY:
                break
        else:
            return b"".join(parts)
    raise RequestRejected("large", f"the request body is longer than {MAX_BODY} bytes")


def issued_reply_id(*identifiers: str | None) -> str:
    """The reply id in the first of ``identifiers`` that the endpoint issued; "" if none is."""
    matches = (_ISSUED_ID.fullmatch(each) for each in identifiers if each)
    return next((match[1] for match in matches if match), "")


def require_supported(supported: bool, feature: str) -> None:
    """Raises RequestRejected if the request uses a feature that the endpoint lacks."""
    if not supported:
        raise RequestRejected("bad", f"{feature}: not supported; the endpoint samples one plain reply for training")


def check_max_tokens(max_tokens: int | None) -> int | None:
    """The request's limit on sampled tokens. Raises RequestRejected for values below 1. An engine would fail on
    them, and the resulting infrastructure failure would let a policy have its episode run again."""
    if max_tokens is not None and max_tokens < 1:
        raise RequestRejected("bad", f"max_tokens: {max_tokens}, expected 1 or more")
    return max_tokens


def read_tool_choice(choice: Any) -> tuple[ToolChoice, str | None]:
    """The request's ``tool_choice``, and the tool that it names. OpenAI writes texts, and objects for named tools;
    Anthropic writes objects."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(choice, Mapping) and kind in ("function", "tool"):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        return "required", str(name)
    require_supported(isinstance(kind, str | None) and kind in _TOOL_CHOICES, f"tool_choice {kind!r}")
    return _TOOL_CHOICES[kind], None


def read_response_format(wanted: Any, where: str) -> dict[str, Any] | None:
    """The JSON schema that a request wants its reply to follow; None for plain text.

    Chat completions have the schema in ``json_schema.schema``, Responses and Messages in ``schema``.
    """
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    require_supported(kind in ("text", "json_object", "json_schema"), f"{where} {kind!r}")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    inner = wanted.get("json_schema", wanted)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict):
        raise RequestRejected("bad", f"{where}: expected a JSON schema as an object")
    return schema


def read_stops(stops: Any, where: str) -> tuple[str, ...]:
    """The request's stop sequences: a text, or a list of texts. Empty ones are ignored, as they would end any reply."""
    listed = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        raise RequestRejected("bad", f"{where}: expected a text or a list of texts")
    return tuple(filter(None, listed))


def tool_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A complete OpenAI function schema. Raises RequestRejected if calls cannot be parsed with ``parameters``."""
    schema = {"type": "object", "properties": {}, "required": [], **(parameters or {})}
    function = {"name": name, "description": description or "", "parameters": schema}
    tool = {"type": "function", "function": function}
    try:
        with_typed_arguments(ToolCall(name, dict.fromkeys(schema["properties"], "")), [tool])
    except (AttributeError, TypeError):
        raise RequestRejected("bad", f"tools: the parameters of {name!r} are not a JSON schema of an object") from None
    return tool


def join_text(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of ``content``: a string, or a list of text parts of the given ``kinds``. Raises RequestRejected
    otherwise."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRejected("bad", f"{where}: expected text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestRejected("bad", f"{where}: part of type {kind!r}; only text parts are supported")
        texts.append(part["text"])
    return "\n".join(texts)


def with_read_calls(message: ChatMessage) -> ChatMessage:
    """``message`` with the calls that its text lists, if the endpoint issued their ids; else unchanged.

    smolagents' ToolCallingAgent writes an earlier reply as a line and the list of its calls, as Python prints it::

        Calling tools:
        [{'id': 'call_00112233445566ff_0', 'type': 'function', 'function': {'name': 'shell', 'arguments': {...}}}]

    The ids are the endpoint's, so the message stands for the sampled tokens.
    """
    text, opening, listed = message.text.rpartition(OPENING)
    if message.role != "assistant" or message.calls or not opening or len(listed) > _MAX_CHARS:
        return message
    try:
        calls: list[Mapping[str, Any]] = ast.literal_eval(listed.strip())
        reply = issued_reply_id(*(call["id"] for call in calls))
        functions = [call["function"] for call in calls]
        read = tuple(ToolCall(str(each["name"]), dict(each["arguments"])) for each in functions)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return message
    return ChatMessage("assistant", text, read, message.reasoning, reply) if reply else message
