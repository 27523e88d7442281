"""Published chat templates, from a directory that ``AGENT_RL_CHAT_TEMPLATES`` names: one ``NAME.jinja`` a model, named
as in the tables of docs/how-to/thinking-models.md, which have the results."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import tokenizer
from tokenizers import AddedToken, Tokenizer

from agent_rl.errors import TemplateError
from agent_rl.render import ChatModel, ChatRenderer
from agent_rl.render.template import ChatTemplate, template_variables
from agent_rl.types import SampledCall

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = os.environ.get("AGENT_RL_CHAT_TEMPLATES", "")
EOS = {
    "<|return|>": ["<|return|>", "<|call|>"],
    "<|observation|>": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "<｜end▁of▁sentence｜>": ["<｜end▁of▁sentence｜>"],
    "[e~[": ["[e~["],
    "": ["<|im_end|>", "<|endoftext|>"],
}
"""By a text in the template; the first counts."""
CONTROL = re.compile(r"<[|｜][^<>'\"+{} ]*?[|｜]>|\]~!?b[\[\]]|\[e~\[")
CALL = SampledCall("look", "")
TABLE = re.compile(r"^\| ([\w.-]+) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", re.M)
CASES = [(thinking, role) for thinking in ("default", "on", "off") for role in ("tool", "user")]
ROWS = {row[0]: row[1:] for row in TABLE.findall((ROOT / "docs/how-to/thinking-models.md").read_text())}

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not DIRECTORY, reason="AGENT_RL_CHAT_TEMPLATES names no directory of chat templates"),
]


def published(name: str) -> ChatModel:
    """The template with a small tokenizer that has its control tokens."""
    source = (Path(DIRECTORY) / f"{name}.jinja").read_text()
    eos = next(eos for text, eos in EOS.items() if text in source)
    made = Tokenizer.from_str(tokenizer().to_str())
    control = dict.fromkeys([*CONTROL.findall(source), *eos])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return ChatModel(made, source, {"bos_token": "<|endoftext|>"}, tuple(made.token_to_id(text) for text in eos))


def outcome(name: str, thinking: Any, role: Any) -> str:
    model = published(name)
    try:
        renderer = ChatRenderer(model, thinking=thinking, observation_role=role)
    except TemplateError as error:
        return "switch" if "reads neither" in str(error) else "refused"
    check_whole(renderer, model, thinking, role)
    return "opened" if renderer.reasoning.prompt_opens else "accepted"


def check_whole(renderer: ChatRenderer, model: ChatModel, thinking: Any, role: Any) -> None:
    """Opening and delta equal the template's rendering of the whole conversation."""
    template = ChatTemplate(model.template, model.special, template_variables(model.template, thinking, {}))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Task."}]
    assert renderer.initial_prompt(messages) == encoded(model, template.render(messages, None))
    opening = template.render(messages, None, generation_prompt=False)
    for number in range(3):
        turn: dict[str, Any] = {"role": "assistant", "content": f"act {number}"}
        named = {}
        if role == "tool":
            function = {"name": CALL.name, "arguments": {"path": "a.py"}}
            turn["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
            named = {"name": CALL.name, "tool_call_id": ""}
        messages += [turn, {"role": role, "content": f"seen {number}", **named}]
        whole = template.render(messages, None)
        assert whole.startswith(opening)
        delta = renderer.observation(f"seen {number}", role, stop=None, call=CALL)
        assert encoded(model, whole)[-len(delta) :] == delta


def encoded(model: ChatModel, text: str) -> list[int]:
    tokens: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_table_says_what_happens_to_a_published_template(name: str) -> None:
    if not (Path(DIRECTORY) / f"{name}.jinja").is_file():
        pytest.skip(f"{DIRECTORY} has no {name}.jinja")
    assert tuple(outcome(name, *case) for case in CASES) == ROWS[name]


@pytest.mark.parametrize(
    ("name", "closing"),
    [
        ("deepseekv3", "\n</think>\n\n"),
        ("glm4moe", "</think>\n"),
        ("nemotron_3_nano", "\n</think>\n"),
        ("qwen2_5", ""),
        ("qwen3", "\n</think>\n\n"),
        ("qwen3_5_think", "\n</think>\n\n"),
        ("qwen3_instruct_2507", ""),
    ],
)
def test_thoughts_are_closed_as_the_published_template_writes_them(name: str, closing: str) -> None:
    model = published(name)
    assert ChatRenderer(model).end_of_thoughts == tuple(encoded(model, closing))
