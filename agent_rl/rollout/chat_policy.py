"""Any OpenAI-compatible chat endpoint as a policy of the same episode loop; for evaluation alone.

The loop is token-in, token-out, and such an endpoint takes messages. So the conversation is written in tokens of our
own that can be read back: UTF-8 bytes (0 to 255) with a mark before each message that says who speaks::

    <system> S y s <user> f i x <assistant>        opening: the endpoint is asked for what follows
    <system> S y s <user> f i x <assistant> o k <stop> <user> d o n e <assistant>

Nothing can be trained on it: there are no token ids of the model, no log-probs of them and no routes. Limits in tokens
are limits in bytes here; the endpoint keeps its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx
import orjson
import tenacity

from agent_rl.engine.http import post
from agent_rl.errors import EngineOverloaded, EngineRejected, EngineUnreachable
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds

BYTES_A_TOKEN = 4
"""How a limit in tokens is turned into one in bytes: what English text and code come to with common tokenizers."""
_STOP = 256
_ROLES = {"system": 257, "user": 258, "assistant": 259}
_SPEAKERS = {mark: role for role, mark in _ROLES.items()}
API_KEY = "OPENAI_API_KEY"


class ChatTextRenderer:
    """Implements :class:`agent_rl.rollout.opening.Renderer` with bytes and marks; observations are the user's."""

    stop_token_ids = (_STOP,)

    def opening(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """``tools`` are not rendered: the loop then describes them in the system message."""
        tokens = [token for m in messages for token in (_ROLES[m["role"]], *_encode(m["content"]))]
        return [*tokens, _ROLES["assistant"]]

    def observation(self, text: str, *, stop_included: bool) -> list[int]:
        end = [] if stop_included else [_STOP]
        return [*end, _ROLES["user"], *_encode(text), _ROLES["assistant"]]

    def decode(self, tokens: TokenIds) -> str:
        return bytes(token for token in tokens if token < _STOP).decode(errors="replace")


def read_messages(tokens: TokenIds) -> list[dict[str, str]]:
    """The messages that ``tokens`` hold, without the empty one that the endpoint is asked for."""
    messages: list[dict[str, str]] = []
    text = bytearray()
    for token in [*tokens, _ROLES["assistant"]]:
        if token in _SPEAKERS:
            if messages:
                messages[-1]["content"] = text.decode(errors="replace")
            messages.append({"role": _SPEAKERS[token], "content": ""})
            text.clear()
        elif token < _STOP:
            text.append(token)
    return [message for message in messages[:-1] if message["content"] or message["role"] != "assistant"]


class ChatEngine:
    """Implements ``agent_rl.engine.types.Engine`` over ``POST <url>/chat/completions``; an async context manager.

    The key is read from the environment variable ``OPENAI_API_KEY`` where it is set. No answer, 5xx, 429 and 503 are
    tried again ``retries`` times with growing pauses. Where the endpoint's context has no room for all that may be
    answered, it is asked again for what there is room for; where it has none, the turn ends without text, cut short.
    """

    def __init__(self, url: str, model: str, *, timeout: float, retries: int, backoff: float = 0.5) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._retries, self._backoff = retries, backoff
        key = os.environ.get(API_KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=10.0), headers=headers)

    async def __aenter__(self) -> ChatEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The endpoint's next message. Raises EngineRejected where routes are asked for: there are none."""
        if routes_from is not None:
            raise EngineRejected(f"{self._url}: a chat endpoint has no routes; evaluate with it, don't train")
        started = time.perf_counter()
        body = {
            "model": self._model,
            "messages": read_messages(tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max(1, sampling.max_new_tokens // BYTES_A_TOKEN),
        }
        text, finished = await self._ask(body)
        answer = (*_encode(text), _STOP) if finished else _encode(text)
        return Completion(
            tokens=tuple(answer),
            logprobs=(0.0,) * len(answer),
            finish=FinishReason.STOP if finished else FinishReason.LENGTH,
            weight_version=self._model,
            engine=self._url,
            seconds=time.perf_counter() - started,
        )

    async def _ask(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """The answer's text, and whether it was finished rather than cut short."""
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((EngineUnreachable, EngineOverloaded)),
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=tenacity.wait_random_exponential(multiplier=self._backoff, max=30.0),
            reraise=True,
        )
        try:
            answer: bytes = await attempts(post, self._client, self._url, body)
        except EngineRejected as error:
            if not _too_long(str(error)):
                raise
            if "max_tokens" not in body:
                return "", False
            # Without a limit an endpoint takes the rest of its context: less than the limit it has just refused.
            return await self._ask({key: value for key, value in body.items() if key != "max_tokens"})
        try:
            choice = orjson.loads(answer)["choices"][0]
            return choice["message"]["content"] or "", choice["finish_reason"] != "length"
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise EngineRejected(f"{self._url}: no chat completion in its answer ({type(error).__name__})") from error


def _too_long(complaint: str) -> bool:
    """Whether a 400 says that the conversation does not fit: OpenAI's code, or how vLLM and SGLang put it."""
    return any(words in complaint for words in ("context_length_exceeded", "context length", "longer than the model"))


def _encode(text: str) -> bytes:
    return text.encode(errors="replace")
