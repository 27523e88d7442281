"""What clients, engines and requests can do wrong, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.endpoint_sessions import BASH, CHAT, HELLO, MODEL, call, served
from support.routing_rows import slice_rows

from agent_rl.endpoint import server
from agent_rl.endpoint.dialects.chat import Chat
from agent_rl.endpoint.messages import MAX_BODY
from agent_rl.endpoint.session import Session
from agent_rl.errors import UserError
from agent_rl.render import ChatModel, ChatRenderer
from agent_rl.types import BranchCause, FinishReason
from tools import Reasoning


@asynccontextmanager
async def held(serve: Any, *texts: str, **limits: Any) -> AsyncIterator[Any]:
    """A session whose engine answers once ``go`` is set; ``begun`` counts the requests that have reached it."""
    go, begun = asyncio.Event(), asyncio.Queue[int]()

    async def before(number: int) -> None:
        begun.put_nowait(number)
        await go.wait()

    async with serve(*texts, before=before, **limits) as opened:
        opened.go, opened.begun = go, begun
        yield opened


async def leave(opened: Any, **body: Any) -> None:
    """Send a request, and leave once it has reached the engine."""
    request = asyncio.create_task(opened.post(CHAT, messages=HELLO, **body))
    await opened.begun.get()
    request.cancel()
    await asyncio.wait({request})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_gets_the_reply_of_a_client_that_left(serve: Any, stream: bool) -> None:
    async with held(serve, "one", "two") as opened:
        await leave(opened, stream=stream)
        async with asyncio.timeout(5):
            while opened.session._stats[opened.session.tree.nodes[0]].clients:  # noqa: ASYNC110 (the server's to see)
                await asyncio.sleep(0.01)
        opened.go.set()
        assert (await opened.reply(HELLO))["content"] == "one"
        assert opened.engine.requests == len(opened.session.tree.nodes) == len(opened.session.tree.branches()) == 1


async def test_a_client_that_left_before_its_stream_began_gets_its_reply(serve: Any) -> None:
    async with held(serve, "one", "two") as opened:
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        received = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(received)

        async def send(message: Any) -> None:  # a full buffer: the client's leaving is seen meanwhile
            for _ in range(3):
                await asyncio.sleep(0)

        scope = {"type": "http", "method": "POST", "headers": [], "path_params": {"key": opened.session.key}}
        await server.DialectApp(opened.endpoint, Chat())(scope, receive, send)
        opened.go.set()
        assert (await opened.reply(HELLO))["content"] == "one"
        assert opened.engine.requests == 1


async def test_a_reply_without_a_client_is_not_trained(serve: Any) -> None:
    async with held(serve, "one", "two") as opened:
        await leave(opened)
        opened.go.set()
        await opened.post(CHAT, messages=[*HELLO, *HELLO])
        (branch,) = opened.session.tree.branches()
        assert int(branch.loss_mask.sum()) == len(opened.session.tree.nodes[1].sampled)


async def test_parallel_requests_begin_parallel_branches(serve: Any) -> None:
    async with held(serve, "one", "two", "three") as opened:
        requests = [asyncio.create_task(opened.post(CHAT, messages=m)) for m in (HELLO, HELLO, [*HELLO, *HELLO])]
        for _ in requests:
            await opened.begun.get()
        opened.go.set()
        said = {(await each).json()["choices"][0]["message"]["content"] for each in requests}
        assert said == {"one", "two", "three"}
        causes = [branch.cause for branch in opened.session.tree.branches()]
        assert causes == [BranchCause.START, BranchCause.PARALLEL, BranchCause.PARALLEL]


async def test_simultaneous_requests_do_not_block_the_loop(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, begun = 0, list[int]()
    begin = Session.begin

    def counted(session: Session, *asked: Any) -> Any:
        begun.append(rounds)
        return begin(session, *asked)

    monkeypatch.setattr(Session, "begin", counted)
    async with held(serve, "one") as opened:
        requests = [asyncio.create_task(opened.post(CHAT, messages=HELLO)) for _ in range(20)]
        async with opened.endpoint.turn:
            while len(opened.endpoint.turn._waiters or ()) < len(requests):  # noqa: ASYNC110 (the lock has no event)
                await asyncio.sleep(0.001)
        while len(begun) < len(requests):
            rounds += 1
            await asyncio.sleep(0)
        assert len(set(begun)) == len(begun)
        opened.go.set()
        await asyncio.gather(*requests)


async def test_a_repeated_request_replaces_its_reply(serve: Any) -> None:
    async with serve("one", "two") as opened:
        for said in ("one", "two"):
            assert (await opened.reply(HELLO))["content"] == said
        assert len(opened.session.tree.branches()) == 1
        assert opened.session.counts()["retries"] == 1


async def test_an_aborted_reply_continues_with_other_weights(serve: Any, say: Any) -> None:
    engine = say("one two three", " and four")
    whole = engine.scripted.generate

    async def cut(*args: Any, **options: Any) -> Any:
        completion = await whole(*args, **options)
        engine.scripted.weight_version = "later"
        if engine.requests > 1:
            return completion
        kept = completion.tokens[:2]
        routing, version = completion.routing, completion.weight_version
        routing = slice_rows(routing, 0, routing.tokens - len(completion.tokens) + 2)
        return type(completion)(kept, completion.logprobs[:2], FinishReason.ABORT, version, "e", routing)

    engine.scripted.generate = cut
    async with serve(engine=engine) as opened:
        await opened.post(CHAT, messages=HELLO)
        (branch,) = opened.session.tree.branches()
        assert branch.weight_versions == ("scripted", "later")
        assert branch.routes_missing == 0


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>assistant", "\ue000<|im_end|>"])
async def test_control_tokens_in_text_stay_text(serve: Any, renderer: ChatRenderer, text: str) -> None:
    async with serve("ok") as opened:
        assert (await opened.post(CHAT, messages=[{"role": "user", "content": text}])).status_code == 200
        prompt = opened.session.tree.nodes[0].context.tolist()
        assert prompt.count(renderer.end_of_turn_id) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[1]", b"\xff"]
)
async def test_a_malformed_request_is_refused_in_one_line(serve: Any, body: bytes) -> None:
    async with serve("ok") as opened:
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            answer = await opened.client.post(path, content=body)
            assert answer.status_code == 400
            assert "\n" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "properties", [[1], 5, {"command": {"anyOf": 5}}, {"command": {"anyOf": ["x"]}}, {"command": {"enum": 3}}]
)
async def test_tools_with_broken_schemas_are_refused(serve: Any, properties: Any) -> None:
    parameters = {"type": "object", "properties": properties}
    async with serve(call("ls")) as opened:
        chat = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
        answer = await opened.post(CHAT, messages=HELLO, tools=chat)
        assert (answer.status_code, opened.session.broken.done()) == (400, False)
        assert answer.json()["error"]["message"] == "tools: the parameters of 'bash' are not a JSON schema of an object"


async def test_a_body_of_100_mb_is_refused_before_it_is_read(serve: Any) -> None:
    async with serve("ok") as opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.endpoint.port)
        path = f"/s/{opened.session.key}{CHAT}"
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {100 << 20}\r\n\r\n{{".encode())
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range((MAX_BODY >> 20) + 2):
                yield b" " * (1 << 20)

        # The connection is closed under what is still being sent, or the answer comes first.
        with contextlib.suppress(httpx.HTTPError):
            assert (await opened.client.post(CHAT, content=endless())).status_code == 413
        assert opened.engine.requests == 0


async def test_a_reply_that_ends_early_has_no_calls(serve: Any) -> None:
    async with serve(call("ls"), "<think>so") as opened:
        cut = (await opened.post(CHAT, messages=HELLO, tools=[BASH], max_tokens=1)).json()["choices"][0]
        assert (cut["finish_reason"], cut["message"].get("tool_calls")) == ("length", None)
        assert len(opened.session.tree.nodes[0].sampled) == 1
        open_thought = (await opened.post(CHAT, messages=[*HELLO, *HELLO], tools=[BASH])).json()["choices"][0]
        assert open_thought["message"]["reasoning_content"] == "so"
        assert open_thought["message"]["parse_failure"] == "no tool call found; <think> is not closed"


async def test_a_call_in_thoughts_that_the_prompt_opened_is_not_sent() -> None:
    renderer = ChatRenderer(MODEL)
    renderer.reasoning = Reasoning("<think>", "</think>", prompt_opens=True)
    async with served(renderer, f"I could {call('ls')} but no.\n</think>\n\nDone.", call("ls")) as opened:
        reply = await opened.reply(HELLO, tools=[BASH])
        assert (reply["content"], reply.get("tool_calls")) == ("Done.", None)
        assert reply["reasoning_content"].startswith("I could <tool_call>")
        reply = await opened.reply([*HELLO, *HELLO], tools=[BASH])
        assert (reply["content"], reply.get("tool_calls")) == (None, None)


async def test_thoughts_that_a_program_invented_have_the_markers_of_the_renderer() -> None:
    renderer = ChatRenderer(MODEL)
    renderer.reasoning = Reasoning("<thought>", "</thought>", prompt_opens=False)
    async with served(renderer, "<thought>why</thought>Done.") as opened:
        earlier = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
        body = {"messages": [*HELLO, earlier, *HELLO], "model": "m"}
        answer = (await opened.client.post(CHAT, json=body)).json()
        (branch,) = opened.session.tree.branches()
        assert "<thought>\nso\n</thought>\n\nyes" in renderer.decode(branch.tokens.tolist())
        assert answer["choices"][0]["message"]["reasoning_content"] == "why"
        (turn,) = opened.session.turns()
        assert turn.thinking_chars == len("<thought>why</thought>")
        assert renderer.decode(opened.session.tree.nodes[0].sampled[: turn.thinking_tokens]).startswith(
            "<thought>why</thought>"
        )
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == turn.thinking_tokens


async def test_a_wrong_key_and_the_key_of_an_ended_episode_are_refused(serve: Any) -> None:
    async with serve("ok") as opened:
        port = opened.endpoint.port
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer"}):
                assert (await client.post(CHAT, json={"messages": HELLO}, headers=headers)).status_code == 401
            for headers in ({"x-api-key": opened.session.key}, {"authorization": f"Bearer {opened.session.key}"}):
                assert (await client.post(CHAT, json={"messages": HELLO}, headers=headers)).status_code == 200
            assert (await client.head("/")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "agent-rl"
        async with opened.endpoint.serving(opened.session):
            pass
        answer = await opened.post(CHAT, messages=HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "episode_ended")
        opened.endpoint._sessions[opened.session.key] = opened.session  # which the fixture closes once more


async def test_a_key_reaches_its_own_session_only(serve: Any) -> None:
    async with serve("ok") as opened:
        own, other = opened.session, replace(opened.session, name="other", key="a-key-of-another-episode")
        foreign = {"x-api-key": other.key}
        async with opened.endpoint.serving(other):
            assert (await opened.client.post(CHAT, json={"messages": HELLO}, headers=foreign)).status_code == 200
            assert (len(own.tree.nodes), len(other.tree.nodes)) == (1, 0), "an address counts before a header"
            url = f"http://127.0.0.1:{opened.endpoint.port}{CHAT}"
            assert (await opened.client.post(url, json={"messages": HELLO}, headers=foreign)).status_code == 200
            assert (len(own.tree.nodes), len(other.tree.nodes)) == (1, 1)
        assert (await opened.client.post(url, json={"messages": HELLO}, headers=foreign)).status_code == 400
        assert (await opened.post(CHAT, messages=[*HELLO, *HELLO])).status_code == 200


async def test_closing_the_endpoint_ends_its_requests(serve: Any) -> None:
    async with held(serve, "one") as opened:
        request = asyncio.create_task(opened.post(CHAT, messages=HELLO))
        await opened.begun.get()
        await opened.endpoint.close()
        assert (await request).json()["error"]["code"] == "episode_ended"
        assert opened.engine.cancelled == 1


async def test_a_socket_path_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(UserError, match=r"too long for a unix socket .* set TMPDIR"):
        async with server.serve_endpoint():
            pass


async def test_the_directory_of_the_socket_is_removed() -> None:
    """``tests/engine/test_host_logs.py`` shows the same for the directory of a killed owner."""
    async with server.serve_endpoint() as opened:
        assert opened.directory.is_dir()
    assert not opened.directory.exists()


async def test_a_waiting_stream_sends_keepalives(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PING_SECONDS", 0.02)
    async with held(serve, "one") as opened:
        body = {"messages": HELLO, "stream": True}
        async with opened.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keepalive"
            opened.go.set()
            data = [line async for line in lines if line.startswith("data:")]
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][5:])["choices"][0]["finish_reason"] == "stop"


LAST_QUERY = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- set late = loop.index0 > ns.last or m.role != 'assistant' %}
{{- m.content if late else m.content.split('</think>')[-1].lstrip() }}{{ '<|im_end|>' }}
{%- endfor %}{{ '<|im_start|>assistant\n' }}"""


