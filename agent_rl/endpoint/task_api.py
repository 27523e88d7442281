"""The task of an episode, for a program that runs on the host: its messages and tools, and calls of these.

::

    GET  /s/KEY/sandbox/task     {"messages": [...], "tools": [...], "max_turns": 50, "max_parse_failures": 3}
    POST /s/KEY/sandbox/call     {"name": "bash", "arguments": {...}}
                             -> {"text": "...", "submitted": false, "failed": false}

Calls run in the task's sandbox, by the environment's own tools; one that submits ends the episode as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agent_rl.endpoint.messages import Loose, Refusal, read_body, read_whole
from agent_rl.endpoint.session import Session
from sandbox import SandboxError
from tools import ToolCall


class _Call(Loose):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


def sandbox_routes(find: Callable[[Request], Session]) -> list[BaseRoute]:
    """The routes of the API. ``find`` gives a request's session, or raises Refusal."""

    async def task(request: Request) -> Response:
        try:
            session = find(request)
        except Refusal as refusal:
            return _answer({"error": refusal.text}, refusal.status)
        limits = session.rules.rollout
        return _answer(
            {
                "messages": [dict(message) for message in session.messages],
                "tools": list(session.tools.schemas()) if session.tools else [],
                "max_turns": limits.max_turns,
                "max_parse_failures": limits.max_parse_failures,
            }
        )

    async def call(request: Request) -> Response:
        try:
            session = find(request)
            asked = read_body(_Call, await read_whole(request))
            result = await session.call(ToolCall(asked.name, asked.arguments))
        except Refusal as refusal:
            return _answer({"error": refusal.text}, refusal.status)
        except SandboxError:
            return _answer({"error": "the episode is over: its sandbox broke"}, 400)
        return _answer({"text": result.text, "submitted": result.submitted, "failed": result.failed})

    return [
        Route("/s/{key}/sandbox/task", task, methods=["GET"]),
        Route("/s/{key}/sandbox/call", call, methods=["POST"]),
    ]


def _answer(data: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")
