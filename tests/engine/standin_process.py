"""A stand-in for an SGLang server, as a process of its own: ``python standin_process.py PORT DIR``.

It samples the tokens 7 and 8 with routes, after ``DIR/seconds`` seconds where that file is, and writes each request
that it answers with its version to ``DIR/PORT.answers``. A weight version is told it by ``/set_version``.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from support.local_server import serving


async def main(port: int, directory: Path, host: str = "127.0.0.1") -> None:
    version = "default"

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal version
        if path == "/set_version":
            version = request["version"]
        if path == "/model_info":
            return 200, orjson.dumps({"weight_version": version})
        if path != "/generate":
            return 200, b"{}"
        seconds = directory / "seconds"
        await asyncio.sleep(float(seconds.read_text()) if seconds.exists() else 0)
        with (directory / f"{port}.answers").open("a") as file:
            file.write(f"{request['rid']} {version}\n")
        return 200, _answer(request, version)

    async with serving(handler, port, host):
        await asyncio.Event().wait()


def _answer(request: dict[str, Any], version: str) -> bytes:
    prompt, start = len(request["input_ids"]), request.get("routed_experts_start_len", 0)
    count = min(2, request["sampling_params"]["max_new_tokens"])
    routes = np.broadcast_to(np.arange(2, dtype="<i4"), (prompt + count - 1 - start, 3, 2))
    meta = {
        "id": request["rid"],
        "finish_reason": {"type": "length", "length": count},
        "weight_version": version,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]][:count],
        "cached_tokens": 0,
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    return orjson.dumps({"text": "", "output_ids": [7, 8][:count], "meta_info": meta})


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
