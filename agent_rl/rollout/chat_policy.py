"""Any OpenAI-compatible chat endpoint as a policy of the same episode loop; for evaluation alone.

How the conversation goes through the token-in, token-out loop is in :mod:`agent_rl.rollout.chat_tokens`. Nothing can be
trained on it: there are no token ids of the model, no log-probs of them and no routes. Limits in tokens are limits in
bytes here; the endpoint keeps its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import orjson

from agent_rl.errors import EngineError, EngineOverloaded, EngineRejected, UserError
from agent_rl.rollout.chat_tokens import STOP, encode, read_messages, read_native, write_answer
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds
from agent_rl.utils.http import AsyncHttp, HttpAnswer, check, retried, server_message

BYTES_A_TOKEN = 4
"""How a limit in tokens is turned into one in bytes: what English text and code come to with common tokenizers."""
API_KEY = "OPENAI_API_KEY"
READY_SECONDS = 60.0
_QUESTION = {"messages": [{"role": "user", "content": "Answer with one word: ready?"}], "max_tokens": 16}
_NO_TOOL = {"name": "none", "description": "Does nothing.", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A chat endpoint: its address up to ``/v1``, and the model asked for.

    ``native_tools``: hand it the tools as JSON schemas and take its ``tool_calls``, instead of a text format.
    ``request``: fields that every request has beside or instead of ours; one that is None is left out.
    """

    url: str
    model: str
    native_tools: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)


class ChatEngine:
    """Implements ``agent_rl.engine.types.Engine`` over ``POST <url>/chat/completions``; an async context manager.

    The key is read from the environment variable ``OPENAI_API_KEY`` where it is set. No answer, 5xx, 429 and 503 are
    tried again ``retries`` times with growing pauses. An address, key or model that no request can succeed with raises
    UserError, which ends the evaluation. Where the endpoint's context has no room for all that may be answered, it is
    asked again for what there is room for; where it has none, the turn ends without text, cut short.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float, retries: int, backoff: float = 0.5) -> None:
        self._endpoint = endpoint
        self._url = f"{endpoint.url.rstrip('/')}/chat/completions"
        self._retries, self._backoff = retries, backoff
        key = os.environ.get(API_KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = AsyncHttp(timeout, headers=headers, outside=True)

    async def __aenter__(self) -> ChatEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def check_ready(self) -> None:
        """Ask one short question with the fields of every request. Raises UserError where that cannot be answered."""
        tools = {"tools": [{"type": "function", "function": _NO_TOOL}]} if self._endpoint.native_tools else {}
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._post(self._body({"temperature": 1.0, "top_p": 1.0, **_QUESTION, **tools}))
        except (TimeoutError, EngineOverloaded):
            return  # it is there, and busy or slow: its answers are waited for, and asked for again
        except EngineRejected as error:
            raise UserError(
                f"--policy: {error}; to leave a field of the request out or change it: --request max_tokens=null "
                "--request max_completion_tokens=4096, say"
            ) from None
        except EngineError as error:
            raise UserError(f"--policy: {error}; is the server running, and is this its address?") from None

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The endpoint's next message. Raises EngineRejected where routes are asked for: there are none."""
        if routes_from is not None:
            raise EngineRejected(f"{self._url}: a chat endpoint has no routes; evaluate with it, don't train")
        started = time.perf_counter()
        conversation = read_native(tokens) if self._endpoint.native_tools else {"messages": read_messages(tokens)}
        limits = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max(1, sampling.max_new_tokens // BYTES_A_TOKEN),
        }
        text, finished = await self._ask(self._body(conversation | limits))
        sampled = (*encode(text), STOP) if finished else tuple(encode(text))
        return Completion(
            tokens=sampled,
            logprobs=(0.0,) * len(sampled),
            finish=FinishReason.STOP if finished else FinishReason.LENGTH,
            weight_version=self._endpoint.model,
            engine=self._url,
            seconds=time.perf_counter() - started,
        )

    def _body(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        body = {"model": self._endpoint.model, **fields, **self._endpoint.request}
        return {key: value for key, value in body.items() if value is not None}

    async def _ask(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """The answer's text, and whether it was finished rather than cut short."""
        try:
            answer = await retried(partial(self._post, body), self._retries, self._backoff)
        except EngineRejected as error:
            if not _too_long(str(error)):
                raise
            if "max_tokens" not in body:
                return "", False
            # Without a limit an endpoint takes the rest of its context: less than the limit it has just refused.
            return await self._ask({key: value for key, value in body.items() if key != "max_tokens"})
        try:
            choice = answer["choices"][0]
            return write_answer(choice["message"]), choice["finish_reason"] != "length"
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineRejected(f"{self._url}: no chat completion in its answer ({type(error).__name__})") from error

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's JSON. Raises UserError where the address, the key or the model's name is wrong."""
        try:
            response = await self._http.exchange(self._url, body)
        except EngineRejected as error:
            raise UserError(f"--policy {error}") from None
        if (mistake := self._mistake(response)) is not None:
            raise UserError(mistake)
        try:
            answer: dict[str, Any] = orjson.loads(check(response).content)
        except orjson.JSONDecodeError:
            raise UserError(f"{self._url} answered no JSON but {_begin(response)}: {self._right_address()}") from None
        return answer

    def _mistake(self, answer: HttpAnswer) -> str | None:
        """What the user has to mend before any request can succeed, or None."""
        answered = f"{self._url} answered {answer.status}"
        if answer.status in (401, 403):
            held = "is not accepted" if os.environ.get(API_KEY) else "is not set"
            return f"{answered}: {_reason(answer)}: the key in {API_KEY} {held}"
        if answer.status == 404:
            return f"{answered}: {_reason(answer)}: {self._right_address()}, and --model the name of one it serves"
        if 300 <= answer.status < 400:
            return f"{answered}, moved to {answer.headers.get('location')}: give that address (up to its /v1)"
        return None

    def _right_address(self) -> str:
        ends = self._endpoint.url.rstrip("/").endswith("/v1")
        return "--policy is to be the address of a chat API" + ("" if ends else f"; {self._endpoint.url}/v1, perhaps")


def _reason(answer: HttpAnswer) -> str:
    """What the server says in one line; of a page only that it is one."""
    return "a page" if _is_page(answer) else server_message(answer.content)


def _begin(answer: HttpAnswer) -> str:
    return "a page (HTML)" if _is_page(answer) else f"{answer.text[:60]!r}"


def _is_page(answer: HttpAnswer) -> bool:
    return answer.text.lstrip()[:1] == "<"


def _too_long(complaint: str) -> bool:
    """Whether a 400 says that the conversation does not fit: OpenAI's code, or how vLLM and SGLang put it."""
    return any(words in complaint for words in ("context_length_exceeded", "context length", "longer than the model"))
