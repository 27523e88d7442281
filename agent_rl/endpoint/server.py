"""The endpoint: one HTTP server in the controller's event loop, on loopback and on a Unix socket, for all sessions.

::

    POST /s/KEY/v1/chat/completions, /v1/responses, /v1/messages     without /s/KEY: the key as Bearer or x-api-key
    POST /s/KEY/v1/messages/count_tokens
    GET  /s/KEY/v1/models, /v1/models/NAME
    GET  /s/KEY/sandbox/task, POST /s/KEY/sandbox/call               for programs on the host

A reply is sampled completely and then sent, streamed or not. A client that disconnects earlier gets the same reply when
it repeats the request. A reply counts as delivered once all but its last event was sent and its client was still
connected.
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
from typing import Any

import orjson
import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from agent_rl.endpoint.dialects.chat import Chat
from agent_rl.endpoint.dialects.messages import Messages
from agent_rl.endpoint.dialects.responses import Responses
from agent_rl.endpoint.messages import (
    ChatRequest,
    ChatResponse,
    Dialect,
    RequestModel,
    RequestRejected,
    parse_request,
    read_request_body,
)
from agent_rl.endpoint.session import Session
from agent_rl.errors import UserError
from agent_rl.rollout.conversation_tree import Node
from sandbox import SandboxError
from sandbox import socket_proxy as bridge
from sandbox.temp_dir import TempDirectory
from tools import ToolCall

MODEL = "agent-rl"
DIALECTS: dict[str, tuple[str, Dialect]] = {
    "chat": ("/v1/chat/completions", Chat()),
    "responses": ("/v1/responses", Responses()),
    "messages": ("/v1/messages", Messages()),
}
DIRECTORY = "agent-rl-endpoint-"
"""Name prefix of an endpoint's directory. The next endpoint removes the directories of killed runs."""
SOCKET = "endpoint.sock"
BRIDGE = "bridge.py"
_MAX_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path holds 108 with the null byte
_KEEP_ALIVE_SECONDS = 3600
_PING_SECONDS = 15.0
_BACKLOG = 1024


