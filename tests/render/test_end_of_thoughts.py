"""The tokens with which the loop closes thoughts: as each form of template writes them."""

from __future__ import annotations

import pytest
from support.chat_templates import TEMPLATES, ids, renderer_of, tokenizer
from tokenizers import AddedToken, Tokenizer

from agent_rl.errors import TemplateError
from agent_rl.render import ChatModel, ChatRenderer

WRITES = "('<think>OPEN' + m.reasoning_content + 'CLOSE' if m.reasoning_content else '')"
FORM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + WRITES + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("close", ["\n</think>\n\n", "\n</think>\n", "</think>\n", "</think>"])
def test_thoughts_are_closed_as_the_template_closes_them(close: str) -> None:
    template = FORM.replace("WRITES", WRITES).replace("OPEN", "\n").replace("CLOSE", close.replace("\n", "\\n"))
    renderer = renderer_of(template)
    assert renderer.end_of_thoughts == tuple(ids(close))
    renderer.check_end_of_thoughts()


def test_a_template_that_drops_thoughts_gets_the_usual_form() -> None:
    assert renderer_of("drops_thoughts").end_of_thoughts == tuple(ids("\n</think>\n\n"))


def test_the_thoughts_of_gpt_oss_end_with_the_header_of_the_next_message() -> None:
    made = Tokenizer.from_str(tokenizer().to_str())
    control = ["<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|channel|>"]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
        "{{ '<|start|>assistant' if add_generation_prompt }}"
    )
    renderer = ChatRenderer(ChatModel(made, template, model_type="gpt_oss"))
    end, start, channel = (made.token_to_id(text) for text in ("<|end|>", "<|start|>", "<|channel|>"))
    assert renderer.end_of_thoughts == (end, start, *ids("assistant"), channel, *ids("commentary"))


def test_a_template_without_thoughts_cannot_close_them() -> None:
    renderer = renderer_of("plain")
    assert renderer.end_of_thoughts == ()
    with pytest.raises(TemplateError, match=r"^rollout\.max_thinking_tokens: the chat template has no </think>"):
        renderer.check_end_of_thoughts()


def test_a_template_that_writes_thoughts_without_end_is_refused() -> None:
    template = TEMPLATES["plain"] + "{% if messages[-1].reasoning_content %}{{ '%s' * 10**9 % () }}{% endif %}"
    with pytest.raises(TemplateError, match="Mi characters"):
        renderer_of(template)
