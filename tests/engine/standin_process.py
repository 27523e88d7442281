"""A stand-in for an SGLang server, as a process of its own: ``python standin_process.py PORT DIR``.

It samples the tokens 7 and 8 with routes, after ``DIR/seconds`` seconds where that file is, and writes each request
that it answers with its version to ``DIR/PORT.answers``. A weight version is told it by ``/set_version``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson
from support.fake_sglang import generated
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
        return 200, generated(request, weight_version=version)

    async with serving(handler, port, host):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
