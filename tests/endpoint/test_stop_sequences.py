"""``stop``, ``stop_sequences`` and ``tool_choice: none``: what the program sees, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from support.endpoint_sessions import BASH, CHAT, HELLO, LAYOUT, Saying, call, served
from support.scripted_engine import scripted_rows

from agent_rl.endpoint.stop_sequences import PIECE, find_stop
from agent_rl.render import ChatRenderer
from agent_rl.types import Completion, FinishReason, VersionSpan
from tools import THINK

STOPS = ["Observation:", "Calling tools:", "</code>"]
"""smolagents' CodeAgent 1.26.0 sends these."""


class Continuing(Saying):
    """Continues a text that the limit of a request interrupted."""

    rest: Sequence[int] = ()

    def _next(self, session: str, turn: int, tokens: Sequence[int]) -> Sequence[int]:
        said = self.rest or self._said.pop(0)
        self.rest = said[PIECE:]
        return said


def code_agent_message(text: str, code: str) -> dict[str, Any]:
    """A reply as CodeAgent sends it back: with its closing tag, and the call that it made of the code."""
    tool_call = {"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": code}}
    content = [{"type": "text", "text": f"{text}</code>\nCalling tools:\n{[tool_call]}"}]
    return {"role": "assistant", "content": content}


async def test_an_episode_of_smolagents_code_agent_is_one_branch(renderer: ChatRenderer) -> None:
    said = [f"Thought: {n}\n<code>\nprint({n})\n" for n in range(3)]
    tail = "</code>\nObservation: invented by the model"
    engine = Continuing(renderer, [text + tail for text in said[:2]] + [said[2] + "</code>"])
    async with served(renderer, engine=engine, top_p=0.9) as opened:
        messages: list[Any] = [{"role": "system", "content": "s"}, *HELLO]
        for number, text in enumerate(said):
            answer = (await opened.post(CHAT, messages=messages, stop=STOPS)).json()["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == (text.strip(), "stop")
            messages.append(code_agent_message(text.strip(), f"print({number})"))
            messages.append({"role": "user", "content": f"Observation:\n{number}"})
        tree = opened.session.tree
        (branch,) = tree.branches()
        assert (tree.echo_differs, opened.session.counts()["rewrites"]) == (0, 0)
        kept = [renderer.decode(node.sampled) for node in tree.nodes]
        assert all(text.startswith(f"{shown}</code>") for text, shown in zip(kept, said, strict=True))
        assert "invented" not in renderer.decode(branch.tokens.tolist())
        assert renderer.decode(branch.tokens.tolist()).count("Calling tools:\n[{'id'") == 2
        assert branch.tokens[branch.loss_mask].tolist() == [token for node in tree.nodes for token in node.sampled]
        assert np.array_equal(branch.logprobs, np.where(branch.loss_mask, np.float32(-0.5), 0))
        branch.kept.check(branch.tokens[branch.loss_mask])
        assert np.array_equal(branch.routing.experts[:-1], scripted_rows(0, len(branch.tokens) - 1, LAYOUT))


async def test_a_stop_sequence_across_two_pieces_is_found(renderer: ChatRenderer) -> None:
    filler = renderer.decode(renderer._encoder.encode("one two three " * 200)[: PIECE - 2])
    engine = Continuing(renderer, [f"{filler}</code> and more " * 2])
    async with served(renderer, engine=engine) as opened:
        assert (await opened.reply(HELLO, stop="</code>"))["content"] == filler.strip()
        (node,) = opened.session.tree.nodes
        assert engine.requests == 2
        assert renderer.decode(node.sampled).rstrip() in (f"{filler}</code>", f"{filler}</code> and")
        assert opened.session.turns()[0].completion_tokens == len(node.sampled)


async def test_text_that_a_program_adds_without_the_stop_sequence_begins_a_branch(renderer: ChatRenderer) -> None:
    async with served(renderer, engine=Continuing(renderer, ["a</code>", "b"])) as opened:
        await opened.reply(HELLO, stop=STOPS)
        await opened.reply([*HELLO, {"role": "assistant", "content": "a more"}, *HELLO], stop=STOPS)
        assert opened.session.tree.echo_differs == 1


async def test_a_reply_without_stop_sequence_may_come_back_with_one(renderer: ChatRenderer) -> None:
    """CodeAgent closes the code that the model left open."""
    async with served(renderer, engine=Continuing(renderer, ["<code>a", "b"])) as opened:
        reply = await opened.reply(HELLO, stop=STOPS)
        closed = {"role": "assistant", "content": reply["content"] + "</code>"}
        await opened.reply([*HELLO, closed, *HELLO], stop=STOPS)
        assert len(opened.session.tree.branches()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_name_the_stop_sequence(serve: Any, stream: bool) -> None:
    async with serve("Done. END of it") as opened:
        client = await opened.clients(anthropic.AsyncAnthropic(base_url=opened.url, api_key="x", max_retries=0))
        request: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": HELLO, "stop_sequences": ["END"]}
        if stream:
            async with client.messages.stream(**request) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**request)
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
        assert reply.content[0].text == "Done."


async def test_stop_sequences_are_not_searched_in_thoughts(serve: Any) -> None:
    async with serve("<think>\nthe END\n</think>\n\nDone. END") as opened:
        reply = await opened.reply(HELLO, stop="END")
        assert (reply["reasoning_content"], reply["content"]) == ("the END", "Done.")


@pytest.mark.parametrize("stop", [3, ["a", 1], {"a": 1}])
async def test_a_stop_that_is_not_text_is_refused(serve: Any, stop: Any) -> None:
    async with serve("ok") as opened:
        answer = await opened.post(CHAT, messages=HELLO, stop=stop)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "stop: expected a text or a list of texts",
        )


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_tool_choice_none_keeps_the_prefix_and_returns_text(serve: Any, api: str) -> None:
    async with serve(call("ls")) as opened:
        function = BASH["function"]
        if api == "chat":
            client = await opened.clients(openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key="x"))
            request: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": [BASH]}
            free = (await client.chat.completions.create(**request)).choices[0]
            reply = (await client.chat.completions.create(**request, tool_choice="none")).choices[0]
            assert (free.finish_reason, reply.finish_reason) == ("tool_calls", "stop")
            assert reply.message.content == call("ls")
        elif api == "responses":
            client = await opened.clients(openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key="x"))
            request = {"model": "m", "input": HELLO, "tools": [{"type": "function", **function}]}
            assert [item.type for item in (await client.responses.create(**request)).output] == ["function_call"]
            assert (await client.responses.create(**request, tool_choice="none")).output_text == call("ls")
        else:
            claude = await opened.clients(anthropic.AsyncAnthropic(base_url=opened.url, api_key="x"))
            tools = [{"name": "bash", "input_schema": function["parameters"]}]
            request = {"model": "m", "max_tokens": 99, "messages": HELLO, "tools": tools}
            assert (await claude.messages.create(**request)).stop_reason == "tool_use"
            reply = await claude.messages.create(**request, tool_choice={"type": "none"})
            assert (reply.stop_reason, reply.content[0].text) == ("end_turn", call("ls"))
        first, second = opened.session.tree.nodes
        assert second.shared == second.prompt == first.prompt, "the same prompt"


@pytest.mark.parametrize(
    ("text", "found"),
    [("a|b|c", (1, "|")), ("ab||", (2, "|")), ("none", None), ("<think>|</think>x|", (17, "|")), ("<think>|", None)],
)
def test_the_first_stop_sequence_after_the_thoughts_counts(text: str, found: tuple[int, str] | None) -> None:
    assert find_stop(text, ["||", "|"], THINK) == found


def test_a_completion_stops_after_a_token_with_the_versions_and_rows_until_there() -> None:
    whole = Completion(
        (1, 2, 3), (-1.0, -2.0, -3.0), FinishReason.LENGTH, "w2", "e", earlier=(VersionSpan(0, 2, "w1"),)
    )
    part = whole.stopped_after(1)
    assert (part.tokens, part.logprobs, part.finish, part.weight_version) == ((1,), (-1.0,), FinishReason.STOP, "w1")
    assert part.versions == (VersionSpan(0, 1, "w1"),)
