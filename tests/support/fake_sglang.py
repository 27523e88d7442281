"""What a fake SGLang server sends: the response to ``/generate`` for a model of three layers, one of them dense."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson

from agent_rl.models.spec import ModelSpec

SPEC = ModelSpec(
    "qwen3_moe", moe=(False, True, True), hidden=8, heads=2, kv_heads=1, head_dim=4, inner=8, vocab_size=100,
    max_positions=256, num_experts=8, top_k=2,
)  # fmt: skip


def generated(request: dict[str, Any], finish: str = "length", **changes: Any) -> bytes:
    """The tokens 7 and 8 with log-probs and routes, with ``changes`` to ``meta_info`` (None removes a key)."""
    prompt, start = request["input_ids"], request.get("routed_experts_start_len", 0)
    count = min(2, request["sampling_params"]["max_new_tokens"])
    routes = np.broadcast_to(np.arange(2, dtype="<i4"), (len(prompt) + count - 1 - start, 3, 2))
    meta = {
        "id": request["rid"], "finish_reason": {"type": finish, "length": count, "message": ""}, "weight_version": "3",
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]][:count], "cached_tokens": 0,
        "input_token_logprobs": [[-0.5 if at else None, token, None] for at, token in enumerate(prompt)],
        "routed_experts": base64.b64encode(routes.tobytes()).decode(), **changes,
    }  # fmt: skip
    kept = {key: value for key, value in meta.items() if value is not None}
    return orjson.dumps({"text": "", "output_ids": [7, 8][:count], "meta_info": kept})
