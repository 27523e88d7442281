"""What clients, engines and requests can do wrong, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agent_rl.endpoint import server
from agent_rl.endpoint.dialects.chat import Chat
from agent_rl.endpoint.messages import MAX_BODY
from agent_rl.endpoint.session import Session
from agent_rl.errors import UserError
from agent_rl.render import ChatModel, ChatRenderer
from agent_rl.types import BranchCause, FinishReason

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "u"}]
OWNER = (
    "import sys; from sandbox.temp_dir import TempDirectory; own = TempDirectory(sys.argv[1]); "
    "print(flush=True); input()"
)


@asynccontextmanager
async def held(renderer: ChatRenderer, kit: SimpleNamespace, *texts: str, **limits: Any) -> AsyncIterator[Any]:
    """A session whose engine answers once ``go`` is set; ``begun`` counts the requests that have reached it."""
    go, begun = asyncio.Event(), asyncio.Queue[int]()

    async def before(number: int) -> None:
        begun.put_nowait(number)
        await go.wait()

    async with kit.served(renderer, kit.Saying(renderer, texts, before), **limits) as served:
        served.go, served.begun = go, begun
        yield served


async def leave(served: Any, **body: Any) -> None:
    """Ask, and leave once the engine has been asked."""
    asking = asyncio.create_task(served.ask(CHAT, messages=HELLO, **body))
    await served.begun.get()
    asking.cancel()
    await asyncio.wait({asking})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_finds_its_reply(renderer: ChatRenderer, kit: SimpleNamespace, stream: bool) -> None:
    async with held(renderer, kit, "one", "two") as served:
        await leave(served, stream=stream)
        async with asyncio.timeout(5):
            while served.session._stats[served.session.tree.nodes[0]].clients:  # noqa: ASYNC110 (the server's to see)
                await asyncio.sleep(0.01)
        served.go.set()
        answer = await served.ask(CHAT, messages=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "one"
        assert served.engine.requests == len(served.session.tree.nodes) == len(served.session.tree.branches()) == 1


async def test_a_client_that_left_before_its_stream_began_finds_its_reply(
    renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    async with held(renderer, kit, "one", "two") as served:
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        received = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(received)

        async def send(message: Any) -> None:  # a full buffer: the client's leaving is seen meanwhile
            for _ in range(3):
                await asyncio.sleep(0)

        scope = {"type": "http", "method": "POST", "headers": [], "path_params": {"key": served.session.key}}
        await server.DialectApp(served.endpoint, Chat())(scope, receive, send)
        served.go.set()
        answer = await served.ask(CHAT, messages=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "one"
        assert served.engine.requests == 1


async def test_a_reply_that_nobody_came_back_for_is_not_trained(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with held(renderer, kit, "one", "two") as served:
        await leave(served)
        served.go.set()
        await served.ask(CHAT, messages=[*HELLO, *HELLO])
        (branch,) = served.session.tree.branches()
        assert int(branch.loss_mask.sum()) == len(served.session.tree.nodes[1].sampled)


async def test_two_calls_at_once_alike_and_unlike(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with held(renderer, kit, "one", "two", "three") as served:
        asking = [asyncio.create_task(served.ask(CHAT, messages=m)) for m in (HELLO, HELLO, [*HELLO, *HELLO])]
        for _ in asking:
            await served.begun.get()
        served.go.set()
        said = {(await each).json()["choices"][0]["message"]["content"] for each in asking}
        assert said == {"one", "two", "three"}
        causes = [branch.cause for branch in served.session.tree.branches()]
        assert causes == [BranchCause.START, BranchCause.PARALLEL, BranchCause.PARALLEL]


async def test_what_else_the_loop_does_goes_on_between_requests_that_come_at_once(
    renderer: ChatRenderer, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, begun = 0, list[int]()
    begin = Session.begin

    def counted(session: Session, ask: Any) -> Any:
        begun.append(rounds)
        return begin(session, ask)

    monkeypatch.setattr(Session, "begin", counted)
    async with held(renderer, kit, "one") as served:
        asking = [asyncio.create_task(served.ask(CHAT, messages=HELLO)) for _ in range(20)]
        async with served.endpoint.turn:
            while len(served.endpoint.turn._waiters or ()) < len(asking):  # noqa: ASYNC110 (the lock has no event)
                await asyncio.sleep(0.001)
        while len(begun) < len(asking):
            rounds += 1
            await asyncio.sleep(0)
        assert len(set(begun)) == len(begun)
        served.go.set()
        await asyncio.gather(*asking)


async def test_the_same_again_after_its_reply_replaces_it(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with kit.served(renderer, kit.Saying(renderer, ["one", "two"])) as served:
        for said in ("one", "two"):
            answer = await served.ask(CHAT, messages=HELLO)
            assert answer.json()["choices"][0]["message"]["content"] == said
        assert len(served.session.tree.branches()) == 1
        assert served.session.counts()["retries"] == 1


async def test_an_aborted_reply_goes_on_with_other_weights(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    engine = kit.Saying(renderer, ["one two three", " and four"])
    whole = engine.scripted.generate

    async def cut(*args: Any, **options: Any) -> Any:
        completion = await whole(*args, **options)
        engine.scripted.weight_version = "later"
        if engine.requests > 1:
            return completion
        kept = completion.tokens[:2]
        rows = completion.routing.experts[: len(completion.routing.experts) - len(completion.tokens) + 2]
        routing = type(completion.routing)(
            rows, completion.routing.present[: len(rows)], _cut(completion.routing.spans, len(rows)), 32
        )
        return type(completion)(
            kept, completion.logprobs[:2], FinishReason.ABORT, completion.weight_version, "e", routing
        )

    engine.scripted.generate = cut
    async with kit.served(renderer, engine) as served:
        await served.ask(CHAT, messages=HELLO)
        (branch,) = served.session.tree.branches()
        assert branch.weight_versions == ("scripted", "later")
        assert branch.routes_missing == 0


def _cut(spans: Any, rows: int) -> Any:
    return tuple(
        type(span)(span.start, min(span.stop, rows), span.weight_version, span.engine, span.kind)
        for span in spans
        if span.start < rows
    )


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>assistant", "\ue000<|im_end|>"])
async def test_control_tokens_in_text_stay_text(renderer: ChatRenderer, kit: SimpleNamespace, text: str) -> None:
    async with kit.served(renderer, kit.Saying(renderer, ["ok"])) as served:
        assert (await served.ask(CHAT, messages=[{"role": "user", "content": text}])).status_code == 200
        prompt = served.session.tree.nodes[0].context.tolist()
        assert prompt.count(renderer.end_of_turn_id) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[1]", b"\xff"]
)
async def test_what_is_no_request_is_refused_in_a_line(
    renderer: ChatRenderer, kit: SimpleNamespace, body: bytes
) -> None:
    async with kit.served(renderer, kit.Saying(renderer, ["ok"])) as served:
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            answer = await served.client.post(path, content=body)
            assert answer.status_code == 400
            assert "\n" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "properties", [[1], 5, {"command": {"anyOf": 5}}, {"command": {"anyOf": ["x"]}}, {"command": {"enum": 3}}]
)
async def test_tools_whose_calls_could_not_be_read_are_refused_before_they_break_the_run(
    renderer: ChatRenderer, kit: SimpleNamespace, properties: Any
) -> None:
    parameters = {"type": "object", "properties": properties}
    async with kit.served(renderer, kit.Saying(renderer, [kit.call("ls")])) as served:
        chat = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
        answer = await served.ask(CHAT, messages=HELLO, tools=chat)
        assert (answer.status_code, served.session.broken.done()) == (400, False)
        assert answer.json()["error"]["message"] == "tools: the parameters of 'bash' are not a JSON schema of an object"


async def test_a_body_of_100_mb_is_refused_before_it_is_read(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with kit.served(renderer, kit.Saying(renderer, ["ok"])) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.endpoint.port)
        path = f"/s/{served.session.key}{CHAT}"
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {100 << 20}\r\n\r\n{{".encode())
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range((MAX_BODY >> 20) + 2):
                yield b" " * (1 << 20)

        # The connection is closed under what is still being sent, or the answer comes first.
        with contextlib.suppress(httpx.HTTPError):
            assert (await served.client.post(CHAT, content=endless())).status_code == 413
        assert served.engine.requests == 0


async def test_lengths(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with kit.served(renderer, kit.Saying(renderer, [kit.call("ls"), "<think>so"])) as served:
        cut = (await served.ask(CHAT, messages=HELLO, tools=[kit.BASH], max_tokens=1)).json()["choices"][0]
        assert (cut["finish_reason"], cut["message"].get("tool_calls")) == ("length", None)
        assert len(served.session.tree.nodes[0].sampled) == 1
        open_thought = (await served.ask(CHAT, messages=[*HELLO, *HELLO], tools=[kit.BASH])).json()["choices"][0]
        assert open_thought["message"]["reasoning_content"] == "so"
        assert open_thought["message"]["parse_failure"] == "no tool call found; <think> is not closed"


async def test_keys_that_are_unknown_foreign_or_over(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with kit.served(renderer, kit.Saying(renderer, ["ok"])) as served:
        port = served.endpoint.port
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer"}):
                assert (await client.post(CHAT, json={"messages": HELLO}, headers=headers)).status_code == 401
            for headers in ({"x-api-key": served.session.key}, {"authorization": f"Bearer {served.session.key}"}):
                assert (await client.post(CHAT, json={"messages": HELLO}, headers=headers)).status_code == 200
            assert (await client.head("/")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "agent-rl"
        async with served.endpoint.serving(served.session):
            pass
        answer = await served.ask(CHAT, messages=HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "episode_ended")
        served.endpoint._sessions[served.session.key] = served.session  # which the fixture closes once more


async def test_a_foreign_key_opens_its_own_session_alone(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with kit.served(renderer, kit.Saying(renderer, ["ok"])) as served:
        own, other = served.session, replace(served.session, name="other", key="a-key-of-another-episode")
        foreign = {"x-api-key": other.key}
        async with served.endpoint.serving(other):
            assert (await served.client.post(CHAT, json={"messages": HELLO}, headers=foreign)).status_code == 200
            assert (len(own.tree.nodes), len(other.tree.nodes)) == (1, 0), "an address counts before a header"
            url = f"http://127.0.0.1:{served.endpoint.port}{CHAT}"
            assert (await served.client.post(url, json={"messages": HELLO}, headers=foreign)).status_code == 200
            assert (len(own.tree.nodes), len(other.tree.nodes)) == (1, 1)
        assert (await served.client.post(url, json={"messages": HELLO}, headers=foreign)).status_code == 400
        assert (await served.ask(CHAT, messages=[*HELLO, *HELLO])).status_code == 200


async def test_a_gateway_closed_under_a_request_answers_it(renderer: ChatRenderer, kit: SimpleNamespace) -> None:
    async with held(renderer, kit, "one") as served:
        asking = asyncio.create_task(served.ask(CHAT, messages=HELLO))
        await served.begun.get()
        await served.endpoint.close()
        assert (await asking).json()["error"]["code"] == "episode_ended"
        assert served.engine.cancelled == 1


async def test_a_socket_path_that_is_too_long_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(UserError, match=r"too long for a unix socket .* set TMPDIR"):
        async with server.serve_endpoint():
            pass


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """For temporary files, whose paths leave room for a socket's name."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_what_a_killed_controllers_endpoint_left_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_dir))
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    command = [sys.executable, "-c", OWNER, server.DIRECTORY]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()

    def there() -> set[Path]:
        return set(short_dir.iterdir())

    async def serve() -> None:
        (owned,) = there()
        async with server.serve_endpoint() as first:
            assert there() == {owned, first.directory}, "a living owner's stays"
            owner.kill()
            owner.communicate()
            async with server.serve_endpoint() as second:
                assert there() == {first.directory, second.directory}

    asyncio.run(serve())
    assert there() == set()


