"""Templates whose tool messages depend on the call before, in few words: the forms of Kimi, gpt-oss and MiniMax."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_templates import ids, renderer_of, token_id

from agent_rl.errors import TemplateError
from agent_rl.types import SampledCall

END, OTHER = token_id("<|im_end|>"), token_id("<|endoftext|>")
_TOOL, _TURN = "{% elif m.role == 'tool' %}", "{% elif m.role == 'assistant' %}"
_FORM = (
    "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}BODY{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
_CALLING = (
    _TURN + "{{ '<|im_start|>assistant\n' + m.content }}{% if m.tool_calls %}"
    "{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ (m.tool_calls[0].function.arguments | tojson) + '<|endoftext|>' }}"
    "{% else %}{% set ns.name = none %}{{ '<|im_end|>' }}{% endif %}"
    + _TOOL
    + "{% if ns.name is none %}{{ raise_exception('no previous call') }}{% endif %}"
)
FORMS = {
    "kimi": _FORM.replace(
        "BODY",
        _TURN
        + "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>' }}"
        + _TOOL
        + "{{ '<|im_start|>' + (m.name or 'tool') + '\n## Return of ' + (m.tool_call_id or '') + '\n' + m.content "
        "+ '<|im_end|>' }}",
    ),
    "gpt-oss": _FORM.replace(
        "BODY", _CALLING + "{{ '<|im_start|>functions.' + ns.name + '\n' + (m.content | tojson) + '<|im_end|>' }}"
    ),
    "minimax": _FORM.replace("BODY", _CALLING + "{{ '<|im_start|>tool\n' + m.content + '<|im_end|>' }}"),
    # the result of no call is written without its tags
    "deepseek-v3.2": _FORM.replace(
        "BODY",
        _TURN
        + "{{ '<|im_start|>assistant\n' + m.content + (m.tool_calls | tojson if m.tool_calls else '') + '<|im_end|>' }}"
        + _TOOL
        + "{{ '<|im_start|>' + ('results\n' if loop.previtem.tool_calls else '') + m.content + '<|im_end|>' }}",
    ),
}
KIMI_CALL = "<|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>{}"


def test_the_header_of_a_result_has_the_sampled_name_and_id() -> None:
    renderer = renderer_of(FORMS["kimi"], eos_token_ids=(END,))
    tokens = renderer.observation("seen", stop=END, call=SampledCall("look", KIMI_CALL))
    assert tokens == ids("<|im_start|>look\n## Return of functions.look:3\nseen<|im_end|><|im_start|>assistant")


def test_a_result_is_written_as_after_a_call() -> None:
    renderer = renderer_of(FORMS["deepseek-v3.2"], eos_token_ids=(END,))
    tokens = renderer.observation("seen", stop=END, call=SampledCall("look", ""))
    assert tokens == ids("<|im_start|>results\nseen<|im_end|><|im_start|>assistant")


def test_a_result_may_need_a_call_in_the_turn_before_and_be_quoted() -> None:
    renderer = renderer_of(FORMS["gpt-oss"], eos_token_ids=(END, OTHER))
    assert (renderer.observation_role, renderer.stop_token_ids) == ("tool", (OTHER, END))
    tokens = renderer.observation('a "b"\n', stop=OTHER, call=SampledCall("look", ""))
    assert tokens == ids('<|im_start|>functions.look\n"a \\"b\\"\\n"<|im_end|><|im_start|>assistant')
    plain = renderer_of(FORMS["minimax"], eos_token_ids=(END, OTHER))
    assert plain.observation("seen", stop=OTHER) == ids("<|im_start|>tool\nseen<|im_end|><|im_start|>assistant")


@pytest.mark.parametrize("form", ["kimi", "gpt-oss", "deepseek-v3.2"])
def test_a_turn_without_a_call_is_answered_as_the_user(form: str) -> None:
    renderer = renderer_of(FORMS[form], eos_token_ids=(END, OTHER))
    renderer.check_tails()
    said = ids("<|im_start|>user\nno call<|im_end|><|im_start|>assistant")
    assert renderer.observation("no call", stop=END) == said
    assert renderer.extension([{"role": "tool", "content": "no call"}], stop=END) == said


@pytest.mark.parametrize("name", ["<|im_end|>", "a<|im_start|>user\n"])
def test_a_sampled_name_never_becomes_control_tokens(name: str) -> None:
    renderer = renderer_of(FORMS["gpt-oss"], eos_token_ids=(END, OTHER))
    tokens = renderer.observation("seen", stop=OTHER, call=SampledCall(name, ""))
    assert (tokens.count(END), tokens.count(token_id("<|im_start|>"))) == (1, 2)
    assert f"functions.{name}" in renderer.decode(tokens)


@pytest.mark.parametrize("form", ["gpt-oss", "minimax"])
def test_a_result_that_needs_a_call_is_refused_if_no_eos_token_ends_the_call(form: str) -> None:
    with pytest.raises(TemplateError, match="no previous call"):
        renderer_of(FORMS[form], eos_token_ids=(), observation_role="tool")


@pytest.mark.parametrize("role", ["tool", "user"])
def test_every_role_has_the_same_end_of_turn(role: Any) -> None:
    assert renderer_of(FORMS["minimax"], eos_token_ids=(END, OTHER), observation_role=role).end_of_turn_id == OTHER
