"""A fake SGLang server in its own process: ``python fake_server_process.py PORT DIR``.

It samples the tokens 7 and 8 with routes, after the seconds in ``DIR/seconds`` if that file exists, and writes each
request and the weight version of its response to ``DIR/PORT.answers``. ``/set_version`` sets the weight version.
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
