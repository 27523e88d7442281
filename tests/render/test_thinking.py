"""Templates of the published families' forms, in few words: what they open, how they end a turn, what they drop."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_templates import TEMPLATES, ids, renderer_of, token_id

from agent_rl.config import RolloutConfig
from agent_rl.errors import TemplateError

END = token_id("<|im_end|>")
MESSAGES = [{"role": "user", "content": "Fix it."}]
TASK = "<|im_start|>user\nFix it.<|im_end|>\n<|im_start|>assistant\n"

FORMS = {
    # Qwen3: no thoughts opened; switched off, an empty block that the history lacks
    "qwen3": TEMPLATES["drops_thoughts"]
    + "{% if add_generation_prompt and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
    # Qwen3.5, Nemotron: opened by default
    "qwen3.5": TEMPLATES["drops_thoughts"]
    + "{% if add_generation_prompt %}{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
    "{% endif %}",
    # DeepSeek-V3.1: closed by default, and the switch has another name
    "deepseek": TEMPLATES["drops_thoughts"]
    + "{% if add_generation_prompt %}{{ '<think>' if thinking else '</think>' }}{% endif %}",
    # Qwen3-Thinking, MiniMax-M2: always opened
    "minimax": TEMPLATES["drops_thoughts"] + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}",
}
# GLM-4.5: the next role's token ends a turn
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|endoftext|>' + m.content }}{% elif m.role == 'user' %}"
    "{{ '<|im_start|>user' + m.content }}{% else %}{{ '<|im_end|>' + m.content.split('</think>')[-1] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_end|>' }}{{ '<think></think>' if enable_thinking is false }}"
    "{% endif %}"
)


@pytest.mark.parametrize(
    ("form", "thinking", "opening", "opens"),
    [
        ("qwen3", "default", "", False),
        ("qwen3", "on", "", False),
        ("qwen3", "off", "<think>\n\n</think>\n\n", False),
        ("qwen3.5", "default", "<think>\n", True),
        ("qwen3.5", "on", "<think>\n", True),
        ("qwen3.5", "off", "<think>\n\n</think>\n\n", False),
        ("deepseek", "default", "</think>", False),
        ("deepseek", "on", "<think>", True),
        ("deepseek", "off", "</think>", False),
        ("minimax", "default", "<think>\n", True),
    ],
)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_thinking_decides_how_the_prompt_ends(form: str, thinking: Any, opening: str, opens: bool, role: Any) -> None:
    renderer = renderer_of(FORMS[form], thinking=thinking, observation_role=role)
    renderer.check_tails()
    assert renderer.reasoning.prompt_opens == opens
    assert renderer.initial_prompt(MESSAGES) == ids(TASK + opening)
    seen = "user\n<tool_response>\nseen\n</tool_response>" if role == "tool" else "user\nseen"
    delta = f"\n<|im_start|>{seen}<|im_end|>\n<|im_start|>assistant\n{opening}"
    assert renderer.observation("seen", stop=END) == ids(delta)


@pytest.mark.parametrize("thinking", ["on", "off"])
@pytest.mark.parametrize("form", ["minimax", TEMPLATES["plain"]])
def test_a_template_without_a_switch_refuses_to_be_switched(form: str, thinking: Any) -> None:
    with pytest.raises(TemplateError, match=f"thinking is {thinking}, but .* reads neither enable_thinking"):
        renderer_of(FORMS.get(form, form), thinking=thinking)


def test_a_switch_that_leaves_thoughts_open_is_refused() -> None:
    with pytest.raises(TemplateError, match="still opens thoughts"):
        renderer_of(FORMS["minimax"] + "{% if enable_thinking %}{% endif %}", thinking="off")


def test_thoughts_that_are_opened_before_the_first_turn_only_are_refused() -> None:
    """As DeepSeek-V3.1 with thinking on: after a result of a tool nothing opens thoughts."""
    form = (
        TEMPLATES["drops_thoughts"]
        + "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<think>\n' }}{% endif %}"
    )
    with pytest.raises(TemplateError, match="opens thoughts either before the first turn or after an observation"):
        renderer_of(form, observation_role="tool")
    renderer = renderer_of(form)
    assert (renderer.observation_role, renderer.reasoning.prompt_opens) == ("user", True)


@pytest.mark.parametrize(("written", "thinking"), [(True, "on"), (False, "off"), ("on", "on"), ("off", "off")])
def test_thinking_may_be_written_as_yaml_reads_on_and_off(written: Any, thinking: str) -> None:
    assert RolloutConfig.model_validate({"thinking": written}).thinking == thinking


@pytest.mark.parametrize("name", ["enable_thoughts", "messages", "tools"])
def test_an_option_that_the_template_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(TemplateError, match=f"template_options: the chat template has no option '{name}'"):
        renderer_of(FORMS["qwen3"], options={name: False})


@pytest.mark.parametrize("thinking", ["default", "on", "off"])
def test_a_turn_may_end_with_the_token_of_the_next_role(thinking: Any) -> None:
    end, user = token_id("<|endoftext|>"), token_id("<|im_start|>")
    renderer = renderer_of(GLM, thinking=thinking, eos_token_ids=(user, end))
    opening = "<|im_end|>" + "<think></think>" * (thinking == "off")
    assert renderer.observation_role == "tool"
    assert renderer.stop_token_ids == (end, user)
    assert renderer.observation("seen", stop=None) == ids(f"<|endoftext|>seen{opening}")
    assert renderer.observation("seen", stop=end) == ids(f"seen{opening}")
    assert renderer.observation("seen", stop=user) == ids(f"userseen{opening}"), "the turn began a user message"
    by_user = renderer_of(GLM, thinking=thinking, observation_role="user")
    assert by_user.observation("seen", stop=None) == ids(f"<|im_start|>userseen{opening}")
