"""Constrained replies of the endpoint: the forms it asks for, how they are sampled and shown, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from support.endpoint_sessions import BASH, CHAT, HELLO, MODEL, PARAMETERS, Saying, served

from agent_rl.errors import GrammarRefused
from agent_rl.render import ChatRenderer
from agent_rl.types import Completion, FinishReason, SamplingParams
from tools import Reasoning, ToolCall, tool_format
from tools.formats.grammars import call_parts, dispatch, without_rules

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
HERMES = tool_format("hermes")
STRICT = {"type": "function", "function": {**BASH["function"], "strict": True}}
ANSWER = '{"n": 1}'
CALL = ToolCall("bash", {"command": "ls"})


class Constrained(Saying):
    """An engine with grammars that names a grammar after its form; ``refused`` are the forms that it refuses."""

    def __init__(self, renderer: ChatRenderer, *texts: str, refused: tuple[Any, ...] = ()) -> None:
        super().__init__(renderer, texts)
        self.refused, self.forms, self.sampled = refused, list[Any](), list[SamplingParams]()
        self.prompts: list[list[int]] = []

    async def grammar(self, form: Any) -> str:
        self.forms.append(form)
        if form in self.refused:
            raise GrammarRefused("JSON Schema at #: no grammar")
        return json.dumps(form)

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Completion:
        self.sampled.append(sampling)
        self.prompts.append(list(tokens))
        return await super().generate(tokens, sampling, **options)


async def test_every_dialect_constrains_its_reply_to_a_json_schema(renderer: ChatRenderer) -> None:
    engine = Constrained(renderer, ANSWER)
    async with served(renderer, engine=engine) as opened:
        assert (await opened.reply(HELLO, response_format=FORMAT)) == {"role": "assistant", "content": ANSWER}
        await opened.reply([*HELLO, *HELLO], response_format={"type": "json_object"})
        assert "n" in (await opened.reply([*HELLO] * 3, response_format={"type": "text"}))["content"]
        client = await opened.clients(openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key="x"))
        wanted: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
        assert (await client.responses.create(model="m", input="a", text=wanted)).output_text == ANSWER
        claude = await opened.clients(anthropic.AsyncAnthropic(base_url=opened.url, api_key="x"))
        request: Any = {"model": "m", "max_tokens": 99, "messages": HELLO}
        config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        beta: Any = {"extra_body": {"output_format": config["format"]}}
        for number, options in enumerate([{"output_config": config}, beta]):
            reply: Any = await claude.messages.create(**request, system=f"{number}", **options)
            assert (reply.content[0].text, reply.stop_reason) == (ANSWER, "end_turn")
    assert engine.forms == [JSON, {"type": "json_schema", "json_schema": {"type": "object"}}, JSON, JSON, JSON]
    grammars = [params.grammar for params in engine.sampled]
    assert grammars == [json.dumps(form) for form in engine.forms[:2]] + [None] + [json.dumps(JSON)] * 3
    assert [params.keep_mask for params in engine.sampled] == [True, True, False, True, True, True]
    assert {params.grammar_prefix for params in engine.sampled} == {0}


async def test_with_tools_the_reply_is_json_or_a_call(renderer: ChatRenderer) -> None:
    engine = Constrained(renderer, HERMES.render(CALL), ANSWER)
    async with served(renderer, engine=engine) as opened:
        reply = await opened.reply(HELLO, tools=[BASH], response_format=FORMAT)
        assert reply["tool_calls"][0]["function"]["name"] == "bash"
        assert await opened.reply([*HELLO, *HELLO], tools=[BASH], tool_choice="none", response_format=FORMAT)
    form = {"type": "or", "elements": [JSON, HERMES.call_form("bash", PARAMETERS)]}
    assert engine.forms == [form, JSON]


async def test_json_of_gpt_oss_is_in_its_final_message(renderer: ChatRenderer) -> None:
    engine = Constrained(renderer, f"<|channel|>final<|message|>{ANSWER}")
    async with served(renderer, engine=engine, fmt="harmony") as opened:
        assert (await opened.reply(HELLO, response_format=FORMAT))["content"] == ANSWER
    opening = {"type": "const_string", "value": "<|channel|>final<|message|>"}
    assert engine.forms == [{"type": "sequence", "elements": [opening, JSON]}]


async def test_a_forced_call_continues_its_opening(renderer: ChatRenderer) -> None:
    """The grammar's beginning is the opening, without the tokens that close the thoughts of the prompt."""
    thinking = ChatRenderer(MODEL)
    thinking.reasoning = Reasoning("<think>", "</think>", prompt_opens=True)
    thinking.end_of_thoughts = tuple(thinking._encoder.encode("\n</think>\n\n"))
    whole = HERMES.render(CALL)
    for own in (renderer, thinking):
        engine = Constrained(own, ' {"command": "ls"}}\n</tool_call>')
        async with served(own, engine=engine) as opened:
            (call,) = (await opened.reply(HELLO, tools=[BASH], tool_choice="required"))["tool_calls"]
            assert call["function"]["arguments"] == '{"command":"ls"}'
        assert engine.forms == [HERMES.call_form("bash", PARAMETERS)]
        ((params,), (prompt,)) = engine.sampled, engine.prompts
        written = own.decode(prompt[len(prompt) - params.grammar_prefix :])
        assert written
        assert whole.startswith(written)


class Interrupted(Constrained):
    """An engine that aborts its first request after three tokens."""

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Completion:
        whole = await super().generate(tokens, sampling, **options)
        if len(self.sampled) > 1:
            return whole
        return replace(whole.stopped_after(3), finish=FinishReason.ABORT, interrupted=True)