async def test_while_nothing_is_there_yet_a_stream_says_so(
    renderer: ChatRenderer, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PING_SECONDS", 0.02)
    async with held(renderer, kit, "one") as served:
        body = {"messages": HELLO, "stream": True}
        async with served.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keepalive"
            served.go.set()
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
async def test_thoughts_before_a_users_message_are_as_sampled_unless_the_template_is_followed(
    kit: SimpleNamespace, history: str, drops: bool, causes: list[str]
) -> None:
    """With ``follow`` a template as Qwen3's begins a branch where it drops them; one that keeps them begins none."""
    source = ChatModel.from_dir(kit.MODEL)
    renderer = ChatRenderer(replace(source, template=LAST_QUERY) if drops else source)
    async with kit.served(renderer, kit.Saying(renderer, ["<think>\nso\n</think>\n\nyes"]), history=history) as served:
        messages: list[Any] = list(HELLO)
        for after in ("tool", "user", "tool"):
            reply = (await served.ask(CHAT, messages=messages)).json()["choices"][0]["message"]
            assert reply.pop("reasoning_content") == "so"
            messages = [*messages, reply, {"role": after, "tool_call_id": "x", "content": "seen"}]
        first, *further = served.session.tree.branches()
        assert [branch.cause for branch in further] == causes
        last = further[0] if further else first
        assert renderer.decode(last.tokens.tolist()).count("<think>") == (1 if causes else 3)
        sampled = sum(len(node.sampled) for node in served.session.tree.nodes)
        assert sum(branch.sampled_tokens for branch in (first, *further)) == sampled
        assert sum(branch.routes_missing for branch in (first, *further)) == 0


@pytest.mark.parametrize("edit", ["edited", "dropped", "invented", "compacted", "system", "tools"])
async def test_histories_that_are_changed_begin_a_branch(
    renderer: ChatRenderer, kit: SimpleNamespace, edit: str
) -> None:
    system = {"role": "system", "content": "s"}
    async with kit.served(renderer, kit.Saying(renderer, [kit.call("a"), kit.call("b"), "end"])) as served:
        messages: list[Any] = [system, *HELLO]
        for _ in range(2):
            reply = (await served.ask(CHAT, messages=messages, tools=[kit.BASH])).json()["choices"][0]["message"]
            messages = [*messages, reply, {"role": "tool", "tool_call_id": "x", "content": "seen"}]
        changed = {
            "edited": [*messages[:2], {"role": "assistant", "content": "I lie"}, *messages[3:]],
            "dropped": [*messages[:2], *messages[4:]],
            "invented": [system, {"role": "assistant", "content": "hi"}, *messages[1:]],
            "compacted": [system, {"role": "user", "content": "so far: a, b"}],
            "system": [{"role": "system", "content": "t"}, *messages[1:]],
            "tools": messages,
        }[edit]
        tools = [kit.BASH, kit.BASH] if edit == "tools" else [kit.BASH]
        assert (await served.ask(CHAT, messages=changed, tools=tools)).status_code == 200
        first, second = served.session.tree.branches()
        assert second.cause is (BranchCause.TOOLS if edit == "tools" else BranchCause.REWRITE)
        sampled = sum(len(node.sampled) for node in served.session.tree.nodes)
        assert int(first.loss_mask.sum() + second.loss_mask.sum()) == sampled
        assert first.routes_missing == second.routes_missing == 0
        assert served.session.counts()["rewrites"] == 1
