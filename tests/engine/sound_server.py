"""A scripted SGLang server for the probe: sound routes, prefix caches and data-parallel ranks, without a model.

A row depends on its token and on all before it, as a transformer's does. Greedy tokens do too. A data-parallel rank
answers from its own prefix cache, whose pages are single tokens.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agent_rl.models.spec import ModelSpec

Rows = NDArray[np.int32]
LAYERS, EXPERTS, TOP_K = 4, 16, 2
SPEC = ModelSpec(
    "qwen3_moe", moe=(True,) * LAYERS, hidden=8, heads=2, kv_heads=1, head_dim=4, inner=8, vocab_size=500,
    max_positions=1024, num_experts=EXPERTS, top_k=TOP_K,
)  # fmt: skip


def prefix_hashes(tokens: list[int], weights: int = 0) -> list[int]:
    """For each token, a number of it, all before it and the ``weights`` that compute it."""
    hashes, value = [], weights
    for token in tokens:
        hashes.append(value := zlib.crc32(token.to_bytes(4), value))
    return hashes


def rows_of(tokens: list[int], weights: int = 0) -> Rows:
    """The routes of ``tokens`` ``[T, LAYERS, TOP_K]``."""
    seeds = np.array(prefix_hashes(tokens, weights), dtype=np.int64)[:, None] * np.arange(3, 3 + LAYERS) % 7919
    first = seeds % EXPERTS
    second = (first + 1 + seeds // EXPERTS % (EXPERTS - 1)) % EXPERTS
    return np.stack([first, second], axis=2).astype(np.int32)


class SoundServer:
    """Answers what the probe asks with ``dp_ranks`` data-parallel ranks. ``info``: what it reports.
    ``requests``: each prompt, and the rank that it was sent to."""

    def __init__(self, dp_ranks: int = 1) -> None:
        self.info: dict[str, Any] = {
            "enable_return_routed_experts": True, "attn_dp_size": dp_ranks, "dp_size": 1, "chunked_prefill_size": 400,
            "cuda_graph_config": {"prefill": {"backend": "disabled"}}, "max_total_num_tokens": 4096,
        }  # fmt: skip
        self._cached: set[tuple[str, int, int]] = set()
        self._samples = 0
        self.requests: list[tuple[list[int], int | None]] = []

    async def handle(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        match path:
            case "/server_info":
                return 200, orjson.dumps(self.info)
            case "/v1/loads":
                return 200, b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}'
            case "/generate":
                await asyncio.sleep(0.001)  # so that concurrent requests overlap
                return 200, self._answer(request)
            case _:
                return 200, b"{}"

    def _answer(self, request: dict[str, Any]) -> bytes:
        prompt, sampling = request["input_ids"], request["sampling_params"]
        self.requests.append((prompt, request.get("routed_dp_rank")))
        tokens, finish = self._sampled(prompt, sampling, request)
        sequence = [*prompt, *tokens]
        key, rank = request.get("extra_key", ""), request.get("routed_dp_rank", 0)
        entries = [(key, rank, value) for value in prefix_hashes(sequence)]
        cached = next((at for at, entry in enumerate(entries[: len(prompt) - 1]) if entry not in self._cached), None)
        self._cached.update(entries[:-1])
        meta = {
            "finish_reason": {"type": finish}, "weight_version": "8", "num_retractions": 0,
            "cached_tokens": len(prompt) - 1 if cached is None else cached,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "routed_experts": encoded(rows_of(sequence[:-1])[request["routed_experts_start_len"] :]),
        }  # fmt: skip
        body = orjson.dumps({"output_ids": tokens, "meta_info": meta})
        return b"data: " + body + b"\n\n" if request.get("stream") else body

    def _sampled(self, prompt: list[int], sampling: dict[str, Any], request: dict[str, Any]) -> tuple[list[int], str]:
        self._samples += 1
        salt = self._samples if sampling["temperature"] else 0
        tokens: list[int] = []
        wanted, finish = (5, "abort") if request.get("stream") else (sampling["max_new_tokens"], "length")
        while len(tokens) < wanted:
            tokens.append((prefix_hashes([*prompt, *tokens])[-1] + salt) % SPEC.vocab_size)
            if tokens[-1] in sampling.get("stop_token_ids", ()):
                return tokens, "stop"
        return tokens, finish


def encoded(rows: Rows) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").tobytes()).decode()
