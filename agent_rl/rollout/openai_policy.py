"""Evaluates any OpenAI-compatible chat endpoint with the same episode loop.

:mod:`agent_rl.rollout.chat_tokens` maps the conversation to tokens. Such trajectories cannot be trained on: they have
no token ids, log-probs or routes of the model. Token limits are applied as byte limits; the endpoint applies its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from agent_rl.errors import EngineError, EngineOverloaded, EngineRejected, UserError
from agent_rl.rollout.chat_tokens import STOP, message_tokens, read_messages, read_native
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds
from agent_rl.utils.http import AsyncHttp, HttpResponse, call_with_retries, check, server_message

BYTES_A_TOKEN = 4
"""Bytes per token, to convert token limits: typical of English text and code."""
API_KEY = "OPENAI_API_KEY"
READY_SECONDS = 60.0
_MAX_TEXT_BYTES = 4 << 20  # a byte becomes a token, with a log-prob
_QUESTION = {"messages": [{"role": "user", "content": "Answer with one word: ready?"}], "max_tokens": 16}
_USAGE = {
    "prompt": ("prompt_tokens",),
    "completion": ("completion_tokens",),
    "cached": ("prompt_tokens_details", "cached_tokens"),
    "reasoning": ("completion_tokens_details", "reasoning_tokens"),
}
"""The place of each count in the ``usage`` of a response."""
_MAX_COUNT = 1 << 40
_NO_TOOL = {"name": "none", "description": "Does nothing.", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """A chat endpoint: its address up to ``/v1`` and the model's name.

    ``native_tools``: send the tools as JSON schemas and read ``tool_calls``, instead of a text format. ``request``:
    fields added to every request or replacing ours; None removes a field.
    """

    url: str
    model: str
    native_tools: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)


class ChatEngine:
    """Implements ``agent_rl.engine.types.Engine`` over ``POST <url>/chat/completions``; an async context manager.

    The API key is read from the environment variable ``OPENAI_API_KEY`` if it is set. Timeouts, 5xx and 429 are retried
    ``retries`` times with exponential backoff. UserError is raised for a wrong address, key or model until the
    first response; what the endpoint does later ends one episode (EngineRejected). If the endpoint's context cannot
    hold ``max_tokens`` more tokens, the request is repeated without that limit; if the conversation does not fit at
    all, the turn ends without text and with finish ``length``.
    """

    def __init__(self, endpoint: ChatEndpoint, *, timeout: float, retries: int, backoff: float = 0.5) -> None:
        self._endpoint = endpoint
        self._url = f"{endpoint.url.rstrip('/')}/chat/completions"
        self._retries, self._backoff = retries, backoff
        key = os.environ.get(API_KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = AsyncHttp(timeout, headers=headers, outside=True)
        self._mistake: type[UserError | EngineRejected] = UserError

    async def __aenter__(self) -> ChatEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def check_ready(self) -> None:
        """Send one short request with the fields of every request. Raises UserError if the endpoint cannot serve it."""
        tools = {"tools": [{"type": "function", "function": _NO_TOOL}]} if self._endpoint.native_tools else {}
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._post(self._body({"temperature": 1.0, "top_p": 1.0, **_QUESTION, **tools}))
        except (TimeoutError, EngineOverloaded):
            return  # reachable but busy or slow: later requests are retried
        except EngineRejected as error:
            raise UserError(
                f"--policy: {error}; to change or remove a field of the request use --request, for example "
                "--request max_tokens=null --request max_completion_tokens=4096"
            ) from None
        except EngineError as error:
            raise UserError(f"--policy: {error}; check that the server is running at this address") from None

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The endpoint's next message. Raises EngineRejected if routes are requested."""
        if routes_from is not None:
            raise EngineRejected(
                f"{self._url}: a chat endpoint returns no routes: use it for evaluation, not for training"
            )
        started = time.perf_counter()
        conversation = read_native(tokens) if self._endpoint.native_tools else {"messages": read_messages(tokens)}
        limits = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max(1, sampling.max_new_tokens // BYTES_A_TOKEN),
        }
        encoded, finished, usage = await self._complete(self._body(conversation | limits))
        if len(encoded) > _MAX_TEXT_BYTES:
            raise EngineRejected(f"{self._url}: a text of more than {_MAX_TEXT_BYTES} bytes")
        sampled = (*encoded, STOP) if finished else tuple(encoded)
        return Completion(
            tokens=sampled,
            logprobs=(0.0,) * len(sampled),
            finish=FinishReason.STOP if finished else FinishReason.LENGTH,
            weight_version=self._endpoint.model,
            engine=self._url,
            seconds=time.perf_counter() - started,
            usage=usage,
        )

    def _body(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        body = {"model": self._endpoint.model, **fields, **self._endpoint.request}
        return {key: value for key, value in body.items() if value is not None}

    async def _complete(self, body: Mapping[str, Any]) -> tuple[Sequence[int], bool, Mapping[str, int]]:
        """``(tokens, finished, usage)``: the response's tokens, whether it was not truncated, and its token counts."""
        try:
            response = await call_with_retries(partial(self._post, body), self._retries, self._backoff)
        except EngineRejected as error:
            if not _too_long(str(error)):
                raise
            if "max_tokens" not in body:
                return (), False, dict.fromkeys(_USAGE, 0)  # a refused request has no tokens
            # Without max_tokens the endpoint uses the rest of its context.
            return await self._complete({key: value for key, value in body.items() if key != "max_tokens"})
        try:
            choice = response["choices"][0]
            finished = choice["finish_reason"] != "length"
            return message_tokens(choice["message"]), finished, _read_usage(response.get("usage"))
        except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise EngineRejected(
                f"{self._url}: the response holds no chat completion ({type(error).__name__})"
            ) from error

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response's JSON. Raises UserError, later EngineRejected, if the address, key or model's name is wrong."""
        try:
            response = await self._http.exchange(self._url, body)
        except EngineRejected as error:
            raise self._mistake(f"--policy {error}") from None
        if (mistake := self._config_error(response)) is not None:
            raise self._mistake(mistake)
        try:
            parsed: dict[str, Any] = orjson.loads(check(response).content)
        except orjson.JSONDecodeError:
            raise self._mistake(
                f"{self._url} returned {_describe_body(response)} instead of JSON: {self._right_address()}"
            ) from None
        self._mistake = EngineRejected
        return parsed

    def _config_error(self, response: HttpResponse) -> str | None:
        """The error that the user must fix before any request can succeed, or None."""
        status = f"{self._url} returned status {response.status}"
        if response.status in (401, 403):
            key_state = "is rejected" if os.environ.get(API_KEY) else "is not set"
            return f"{status}: {_reason(response)}: the key in {API_KEY} {key_state}"
        if response.status == 404:
            return (
                f"{status}: {_reason(response)}: {self._right_address()} and --model the name of a model that it serves"
            )
        if 300 <= response.status < 400:
            return f"{status}, redirected to {response.headers.get('location')}: use that address (up to /v1)"
        return None

    def _right_address(self) -> str:
        ends = self._endpoint.url.rstrip("/").endswith("/v1")
        return "--policy must be the address of a chat API" + ("" if ends else f", maybe {self._endpoint.url}/v1")


def _read_usage(usage: Any) -> dict[str, int]:
    """The counts of a response's ``usage``; a missing detail is 0. Empty without counts of prompt and completion."""
    counts = dict[str, int]()
    for name, keys in _USAGE.items():
        value = usage
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int) and 0 <= value <= _MAX_COUNT:
            counts[name] = value
    return {name: counts.get(name, 0) for name in _USAGE} if {"prompt", "completion"} <= counts.keys() else {}


def _reason(response: HttpResponse) -> str:
    """The server's error message in one line; "a page" for HTML."""
    return "a page" if _is_page(response) else server_message(response.content)


def _describe_body(response: HttpResponse) -> str:
    return "a page (HTML)" if _is_page(response) else f"{response.text[:60]!r}"


def _is_page(response: HttpResponse) -> bool:
    return response.text.lstrip()[:1] == "<"


def _too_long(complaint: str) -> bool:
    """Whether an error 400 says that the conversation is too long (wording of OpenAI, vLLM and SGLang)."""
    return any(words in complaint for words in ("context_length_exceeded", "context length", "longer than the model"))
