"""The parts of a test of the endpoint, each with the shipped model's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from support import endpoint_sessions
from support.endpoint_sessions import MODEL, Before, Saying

from agent_rl.endpoint.server import EndpointServer, serve_endpoint
from agent_rl.render import ChatRenderer


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return ChatRenderer(MODEL)


@pytest.fixture
def say(renderer: ChatRenderer) -> Callable[..., Saying]:
    """Makes an engine that says the given texts."""

    def saying(*texts: str, before: Before | None = None) -> Saying:
        return Saying(renderer, texts, before)

    return saying


@pytest.fixture
def serve(renderer: ChatRenderer) -> Any:
    return partial(endpoint_sessions.served, renderer)


@pytest.fixture
async def endpoint() -> AsyncIterator[EndpointServer]:
    async with serve_endpoint() as opened:
        yield opened


@pytest.fixture
def drive(endpoint: EndpointServer, renderer: ChatRenderer) -> Any:
    return partial(endpoint_sessions.drive, endpoint, renderer)