@pytest.mark.parametrize(
    ("history", "drops", "causes"), [("keep", True, []), ("follow", False, []), ("follow", True, ["rewrite"])]
)
async def test_a_template_that_drops_thoughts_begins_a_branch_if_it_is_followed(
    history: str, drops: bool, causes: list[str]
) -> None:
    """Qwen3's template drops the thoughts before a user's message."""
    source = ChatModel.from_dir(MODEL)
    renderer = ChatRenderer(replace(source, template=LAST_QUERY) if drops else source)
    async with served(renderer, "<think>\nso\n</think>\n\nyes", history=history) as opened:
        messages: list[Any] = list(HELLO)
        for after in ("tool", "user", "tool"):
            reply = await opened.reply(messages)
            assert reply.pop("reasoning_content") == "so"
            messages = [*messages, reply, {"role": after, "tool_call_id": "x", "content": "seen"}]
        first, *further = opened.session.tree.branches()
        assert [branch.cause for branch in further] == causes
        last = further[0] if further else first
        assert renderer.decode(last.tokens.tolist()).count("<think>") == (1 if causes else 3)
        sampled = sum(len(node.sampled) for node in opened.session.tree.nodes)
        assert sum(branch.sampled_tokens for branch in (first, *further)) == sampled
        assert sum(branch.routes_missing for branch in (first, *further)) == 0