class EndpointServer:
    """The sessions by key, and the endpoint's addresses: ``directory`` holds the Unix socket and its bridge for
    sandboxes, ``port`` is on loopback, ``remote`` is the host and port for other nodes. ``turn`` is held while a
    request is parsed, so that many concurrent requests do not block the event loop."""

    def __init__(self, directory: Path, port: int, remote: tuple[str, int] | None = None) -> None:
        self.directory, self.port, self.remote = directory, port, remote
        self._sessions: dict[str, Session] = {}
        self._ended: set[str] = set()
        self.turn = asyncio.Lock()
        self.failures = 0

    def metrics(self) -> dict[str, float]:
        """``harness/failures``: programs that failed since the start."""
        return {"harness/failures": float(self.failures)}

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[Session]:
        """Answer the session's requests within the block; afterwards its key is rejected as ended."""
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key]
            self._ended.add(session.key)
            await session.close()

    def session(self, request: Request) -> Session:
        """The session of a request. Raises RequestRejected for an unknown key or an ended episode."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        key = request.path_params.get("key") or request.headers.get("x-api-key") or bearer
        if key in self._ended:
            raise RequestRejected("ended", "the episode is over")
        if key not in self._sessions:
            raise RequestRejected("key", "no session has this key: use the address and key passed to the program")
        return self._sessions[key]

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))


@asynccontextmanager
async def serve_endpoint(
    dialects: Sequence[str] = tuple(DIALECTS), *, port: int = 0, bind: str | None = None
) -> AsyncIterator[EndpointServer]:
    """Serve the endpoint within the block. ``port`` 0 takes a free port. ``bind``: a further address to listen on, for
    other nodes. Raises UserError if a socket cannot be created."""
    temporary = await asyncio.to_thread(TempDirectory, DIRECTORY)
    directory = temporary.path
    try:
        sockets = [_unix_socket(directory / SOCKET), _listening("127.0.0.1", port)]
        sockets += [_listening(bind, 0)] if bind else []
        shutil.copy(bridge.__file__, directory / BRIDGE)
        os.chmod(directory, 0o755)  # a container's root may map to another user; the key is the secret
        remote = (bind, sockets[2].getsockname()[1]) if bind else None
        endpoint = EndpointServer(directory, sockets[1].getsockname()[1], remote)
        app = Starlette(routes=[*_routes(endpoint, dialects), *_sandbox_routes(endpoint)])
        server = _Server(_config(app))
        serving = asyncio.create_task(server.serve(sockets), name="endpoint")
        try:
            yield endpoint
        finally:
            await endpoint.close()
            server.should_exit = True
            await asyncio.wait({serving})
    finally:
        temporary.remove()


class _Server(uvicorn.Server):
    """Leaves signals to the run."""

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
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        backlog=_BACKLOG,
        ws="none",
    )


def _unix_socket(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise UserError(
            f"{path}: too long for a unix socket ({_MAX_SOCKET_PATH} bytes): set TMPDIR to a shorter directory"
        )
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    path.chmod(0o666)
    listening.listen(_BACKLOG)
    return listening


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # explicit protocol: asyncio then sets TCP_NODELAY
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise UserError(f"port {port} of {host}: {error.strerror}; choose another port or address") from None
    listening.listen(_BACKLOG)
    return listening


def _routes(endpoint: EndpointServer, dialects: Sequence[str]) -> list[BaseRoute]:
    def described(request: Request) -> dict[str, Any]:
        with contextlib.suppress(RequestRejected):
            return _model(request, endpoint.session(request))
        return _model(request, None)

    async def models(request: Request) -> Response:
        model = described(request)
        page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return _json_response({"object": "list", "data": [model], **page})

    async def model(request: Request) -> Response:
        return _json_response(described(request))

    async def missing(request: Request) -> Response:
        served = ", ".join(DIALECTS[name][0] for name in dialects)
        path = f"/v1/{request.path_params['path']}"
        error = RequestRejected("route", f"{request.method} {path}: not served; conversations go to {served}")
        return _json_response(Chat().error(error), error.status)

    async def probe(request: Request) -> Response:
        return Response(b"")

    routes: list[BaseRoute] = []
    for prefix in ("/s/{key}", ""):  # the first match is used
        routes += [Route(f"{prefix}/", probe), Route(prefix, probe)] if prefix else [Route("/", probe)]
        routes += [Route(f"{prefix}/v1/models", models), Route(f"{prefix}/v1/models/{{name:path}}", model)]
        for path, dialect in (DIALECTS[name] for name in dialects):
            routes.append(Route(prefix + path, DialectApp(endpoint, dialect), methods=["POST"]))
        if "messages" in dialects:
            counting = DialectApp(endpoint, DIALECTS["messages"][1], counting=True)
            routes.append(Route(f"{prefix}/v1/messages/count_tokens", counting, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/{{path:path}}", missing, methods=["GET", "POST"]))
    return routes


def _model(request: Request, session: Session | None) -> dict[str, Any]:
    """The model by any name, with the fields of OpenAI's and of Anthropic's API and the window as vLLM and SGLang
    (``max_model_len``), OpenRouter (``context_length``) and Anthropic (``max_input_tokens``) name it."""
    name = request.path_params.get("name", MODEL)
    model = {"id": name, "object": "model", "created": 0, "owned_by": MODEL}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    if session is None:
        return model
    window = dict.fromkeys(("max_model_len", "context_length", "max_input_tokens"), session.context)
    return {**model, **window, "max_tokens": session.max_output_tokens}


class _SandboxCall(RequestModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


def _sandbox_routes(endpoint: EndpointServer) -> list[BaseRoute]:
    """The sandbox API: an episode's task, and calls of its tools, for programs on the host.

    ::

        GET  /s/KEY/sandbox/task     {"messages": [...], "tools": [...], "max_turns": 50, "max_parse_failures": 3}
        POST /s/KEY/sandbox/call     {"name": "bash", "arguments": {...}}
                                 -> {"text": "...", "submitted": false, "failed": false}

    Calls run in the task's sandbox with the environment's tools. A call that submits ends the episode.
    """

    async def task(request: Request) -> Response:
        try:
            session = endpoint.session(request)
        except RequestRejected as error:
            return _json_response({"error": error.text}, error.status)
        limits = session.rules.rollout
        return _json_response(
            {
                "messages": [dict(message) for message in session.messages],
                "tools": list(session.tools.schemas()) if session.tools else [],
                "max_turns": limits.max_turns,
                "max_parse_failures": limits.max_parse_failures,
            }
        )

    async def call(request: Request) -> Response:
        try:
            session = endpoint.session(request)
            async with session.reading:
                parsed = parse_request(_SandboxCall, await read_request_body(request))
            result = await session.call(ToolCall(parsed.name, parsed.arguments))
        except RequestRejected as error:
            return _json_response({"error": error.text}, error.status)
        except SandboxError:
            return _json_response({"error": "the episode is over: its sandbox failed"}, 400)
        return _json_response({"text": result.text, "submitted": result.submitted, "failed": result.failed})

    return [
        Route("/s/{key}/sandbox/task", task, methods=["GET"]),
        Route("/s/{key}/sandbox/call", call, methods=["POST"]),
    ]


def _json_response(data: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class _PendingReply:
    """A request whose reply is being sampled. ``disconnected`` is done once its client has left."""

    chat_request: ChatRequest
    node: Node
    session: Session
    disconnected: asyncio.Task[None]

    async def wait_done(self, timeout: float | None = None) -> bool:
        """Wait until the reply is done, the client has left or ``timeout`` seconds have passed; True if the reply is
        done."""
        sampling = self.session.sampling(self.node)
        await asyncio.wait({sampling, self.disconnected}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return sampling.done()

    def reply(self) -> ChatResponse:
        """The reply once it is done. Raises RequestRejected if sampling failed."""
        return self.session.reply(self.node, self.chat_request)

    def deliver(self) -> None:
        """Mark the reply as delivered."""
        self.session.tree.deliver(self.node)


class DialectApp:
    """An ASGI application for the requests of one dialect. ``counting``: return only the number of prompt tokens."""

    def __init__(self, endpoint: EndpointServer, dialect: Dialect, *, counting: bool = False) -> None:
        self._endpoint, self._dialect, self._counting = endpoint, dialect, counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            session = self._endpoint.session(request)
            async with session.reading:
                body = await read_request_body(request)
            session.check_size(len(body))
            async with self._endpoint.turn:
                await asyncio.sleep(0)
                chat_request = self._dialect.read(body)
            constraint = None if self._counting else await session.constraint(chat_request)
            node = None if self._counting else session.begin(chat_request, constraint)
            if node is None:
                await _send(send, 200, {"input_tokens": session.count_tokens(chat_request)})
                return
        except ClientDisconnect:
            return
        except RequestRejected as error:
            await _send(send, error.status, self._dialect.error(error))
            return
        pending = _PendingReply(chat_request, node, session, asyncio.create_task(_disconnected(receive)))
        try:
            await (self._stream if chat_request.stream else self._respond)(pending, send)
        finally:
            pending.disconnected.cancel()
            session.leave(node)

    async def _respond(self, pending: _PendingReply, send: Send) -> None:
        if not await pending.wait_done():
            return
        try:
            data = self._dialect.response(pending.reply())
        except RequestRejected as error:
            await _send(send, error.status, self._dialect.error(error))
            return
        if not pending.disconnected.done():
            pending.deliver()
            await _send(send, 200, data)

    async def _stream(self, pending: _PendingReply, send: Send) -> None:
        """Send the reply as events once it is complete, and comments until then to keep the connection alive."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not await pending.wait_done(_PING_SECONDS):
            if pending.disconnected.done():
                return
            await send(_body(b": keepalive\n\n", more=True))
        try:
            events = list(self._dialect.events(pending.reply(), pending.chat_request))
        except RequestRejected as error:
            encoded = orjson.dumps(self._dialect.error(error))
            await send(_body(b"event: error\ndata: " + encoded + b"\n\n", more=False))
            return
        await send(_body(b"".join(events[:-1]), more=True))
        if not pending.disconnected.done():
            pending.deliver()
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
