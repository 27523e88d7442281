"""A real SGLang server whose turns are scripted: the engine decodes them as it decodes any turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from forced_tokens import processor

from agent_rl.config import EngineConfig
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import ModelSpec
from agent_rl.utils.http import AsyncHttp

ARGUMENTS = ("--enable-custom-logit-processor",)
"""The arguments that a server needs."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the engine was sent and what it sampled, as on the wire."""

    prompt: list[int]
    tokens: list[int]


class ForcingHttp(AsyncHttp):
    """Adds the next of ``turns`` to each request for tokens, and records the ``responses``."""

    def __init__(self, seconds: float, turns: Iterable[Sequence[int]]) -> None:
        super().__init__(seconds)
        self._turns, self._processor = deque(turns), processor()
        self.responses: list[Sampled] = []

    async def post(self, url: str, body: Mapping[str, Any], **options: Any) -> bytes:
        endpoint = url.partition("?")[0]  # without the query, the server answers in JSON
        if not endpoint.endswith("/generate"):
            return await super().post(url, body, **options)
        sampling = body["sampling_params"] | {"custom_params": {"tokens": list(self._turns.popleft())}}
        forced = {**body, "sampling_params": sampling, "custom_logit_processor": self._processor}
        response = orjson.loads(await super().post(endpoint, forced, **options))
        meta = response["meta_info"]
        values = zip(meta["model_logprobs"], meta["output_token_logprobs"], strict=True)
        meta["output_token_logprobs"] = [[own, *rest] for own, (_, *rest) in values]
        self.responses.append(Sampled(body["input_ids"].tolist(), response["output_ids"]))
        return orjson.dumps(response)


class ScriptedEngine(SGLangEngine):
    """The client of one episode, whose turns are ``turns``. The server was admitted by another client."""

    def __init__(self, url: str, spec: ModelSpec, config: EngineConfig, turns: Iterable[Sequence[int]]) -> None:
        super().__init__(url, spec, config)
        self._http: ForcingHttp = ForcingHttp(config.request_timeout, turns)

    async def __aenter__(self) -> ScriptedEngine:
        return self

    @property
    def responses(self) -> Sequence[Sampled]:
        return self._http.responses
