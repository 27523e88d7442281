"""The endpoint: one HTTP server in the controller's event loop, on loopback and on a unix socket, for all sessions.

::

    POST /s/KEY/v1/chat/completions, /v1/responses, /v1/messages     or without /s/KEY, the key as Bearer or x-api-key
    POST /s/KEY/v1/messages/count_tokens
    GET  /s/KEY/v1/models
    GET  /s/KEY/sandbox/task, POST /s/KEY/sandbox/call                       for programs on the host (:mod:`.box_api`)

A reply is sampled whole and then sent, streamed or not. A client that leaves before finds its reply when it asks for
the same again; a reply counts as delivered once all but the last of it was sent and its client was still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from agent_rl.endpoint.dialects.chat import Chat
from agent_rl.endpoint.dialects.messages import Messages
from agent_rl.endpoint.dialects.responses import Responses
from agent_rl.endpoint.messages import Ask, Dialect, Refusal, Reply, read_whole
from agent_rl.endpoint.session import Session
from agent_rl.endpoint.task_api import sandbox_routes
from agent_rl.errors import UserError
from agent_rl.rollout.conversation_tree import Node
from sandbox import socket_proxy as bridge
from sandbox.temp_dir import TempDirectory

MODEL = "agent-rl"
DIALECTS: dict[str, tuple[str, Dialect]] = {
    "chat": ("/v1/chat/completions", Chat()),
    "responses": ("/v1/responses", Responses()),
    "messages": ("/v1/messages", Messages()),
}
DIRECTORY = "agent-rl-gateway-"
"""What the name of an endpoint's directory begins with. Those of killed runs are removed by the next that serves."""
SOCKET = "gateway.sock"
BRIDGE = "bridge.py"
_LONGEST_SOCKET = 107  # bytes: sockaddr_un.sun_path holds 108 with the null byte
_KEEP_ALIVE = 3600
_STILL_THERE = 15.0
_BACKLOG = 1024


class Gateway:
    """The sessions by their keys, and where the endpoint is: ``directory`` holds the unix socket and the bridge to
    it for sandboxes, ``port`` is that on loopback. Who holds ``turn`` reads its request: of many that come at once each
    waits for the event loop by itself, so that whatever else the loop does goes on in between."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory, self.port = directory, port
        self._sessions: dict[str, Session] = {}
        self._over: set[str] = set()
        self.turn = asyncio.Lock()
        self.failures = 0

    def metrics(self) -> dict[str, float]:
        """``harness/failures``: programs that broke since the start."""
        return {"harness/failures": float(self.failures)}

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[Session]:
        """Answer the session's requests meanwhile; afterwards its key is refused, as that of an episode that ended."""
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key]
            self._over.add(session.key)
            await session.close()

    def session(self, request: Request) -> Session:
        """The session of a request. Raises Refusal for a key that is unknown or whose episode is over."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        key = request.path_params.get("key") or request.headers.get("x-api-key") or bearer
        if key in self._over:
            raise Refusal("ended", "the episode is over")
        if key not in self._sessions:
            raise Refusal("key", "no session has this key: take the address and the key that the program was given")
        return self._sessions[key]

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))


@asynccontextmanager
async def open_gateway(dialects: Sequence[str] = tuple(DIALECTS), *, port: int = 0) -> AsyncIterator[Gateway]:
    """Serve the endpoint until left. ``port`` 0 takes a free one. Raises UserError where no socket can be made."""
    own = await asyncio.to_thread(TempDirectory, DIRECTORY)
    directory = own.path
    try:
        sockets = [_unix_socket(directory / SOCKET), _loopback(port)]
        shutil.copy(bridge.__file__, directory / BRIDGE)
        os.chmod(directory, 0o755)  # a container's root may be another user of the host; the key is the secret
        gateway = Gateway(directory, sockets[1].getsockname()[1])
        app = Starlette(routes=[*_routes(gateway, dialects), *sandbox_routes(gateway.session)])
        server = _Server(_config(app))
        serving = asyncio.create_task(server.serve(sockets), name="gateway")
        try:
            yield gateway
        finally:
            await gateway.close()
            server.should_exit = True
            await asyncio.wait({serving})
    finally:
        own.remove()


class _Server(uvicorn.Server):
    """Signals are the run's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=1,
        backlog=_BACKLOG,
        ws="none",
    )


