"""A request, its reply and a refusal, whatever the dialect they came in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from agent_rl.rollout.conversation_tree import ChatMessage
from tools import Spoken, ToolCall
from tools.turns import typed_call

MAX_BODY = 32 << 20
"""Bytes of a request; a full context of 1 M tokens has some 4 MB."""

Finish = Literal["stop", "tool_calls", "length"]
_MINTED = re.compile(r"(?:[a-z]+_)?([0-9a-f]{16})(?:_\d+)?")


class Refusal(Exception):
    """A request that gets no reply: why, for the client to tell from other reasons, and in words.

    ``bad``: the request is wrong. ``key``: no session has its key. ``ended``: the episode is over. ``full``: the
    conversation is longer than ``most`` tokens, ``tokens`` are what it has. ``large``: the body is too long.
    """

    def __init__(
        self, kind: Literal["bad", "key", "ended", "full", "large"], text: str, *, tokens: int = 0, most: int = 0
    ) -> None:
        super().__init__(text)
        self.kind, self.text, self.tokens, self.most = kind, text, tokens, most

    @property
    def status(self) -> int:
        """The HTTP status: none that clients try again."""
        return {"key": 401, "large": 413}.get(self.kind, 400)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for. ``tools`` are OpenAI function schemas; ``later`` those that may be called but are not
    described at the start, since a search for tools brought them. Its sampling parameters are not heeded: the run's
    hold; of ``max_tokens`` the smaller of both."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stream: bool
    model: str
    usage_wanted: bool = False
    later: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled. ``id`` goes into every identifier that the client gets, and comes back with them."""

    id: str
    spoken: Spoken
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    created: int
    model: str

    def call_id(self, number: int, prefix: str = "call") -> str:
        return f"{prefix}_{self.id}_{number}"


class Dialect(Protocol):
    """One API: its requests read, its replies and refusals written."""

    def read(self, body: bytes) -> Ask:
        """Raises Refusal."""
        ...

    def reply(self, reply: Reply) -> dict[str, Any]: ...

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        """The reply as server-sent events, the one that ends it last."""
        ...

    def refusal(self, refusal: Refusal) -> dict[str, Any]: ...


class Loose(BaseModel):
    """Base of what is read of requests: what is not named here is let through unread."""

    model_config = ConfigDict(extra="allow")


T = TypeVar("T", bound=Loose)


def read_body(kind: type[T], body: bytes) -> T:
    """``body`` as a request of ``kind``. Raises Refusal in one line."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refusal("bad", f"{place}: {first['msg']}") from None


async def read_whole(request: Request) -> bytes:
    """The body of ``request``. Raises Refusal for one of more than :data:`MAX_BODY` bytes."""
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
    raise Refusal("large", f"the request has more than {MAX_BODY} bytes")


def minted(*identifiers: str | None) -> str:
    """The node whose id stands in the first of ``identifiers`` that has one of ours; "" where none has."""
    found = (_MINTED.fullmatch(each) for each in identifiers if each)
    return next((match[1] for match in found if match), "")


def refuse_unless(allowed: bool, what: str) -> None:
    """Raises Refusal for a request that wants what cannot be had."""
    if not allowed:
        raise Refusal("bad", f"{what}: not supported by this endpoint, which samples one plain reply for training")


def bounded(max_tokens: int | None) -> int | None:
    """The tokens that a request allows its reply. Raises Refusal for less than one, which an engine would fail at: an
    episode that the infrastructure ended is run again, and who is in it could have it so."""
    if max_tokens is not None and max_tokens < 1:
        raise Refusal("bad", f"max_tokens: {max_tokens}, expected 1 or more")
    return max_tokens


def offered(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """An OpenAI function schema with all that a description of tools needs. Raises Refusal for parameters by which no
    call could be read."""
    schema = {"type": "object", "properties": {}, "required": [], **(parameters or {})}
    function = {"name": name, "description": description or "", "parameters": schema}
    tool = {"type": "function", "function": function}
    try:
        typed_call(ToolCall(name, dict.fromkeys(schema["properties"], "")), [tool])
    except (AttributeError, TypeError):
        raise Refusal("bad", f"tools: the parameters of {name!r} are no JSON schema of an object") from None
    return tool


def joined(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of ``content``: a string, or parts of the ``kinds`` that hold text. Raises Refusal for any other."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal("bad", f"{where}: neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise Refusal("bad", f"{where}: a part of type {kind!r}; only text can be sampled after")
        texts.append(part["text"])
    return "\n".join(texts)
