"""Web pages of other sites, and DNS rebinding, at the ports that serve HTTP on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from support.endpoint_sessions import CHAT, MODEL, served
from support.viewer_samples import SampleRun, SampleSource, Served

from agent_rl.render import ChatRenderer
from tests.redteam.attack import report_stopped
from tests.redteam.web_page import REQUESTS

pytestmark = pytest.mark.redteam


@pytest.fixture(scope="module")
def viewer() -> Iterator[Served]:
    with Served(SampleSource(SampleRun())) as started:
        yield started


@pytest.mark.parametrize("name", REQUESTS)
def test_a_page_reads_nothing_of_the_viewer(viewer: Served, name: str) -> None:
    replies = [REQUESTS[name].send(viewer.port, path) for path in ("/", "/api/runs", "/api/0/run")]
    for reply in replies:
        assert not reply.is_readable
        assert reply.status >= 400 or b"\r\ncross-origin-resource-policy: same-origin\r\n" in reply.data.lower()
    report_stopped(f"a page that {name} (viewer)", f"HTTP {sorted({reply.status for reply in replies})}")


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_page_reaches_no_session_of_the_endpoint(name: str) -> None:
    """The endpoint of ``agent-rl serve`` is the same. A page knows no key."""
    async with served(ChatRenderer(MODEL), "one") as opened:
        paths = (CHAT, "/v1/messages", f"/s/guess{CHAT}", "/s/guess/sandbox/call", "/s/guess/sandbox/task")
        replies = [await asyncio.to_thread(REQUESTS[name].send, opened.endpoint.port, path) for path in paths]
        assert not opened.session.tree.nodes, "nothing was sampled"
    assert all(reply.status in (401, 404, 405) and not reply.is_readable for reply in replies)
    report_stopped(f"a page that {name} (endpoint)", f"HTTP {sorted({reply.status for reply in replies})}")


async def test_a_page_learns_a_constant_from_the_endpoint() -> None:
    """The routes that need no key respond with constants, which another site may not read either."""
    async with served(ChatRenderer(MODEL), "one") as opened:
        replies = [
            await asyncio.to_thread(REQUESTS["reads from another site"].send, opened.endpoint.port, path)
            for path in ("/", "/v1/models", "/s/guess/v1/models")
        ]
    bodies = [reply.data.partition(b"\r\n\r\n")[2] for reply in replies]
    assert bodies[0] == b""
    assert {json.loads(body)["data"][0]["id"] for body in bodies[1:]} == {"agent-rl"}
    assert not any(reply.is_readable for reply in replies)
