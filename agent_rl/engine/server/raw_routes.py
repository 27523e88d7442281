"""Sends routes as raw bytes of one or two per expert id, where the client asks for it.

SGLang sends base64 of int32, 5.3 times as many bytes. Here the scheduler narrows the ids, and
``POST /generate?routes=raw`` answers with ``MAGIC``, the bytes per id, the length of the ids (8 bytes, little-endian),
the ids ``[rows, num_hidden_layers, top_k]``, and SGLang's JSON without them. Others get SGLang's own answer.

Runs in the engine's environment, which has no other module of this project.
"""

from __future__ import annotations

import base64
import functools
import importlib
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

MAGIC = b"\x93routes"
KEY = "routed_experts"
_WANTS_RAW = ContextVar("wants_raw", default=False)  # of the request that this task answers


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
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
    build = loader._initialize_model

    @functools.wraps(build)
    def build_numbered(*arguments: Any, **options: Any) -> Any:
        model = build(*arguments, **options)
        number_routers(model)
        return model

    loader._initialize_model = build_numbered


def number_routers(model: torch.nn.Module) -> None:
    """Tell each router its layer, under which its routes are captured. In SGLang 0.5.21 the routers of Mixtral, OLMoE,
    Ling, MiniMax-M2 and Nemotron-H do not know theirs: the server dies, or stores a token's routes under all layers."""
    for name, module in model.named_modules():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and type(module).__name__ == "TopK" and module.layer_id is None:
            module.layer_id = int(layer[1])


def narrow(experts: torch.Tensor) -> bytes:
    """The ids as bytes, after the number of bytes per id. Ids out of range stay int32, and the client refuses them."""
    lowest, highest = (int(experts.min()), int(experts.max())) if experts.numel() else (0, 0)
    size = 4 if lowest < 0 or highest > 0x7FFF else 2 if highest > 0xFF else 1
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return bytes([size]) + experts.to(dtype).numpy().tobytes()


def serve(server: Any) -> None:
    """Answer requests of the web server's module ``server``, ``sglang.srt.entrypoints.http_server``."""
    to_response, to_json = server.orjson_response, server.dumps_json
    # SGLang 0.5.21 and 0.5.23 have the same route, but not the same functions behind it.
    route = next(each for each in server.app.routes if getattr(each, "path", None) == "/generate").dependant
    stock = route.call

    async def generate(obj: Any, request: Any) -> Any:
        wants_raw = _WANTS_RAW.set(request.query_params.get("routes") == "raw")
        try:
            return await stock(obj=obj, request=request)
        finally:
            _WANTS_RAW.reset(wants_raw)

    def respond(answer: Any, *options: Any) -> Any:
        raw = _raw(answer, to_json) if _WANTS_RAW.get() else None
        return to_response(widened(answer), *options) if raw is None else raw

    route.call, server.orjson_response = generate, respond
    server.dumps_json = lambda answer: to_json(widened(answer))  # of a stream


def _raw(answer: Any, to_json: Callable[[Any], bytes]) -> Any:
    """The response with raw routes to ``answer``; None if it has no routes."""
    ids = answer["meta_info"].pop(KEY, None) if isinstance(answer, dict) else None
    if ids is None:
        return None
    head = MAGIC + ids[:1] + (len(ids) - 1).to_bytes(8, "little")
    body = b"".join((head, memoryview(ids)[1:], to_json(answer)))
    responses = importlib.import_module("starlette.responses")
    return responses.Response(body, media_type="application/octet-stream")


def widened(answer: Any) -> Any:
    """``answer`` with its routes as SGLang sends them."""
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict) and isinstance(ids := each.get("meta_info", {}).get(KEY), bytes):
            wide = np.frombuffer(ids, f"<i{ids[0]}" if ids[0] > 1 else np.uint8, offset=1).astype("<i4")
            each["meta_info"][KEY] = base64.b64encode(wide.tobytes()).decode()
    return answer