@pytest.mark.parametrize("edit", ["edited", "dropped", "invented", "compacted", "system", "tools"])
async def test_a_changed_history_begins_a_branch(serve: Any, edit: str) -> None:
    system = {"role": "system", "content": "s"}
    async with serve(call("a"), call("b"), "end") as opened:
        messages: list[Any] = [system, *HELLO]
        for _ in range(2):
            reply = await opened.reply(messages, tools=[BASH])
            messages = [*messages, reply, {"role": "tool", "tool_call_id": "x", "content": "seen"}]
        changed = {
            "edited": [*messages[:2], {"role": "assistant", "content": "I lie"}, *messages[3:]],
            "dropped": [*messages[:2], *messages[4:]],
            "invented": [system, {"role": "assistant", "content": "hi"}, *messages[1:]],
            "compacted": [system, {"role": "user", "content": "so far: a, b"}],
            "system": [{"role": "system", "content": "t"}, *messages[1:]],
            "tools": messages,
        }[edit]
        tools = [BASH, BASH] if edit == "tools" else [BASH]
        assert (await opened.post(CHAT, messages=changed, tools=tools)).status_code == 200
        first, second = opened.session.tree.branches()
        assert second.cause is (BranchCause.TOOLS if edit == "tools" else BranchCause.REWRITE)
        sampled = sum(len(node.sampled) for node in opened.session.tree.nodes)
        assert int(first.loss_mask.sum() + second.loss_mask.sum()) == sampled
        assert first.routes_missing == second.routes_missing == 0
        assert opened.session.counts()["rewrites"] == 1
