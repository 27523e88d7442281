"""Sends routes as raw bytes of one or two per expert id, where the client asks for it.

SGLang 0.5.23 sends base64 of int32, 5.3 times as many bytes. Here the scheduler narrows the ids, and
``POST /generate?routes=raw`` answers with ``MAGIC``, the bytes per id, the length of the ids (8 bytes, little-endian),
the ids ``[rows, num_hidden_layers, top_k]``, and SGLang's JSON without them. Others get SGLang's own answer.

Runs in the engine's environment, which has no other module of this project.
"""

from __future__ import annotations

import base64
import functools
import importlib
from typing import Any

import numpy as np
import torch

MAGIC = b"\x93routes"
KEY = "routed_experts"


def install() -> None:
    """Replace the methods that collect, encode and send routes in this process."""
    results = importlib.import_module("sglang.srt.managers.scheduler_components.batch_result_processor")
    processor = results.SchedulerBatchResultProcessor
    collect = processor._maybe_collect_routed_experts

    @functools.wraps(collect)
    def collect_narrow(self: Any, req: Any) -> None:
        collect(self, req)
        if isinstance(req.routed_experts, torch.Tensor):
            req.routed_experts = narrow(req.routed_experts)

    processor._maybe_collect_routed_experts = collect_narrow


def narrow(experts: torch.Tensor) -> bytes:
    """The ids as bytes, after the number of bytes per id. Ids out of range stay int32, and the client refuses them."""
    lowest, highest = (int(experts.min()), int(experts.max())) if experts.numel() else (0, 0)
    size = 4 if lowest < 0 or highest > 0x7FFF else 2 if highest > 0xFF else 1
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return bytes([size]) + experts.to(dtype).numpy().tobytes()


def serve(server: Any) -> None:
    """Answer requests of the web server's module ``server``, ``sglang.srt.entrypoints.http_server``."""
    responses = importlib.import_module("starlette.responses")
    stock, to_response, to_json = server.serve_generate_request, server.orjson_response, server.dumps_json

    async def generate(obj: Any, request: Any) -> Any:
        if request.query_params.get("routes") != "raw" or obj.stream:
            return await stock(obj, request)
        try:
            answer = await server._global_state.tokenizer_manager.generate_request(obj, request).__anext__()
        except ValueError as error:
            return server._create_error_response(error)
        ids = answer["meta_info"].pop(KEY, None) if isinstance(answer, dict) else None
        if ids is None:
            return to_response(answer)
        head = MAGIC + ids[:1] + (len(ids) - 1).to_bytes(8, "little")
        body = b"".join((head, memoryview(ids)[1:], to_json(answer)))
        return responses.Response(body, media_type="application/octet-stream")

    server.serve_generate_request = generate
    server.orjson_response = lambda answer, *options: to_response(widened(answer), *options)
    server.dumps_json = lambda answer: to_json(widened(answer))  # of a stream


def widened(answer: Any) -> Any:
    """``answer`` with its routes as SGLang sends them."""
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict) and isinstance(ids := each.get("meta_info", {}).get(KEY), bytes):
            wide = np.frombuffer(ids, f"<i{ids[0]}" if ids[0] > 1 else np.uint8, offset=1).astype("<i4")
            each["meta_info"][KEY] = base64.b64encode(wide.tobytes()).decode()
    return answer
