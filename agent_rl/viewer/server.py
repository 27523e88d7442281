"""Serves the page and its resources over HTTP, only to browsers of this machine.

::

    GET /            index.html, app.js, app.css: the built files of agent_rl/viewer/static
    GET /api/PATH    a resource of agent_rl.viewer.api as JSON
    GET /api/changes the paths of resources whose files changed, as server-sent events
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_rl.errors import UserError
from agent_rl.viewer.api import Resources

HOST = "127.0.0.1"
STATIC = Path(__file__).parent / "static"
FILES = {"/": "index.html", "/app.js": "app.js", "/app.css": "app.css"}
POLL_SECONDS = 0.4
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class Changes:
    """Polls the stamps of a source and sends the paths of changed resources to all listeners."""

    def __init__(self, source: Resources) -> None:
        self._source = source
        self._listeners: set[asyncio.Queue[list[str]]] = set()

    async def watch(self) -> None:
        """Poll while there are listeners, until cancelled. The first listener gets all changes since the last poll."""
        before = await run_in_threadpool(self._source.stamps)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._listeners:
                continue
            now = await run_in_threadpool(self._source.stamps)
            if paths := affected(before, now):
                for listener in self._listeners:
                    listener.put_nowait(paths)
            before = now

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: a comment at once, then a list of paths for each change. Browsers reconnect after 1 s."""
        listener: asyncio.Queue[list[str]] = asyncio.Queue()
        self._listeners.add(listener)
        try:
            yield b": listening\nretry: 1000\n\n"
            while True:
                yield b"data: " + orjson.dumps(await listener.get()) + b"\n\n"
        finally:
            self._listeners.discard(listener)


def affected(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The resources with different stamps, and the resources that depend on them."""
    changed = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
    for path in tuple(changed):
        run, _, kind = path.partition("/")
        if kind in ("run", "metrics") or kind.startswith("steps/"):  # the list of runs shows the last step and Pass@1
            changed |= {"runs", f"{run}/run"}
        if kind.startswith("steps/"):
            changed |= {f"{run}/trajectories", f"{run}/loads/{kind.removeprefix('steps/')}"}
    return sorted(changed)


class SecurityHeaders:
    """Adds headers that keep the page from loading or sending data elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def application(source: Resources) -> Starlette:
    """The ASGI application. It rejects requests for other host names, so that no other site can read a run."""
    changes = Changes(source)

    async def events(request: Request) -> Response:
        return StreamingResponse(changes.events(), media_type="text/event-stream")

    async def fetch(request: Request) -> Response:
        query = dict(request.query_params)
        body = await run_in_threadpool(source.body, request.path_params["path"], query)
        return Response(body, status_code=_status(body), media_type="application/json")

    async def file(request: Request) -> Response:
        return FileResponse(STATIC / FILES[request.url.path])

    @contextlib.asynccontextmanager
    async def watching(_app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(changes.watch(), name="view-changes")
        yield
        task.cancel()

    routes = [*(Route(path, file) for path in FILES), Route("/api/changes", events), Route("/api/{path:path}", fetch)]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return Starlette(routes=routes, lifespan=watching, middleware=[Middleware(SecurityHeaders), hosts])


def _status(body: bytes) -> int:
    """404 for a missing resource. Errors are short, so longer bodies are not parsed."""
    if len(body) > 4096:
        return 200
    error = orjson.loads(body).get("error")
    return 404 if isinstance(error, dict) and error["kind"] in ("absent", "unknown") else 200


def listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1; port 0 selects a free port. Raises UserError if the port is in use."""
    opened = socket.socket(proto=socket.IPPROTO_TCP)  # with an explicit protocol asyncio sets TCP_NODELAY
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((HOST, port))
        opened.listen()  # connections wait until the server has started
    except OSError as error:
        opened.close()
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for a free port") from None
    return opened


def web_server(source: Resources) -> uvicorn.Server:
    """The server; ``run(sockets=[...])`` serves until Ctrl-C or until ``should_exit`` is set."""
    # Responses are stopped at once: those of /api/changes never end.
    return uvicorn.Server(uvicorn.Config(application(source), log_level="critical", timeout_graceful_shutdown=0))
