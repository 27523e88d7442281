"""The probe's verdict on a prefill and a decode server of SGLang on this CPU (prefill-decode disaggregation).

Run: ``pip install --target DIR --no-deps nixl nixl-cu12; python benchmarks/probe_disaggregated.py DIR``

A gateway sends each request to both servers, as SGLang's load balancers do. Printed are the probe's reports: on the
decode server's answers; on answers in which the gateway joined the prompt's rows of the prefill server with the sampled
tokens' rows of the decode server; and on these after a retraction. NIXL moves the caches over TCP. It knows the memory
of a GPU only under the name that SGLang gives, so ``sitecustomize`` renames it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientSession, ClientTimeout, web
from bench_weight_sync import ROOT

from agent_rl.config import EngineConfig
from agent_rl.config.loader import install_model
from agent_rl.engine.launch import EngineServer, free_port
from agent_rl.engine.route_probe.run import probe
from agent_rl.models.spec import read_model_spec

RENAMES = "import nixl_cu12._bindings as names; names.VRAM_SEG = names.DRAM_SEG"


class Gateway:
    """Sends requests to both servers. ``row``: bytes of one token's routes; None: answers are the decode server's."""

    def __init__(self, prefill: str, decode: str, rendezvous: int, session: ClientSession, row: int | None) -> None:
        self._urls, self._rendezvous, self._session, self._row = (prefill, decode), rendezvous, session, row

    async def generate(self, request: web.Request) -> web.StreamResponse:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._rendezvous}
        body = await request.json() | room | {"bootstrap_room": secrets.randbits(62)}
        prefill, decode = self._urls
        bodies = {prefill: body | {"stream": False}, decode: body}
        first, second = await asyncio.gather(
            *(self._session.post(f"{url}/generate", json=each) for url, each in bodies.items())
        )
        prompt, response = await first.json(), web.StreamResponse(status=second.status)
        await response.prepare(request)
        async for line in second.content:
            prefix = b"data: " if line.startswith(b"data: {") else b""
            if self._row and (prefix or line.startswith(b"{")):
                line = prefix + orjson.dumps(self._joined(body, prompt, orjson.loads(line[len(prefix) :]))) + b"\n"
            await response.write(line)
        return response

    def _joined(self, body: dict[str, Any], prompt: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """``answer`` of the decode server with the rows of the prompt's tokens from that of the prefill server."""
        rows = base64.b64decode(prompt["meta_info"]["routed_experts"])
        assert len(rows) == (len(body["input_ids"]) - body["routed_experts_start_len"]) * self._row
        sampled = base64.b64decode(answer["meta_info"].get("routed_experts") or "")[len(rows) :]
        answer["meta_info"]["routed_experts"] = base64.b64encode(rows + sampled).decode()
        answer["meta_info"]["cached_tokens"] = prompt["meta_info"]["cached_tokens"]
        return answer

    async def other(self, request: web.Request) -> web.Response:
        """Endpoints that only read are the decode server's; the others reach both."""
        body, raw, status = await request.read(), b"", 0
        for url in self._urls[request.method == "GET" :]:
            headers = {"content-type": "application/json"}
            async with self._session.request(request.method, url + request.path, data=body, headers=headers) as answer:
                raw, status = await answer.read(), answer.status
        return web.Response(body=raw, status=status)


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/generate", gateway.generate)
    app.router.add_route("*", "/{path:.*}", gateway.other)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def main(packages: Path, directory: Path) -> None:
    install_model(directory / "model", "tiny-moe")
    model_spec, rendezvous, python = read_model_spec(directory / "model"), free_port(), directory / "python"
    (directory / "sitecustomize.py").write_text(RENAMES)
    engine_python = ROOT / ".venv-engine/bin/python"
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={directory}:{packages} {engine_python} "$@"\n')
    python.chmod(0o755)
    async with AsyncExitStack() as stack:
        urls = []
        for mode in ("prefill", "decode"):
            config = EngineConfig(
                python=str(python), device="cpu", dtype="float32", max_total_tokens=8192, threads=1, start_timeout=600,
                extra_args=("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "nixl",
                            "--disaggregation-bootstrap-port", str(rendezvous)),
            )  # fmt: skip
            server = EngineServer(config, directory / "model", directory / f"{mode}.log")
            urls.append((await stack.enter_async_context(server)).url)
        session = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(60)))
        row = model_spec.layout.wire_bytes_per_row
        for name, size, retract in (("decode server", None, False), ("joined", row, False), ("retracted", row, True)):
            async with serving(Gateway(*urls, rendezvous, session, size)) as url:
                print(f"{name}: {(await probe(url, model_spec, retract=retract)).line()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(parser.parse_args().packages.resolve(), Path(temporary)))