async def test_an_interrupted_reply_continues_inside_its_grammar(renderer: ChatRenderer) -> None:
    engine = Interrupted(renderer, ANSWER)
    async with served(renderer, engine=engine) as opened:
        await opened.reply(HELLO, response_format=FORMAT)
        (node,) = opened.session.tree.nodes
        (branch,) = opened.session.tree.branches()
    assert [params.grammar_prefix for params in engine.sampled] == [0, 3]
    assert engine.sampled[0].grammar == engine.sampled[1].grammar
    assert branch.kept is not None
    assert len(branch.kept.counts) == len(node.sampled)


class Careless(Constrained):
    """An engine that says ``text``, and under a grammar the rest of ``right``, at most so many tokens as asked for."""

    def __init__(self, renderer: ChatRenderer, text: str, right: str) -> None:
        super().__init__(renderer, text)
        self.renderer, self.right, self.given = renderer, right, list[str]()

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Completion:
        if sampling.grammar is not None:
            self.given.append(self.renderer.decode(tokens[len(tokens) - sampling.grammar_prefix :]))
            rest = self.right.removeprefix(self.given[-1].strip())
            self._said[1:] = [[*self.renderer._encoder.encode(rest), self.renderer.end_of_turn_id]]
        return await super().generate(tokens, sampling, **options)


@pytest.mark.parametrize("fmt", ["hermes", "xml", "harmony"])
async def test_a_call_of_a_strict_tool_follows_its_schema_whenever_it_is_called(
    renderer: ChatRenderer, fmt: str
) -> None:
    """What stands before the call is sampled without a mask. Thoughts about a call are free."""
    form = tool_format(fmt)
    wrong, right = (form.render(ToolCall("bash", arguments)) for arguments in ({"cmd": "x"}, {"command": "ls"}))
    text = f"<think>\n{wrong}\n</think>\n\nI look.\n"
    engine = Careless(renderer, text + wrong, right)
    async with served(renderer, engine=engine, fmt=fmt) as opened:
        reply = await opened.reply(HELLO, tools=[STRICT])
        assert reply["tool_calls"][0]["function"]["arguments"] == '{"command":"ls"}'
        (node,) = opened.session.tree.nodes
        (branch,) = opened.session.tree.branches()
    head, following = call_parts(form.call_form("bash", PARAMETERS))
    assert engine.forms == [dispatch({head: following})]
    (given,) = engine.given
    assert given.strip()
    assert head.startswith(given.strip())
    assert [params.grammar is None for params in engine.sampled] == [True, False]
    assert renderer.decode(node.sampled) == text + right
    free = [count for count, kept in node.kept if kept is None]
    assert branch.kept is not None
    assert branch.kept.counts.astype(bool).tolist() == [False] * free[0] + [True] * (len(node.sampled) - free[0])


async def test_a_strict_tool_that_is_not_called_changes_nothing(renderer: ChatRenderer) -> None:
    engine = Constrained(renderer, "Done.")
    async with served(renderer, engine=engine) as opened:
        assert (await opened.reply(HELLO, tools=[STRICT]))["content"] == "Done."
        await opened.reply([*HELLO, *HELLO], tools=[BASH])
        assert opened.session.tree.branches()[0].kept is None
    assert [params.grammar for params in engine.sampled] == [None, None]
    assert len(engine.forms) == 1


async def test_a_greedy_reply_has_no_mask(renderer: ChatRenderer) -> None:
    engine = Constrained(renderer, ANSWER)
    async with served(renderer, engine=engine, temperature=0) as opened:
        await opened.reply(HELLO, response_format=FORMAT)
    assert [(params.keep_mask, params.grammar is None) for params in engine.sampled] == [(False, False)]


async def test_a_schema_without_a_grammar_is_refused_or_left_out_where_it_is_not_strict(renderer: ChatRenderer) -> None:
    exact, loose = HERMES.call_form("bash", PARAMETERS), HERMES.call_form("bash", without_rules(PARAMETERS))
    engine = Constrained(renderer, ANSWER, refused=(exact, JSON, dispatch(dict([call_parts(exact)]))))
    async with served(renderer, engine=engine) as opened:
        for where, body in (
            ("response_format", {"response_format": FORMAT}),
            ("tool_choice", {"tools": [STRICT], "tool_choice": "required"}),
            ("tools: a strict tool", {"tools": [STRICT]}),
        ):
            refused = await opened.post(CHAT, messages=HELLO, **body)
            line = f"{where}: no grammar expresses the schema: JSON Schema at #: no grammar"
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, line)
        assert engine.requests == 0
        assert await opened.reply(HELLO, tools=[BASH], tool_choice="required")
    assert engine.forms == [JSON, exact, engine.refused[2], exact, loose]


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({"type": "grammar"}, "response_format 'grammar': not supported"),
        ({"type": "json_schema"}, "response_format: expected a JSON schema as an object"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "response_format: expected a JSON schema as an object"),
        ({"type": "json_schema", "json_schema": []}, "response_format: expected a JSON schema as an object"),
        (FORMAT, "response_format: this engine cannot constrain a reply"),
    ],
)
async def test_what_is_no_schema_and_what_the_engine_lacks_is_refused(serve: Any, wanted: Any, line: str) -> None:
    async with serve("ok") as opened:
        answer = await opened.post(CHAT, messages=HELLO, response_format=wanted)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(line)
        assert opened.engine.requests == 0
        assert (await opened.reply(HELLO))["content"] == "ok"