def _unix_socket(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        raise UserError(
            f"{path}: too long for a unix socket ({_LONGEST_SOCKET} bytes): set TMPDIR to a shorter directory"
        )
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    path.chmod(0o666)
    listening.listen(_BACKLOG)
    return listening


def _loopback(port: int) -> socket.socket:
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # named: asyncio then waits for no acknowledgement
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        raise UserError(f"port {port} of 127.0.0.1: {error.strerror}; take another") from None
    listening.listen(_BACKLOG)
    return listening


def _routes(gateway: Gateway, dialects: Sequence[str]) -> list[BaseRoute]:
    async def models(request: Request) -> Response:
        listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]}
        return Response(orjson.dumps(listed), media_type="application/json")

    async def probe(request: Request) -> Response:
        return Response(b"")

    routes: list[BaseRoute] = []
    for prefix in ("/s/{key}", ""):  # the first that fits is taken: those that programs are given come first
        routes += [Route(f"{prefix}/", probe), Route(prefix, probe)] if prefix else [Route("/", probe)]
        routes.append(Route(f"{prefix}/v1/models", models))
        for path, dialect in (DIALECTS[name] for name in dialects):
            routes.append(Route(prefix + path, Endpoint(gateway, dialect), methods=["POST"]))
        if "messages" in dialects:
            counting = Endpoint(gateway, DIALECTS["messages"][1], counting=True)
            routes.append(Route(f"{prefix}/v1/messages/count_tokens", counting, methods=["POST"]))
    return routes


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request whose reply is being sampled. ``gone`` is done once its client has left."""

    ask: Ask
    node: Node
    session: Session
    gone: asyncio.Task[None]

    async def settled(self, timeout: float | None = None) -> bool:
        """Whether there is a reply, or a refusal, once there is, the client has left or ``timeout`` seconds passed."""
        sampling = self.session.sampling(self.node)
        await asyncio.wait({sampling, self.gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return sampling.done()

    def reply(self) -> Reply:
        """The reply, once it is settled. Raises Refusal where there is none."""
        return self.session.reply(self.node, self.ask)

    def deliver(self) -> None:
        """The reply reaches its client."""
        self.session.forest.deliver(self.node)


class Endpoint:
    """An ASGI application: the requests of one dialect. With ``counting`` it only tells their tokens."""

    def __init__(self, gateway: Gateway, dialect: Dialect, *, counting: bool = False) -> None:
        self._gateway, self._dialect, self._counting = gateway, dialect, counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            session = self._gateway.session(request)
            body = await read_whole(request)
            async with self._gateway.turn:
                await asyncio.sleep(0)
                ask = self._dialect.read(body)
                node = None if self._counting else session.begin(ask)
            if node is None:
                await _send(send, 200, {"input_tokens": session.count_tokens(ask)})
                return
        except ClientDisconnect:
            return
        except Refusal as refusal:
            await _send(send, refusal.status, self._dialect.refusal(refusal))
            return
        asked = _Asked(ask, node, session, asyncio.create_task(_disconnected(receive)))
        try:
            await (self._stream if ask.stream else self._answer)(asked, send)
        finally:
            asked.gone.cancel()
            session.leave(node)

    async def _answer(self, asked: _Asked, send: Send) -> None:
        if not await asked.settled():
            return
        try:
            data = self._dialect.reply(asked.reply())
        except Refusal as refusal:
            await _send(send, refusal.status, self._dialect.refusal(refusal))
            return
        if not asked.gone.done():
            asked.deliver()
            await _send(send, 200, data)

    async def _stream(self, asked: _Asked, send: Send) -> None:
        """The reply as events once it is whole, and comments until then, so that nobody takes the line for dead."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not await asked.settled(_STILL_THERE):
            if asked.gone.done():
                return
            await send(_body(b": keepalive\n\n", more=True))
        try:
            events = list(self._dialect.events(asked.reply(), asked.ask))
        except Refusal as refusal:
            error = orjson.dumps(self._dialect.refusal(refusal))
            await send(_body(b"event: error\ndata: " + error + b"\n\n", more=False))
            return
        await send(_body(b"".join(events[:-1]), more=True))
        if not asked.gone.done():
            asked.deliver()
            await send(_body(events[-1], more=False))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, data: dict[str, object]) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    body = orjson.dumps(data)
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send(_body(body, more=False))


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
