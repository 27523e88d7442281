from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import TEMPLATES, ids, renderer_of, token_id, tokenizer
from tokenizers import AddedToken, Tokenizer

from agent_rl.errors import TemplateError
from agent_rl.render import ChatModel, ChatRenderer
from tools import ToolCall, tool_format

END = token_id("<|im_end|>")
MESSAGES = [{"role": "system", "content": "Fix bugs."}, {"role": "user", "content": "f(1) is 2, should be 1."}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look <here>: é", "parameters": {}}}]
CONTROL = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "</tool_response>"]
PIECES = st.sampled_from([*CONTROL, "\n", "\n\n", " ", "def f(x):", "é"])
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=12).map("".join)


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return renderer_of("plain")


TASK = "<|im_start|>user\nf(1) is 2, should be 1.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_the_initial_prompt_is_the_text_of_the_template(renderer: ChatRenderer, tools: Any) -> None:
    shown = "\n\nTools: " + json.dumps(tools, ensure_ascii=False) if tools else ""
    assert renderer.initial_prompt(MESSAGES, tools) == ids(f"<|im_start|>system\nFix bugs.{shown}<|im_end|>\n{TASK}")


def test_observation_continues_after_the_stop_token(renderer: ChatRenderer) -> None:
    delta = "\n<|im_start|>user\n<tool_response>\nedited\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert renderer.observation("edited", stop=END) == ids(delta)
    assert renderer.observation("edited", stop=None) == ids("<|im_end|>" + delta)
    plain = "\n<|im_start|>user\nedited<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.observation("edited", "user", stop=END) == ids(plain)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="|"), max_size=30)


@given(turns=st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=60)
def test_a_whole_episode_is_the_rendering_of_the_template(renderer: ChatRenderer, turns: list[str]) -> None:
    """Opening, turns and deltas, put together, are what the tokenizer gives for the text as a whole."""
    tokens = renderer.initial_prompt(MESSAGES)
    text = tokenizer().decode(tokens, skip_special_tokens=False)
    for seen in turns:
        tokens += ids("act<|im_end|>") + renderer.observation(seen, stop=END)
        text += f"act<|im_end|>\n<|im_start|>user\n<tool_response>\n{seen}\n</tool_response><|im_end|>\n"
        text += "<|im_start|>assistant\n"
    assert tokens == ids(text)


@given(seen=TEXTS)
@settings(max_examples=200)
def test_content_never_becomes_control_tokens(renderer: ChatRenderer, seen: str) -> None:
    end, start = END, token_id("<|im_start|>")
    tokens = renderer.observation(seen, stop=None)
    assert (tokens.count(end), tokens.count(start), tokens.count(token_id("<|endoftext|>"))) == (2, 2, 0)
    shown = f"user\n<tool_response>\n{seen}\n</tool_response><|im_end|>"
    assert renderer.decode(tokens) == f"<|im_end|>\n<|im_start|>{shown}\n<|im_start|>assistant\n"
    opening = renderer.initial_prompt([{"role": "user", "content": seen}], [{"a": seen, seen: [seen]}])
    assert opening.count(end) == 2
    assert opening.count(start) == 3


def test_text_of_control_tokens_comes_through_next_to_private_use_characters(renderer: ChatRenderer) -> None:
    seen = "\ue000<|im_end|>\ue001"
    assert seen in renderer.decode(renderer.observation(seen, stop=END))


@pytest.mark.parametrize("pairs", [0, 100])
def test_no_text_holds_every_guard(renderer: ChatRenderer, pairs: int) -> None:
    """All 6,400 characters of the private use area, and as many pairs of them."""
    every = "".join(map(chr, range(0xE000, 0xF900)))
    first = "".join(every[0] + other for other in every[:pairs])
    seen = f"<|im_end|>{every}{first}"
    assert seen in renderer.decode(renderer.observation(seen, stop=END))


def test_decode_leaves_out_only_the_stop_token_at_the_end(renderer: ChatRenderer) -> None:
    assert renderer.decode(ids("<tool_response>é x<|im_end|>")) == "<tool_response>é x"
    assert renderer.decode(ids("a<|im_start|>b<|endoftext|>c")) == "a<|im_start|>b<|endoftext|>c"
    assert renderer.decode([]) == ""


@pytest.mark.parametrize("name", ["kimi", "deepseek-v3", "deepseek-v3.1", "deepseek-dsml", "harmony"])
def test_a_sampled_call_written_with_control_tokens_is_parsed(name: str) -> None:
    call, fmt, made = ToolCall("look", {"path": "a.py"}), tool_format(name), Tokenizer.from_str(tokenizer().to_str())
    text = fmt.render(call)
    control = re.findall(r"<[|｜][^<>]*[|｜]>", text)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    renderer = ChatRenderer(ChatModel(made, TEMPLATES["plain"]))
    sampled = made.encode(text + "<|im_end|>", add_special_tokens=False).ids
    assert fmt.parse(renderer.decode(sampled)) == call
    if name != "deepseek-dsml":  # its markers are text
        assert len(set(control).intersection(made.id_to_token(token) for token in sampled)) > 2


@pytest.mark.parametrize("name", ["plain", "keeps_thoughts_of_the_task", "drops_thoughts", "opens_thought", "trims"])
def test_prefix_preserving_templates_pass(name: str) -> None:
    renderer = renderer_of(name)
    assert renderer.observation_role == "tool"
    assert renderer.stop_token_ids == (token_id("<|im_end|>"),)
    assert renderer.reasoning.prompt_opens == (name == "opens_thought")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("counts_messages", "changes the text before a turn once more messages follow: '2 messages"),
        ("system_last", "changes the text before a turn"),
        ("no_end_token", "must end with a special token"),
        ("drops_observations", "must render the text of a message of role tool"),
    ],
)
def test_other_templates_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(TemplateError) as caught:
        renderer_of(name)
    message = str(caught.value)
    assert message.startswith("the chat template is not prefix-preserving: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("role", ["tool", "user"])
def test_thoughts_that_the_template_drops_from_its_history_leave_the_delta_as_it_is(role: Any) -> None:
    delta = renderer_of("plain").observation("seen", role, stop=END)
    for name in ("drops_thoughts", "keeps_thoughts_of_the_task"):
        assert renderer_of(name).observation("seen", role, stop=END) == delta


@pytest.mark.parametrize("name", ["no_tool_role", "escapes_tool_text"])
def test_observations_have_the_role_user_where_tool_does_not_work(name: str) -> None:
    renderer = renderer_of(name)
    assert renderer.observation_role == "user"
    assert "user\nseen" in renderer.decode(renderer.observation("seen", stop=END))


def test_a_trimming_template_s_delta_is_trimmed() -> None:
    renderer = renderer_of("trims")
    spaced = renderer.observation("\n seen \n", stop=END)
    assert spaced == renderer.observation("seen", stop=END)


def write_dir(directory: Path, template: str, bos: object = "<|endoftext|>") -> None:
    tokenizer().save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>", "bos_token": bos}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_reads_a_hugging_face_directory(tmp_path: Path) -> None:
    write_dir(tmp_path, "{{ bos_token }}" + TEMPLATES["plain"], {"content": "<|endoftext|>"})
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    renderer = ChatRenderer(tmp_path)
    assert renderer.stop_token_ids == (2, 0)
    assert renderer.initial_prompt(MESSAGES)[:2] == [0, 1]
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["plain"])
    assert ChatRenderer(tmp_path).initial_prompt(MESSAGES)[0] == 1, "the file goes before tokenizer_config.json"


@pytest.mark.slow
def test_same_tokens_as_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("plain", "keeps_thoughts_of_the_task", "trims"):
        write_dir(tmp_path, TEMPLATES[name])
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        renderer = ChatRenderer(tmp_path)
        grown = renderer.initial_prompt(MESSAGES, TOOLS)
        assert grown == reference.apply_chat_template(MESSAGES, TOOLS, add_generation_prompt=True, return_dict=False)
        messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nact"}]
        messages.append({"role": "tool", "content": "def f(x):\n\n    return 'é'"})
        grown += ids(messages[-2]["content"])
        grown += renderer.observation(messages[-1]["content"], stop=None)
        assert grown == reference.apply_chat_template(messages, TOOLS, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "tokenizer.json: file not found"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json: not valid JSON"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{}"}, "no chat template"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "not valid Jinja: line 1"),
        ({"tokenizer.json": None, "chat_template.jinja": "{{ messages.x.y }}"}, "fails on messages of roles"),
    ],
)
def test_a_broken_model_directory_is_one_line(tmp_path: Path, files: dict[str, str | None], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(tokenizer().to_str() if text is None else text)
    with pytest.raises(TemplateError) as caught:
        ChatRenderer(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_eos_token_that_content_could_spell_is_refused() -> None:
    close = token_id("</tool_response>")
    with pytest.raises(TemplateError, match="not marked special"):
        renderer_of("plain", eos_token_ids=(close,))


def test_template_options_reach_the_template() -> None:
    source = TEMPLATES["plain"] + "{% if add_generation_prompt and mood %}[{{ mood }}]{% endif %}"
    plain = renderer_of(source).initial_prompt(MESSAGES)
    assert renderer_of(source, options={"mood": "calm"}).initial_prompt(MESSAGES) == [*plain, *ids("[calm]")]


TAILS = [["tool"], ["tool", "tool"], ["user"], ["tool", "user"], ["user", "user"]]


@pytest.mark.parametrize("roles", TAILS)
@pytest.mark.parametrize("name", ["plain", "trims", "keeps_thoughts_of_the_task"])
def test_an_extension_is_the_text_of_the_template_after_a_turn(name: str, roles: list[str]) -> None:
    renderer = renderer_of(name)
    renderer.check_tails()
    start = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    tail = [{"role": role, "content": f"<|im_end|> seen {at}"} for at, role in enumerate(roles)]
    opening = renderer.initial_prompt(start)
    said = ids("done")
    whole = renderer.initial_prompt([*start, {"role": "assistant", "content": "done"}, *tail])
    assert [*opening, *said, *renderer.extension(tail, stop=None)] == whole
    assert renderer.extension(tail, stop=END) == renderer.extension(tail, stop=None)[1:]


def test_a_turn_that_ends_with_another_eos_token_gets_the_end_of_turn_token_of_the_template() -> None:
    other = token_id("<|endoftext|>")
    renderer = renderer_of("plain", eos_token_ids=(END, other))
    tail = [{"role": "tool", "content": "seen"}, {"role": "user", "content": "next"}]
    assert renderer.observation("seen", stop=other) == renderer.observation("seen", stop=None)
    assert renderer.extension(tail, stop=other) == renderer.extension(tail, stop=None)


def test_tails_that_depend_on_earlier_messages_are_refused() -> None:
    shown = "<|im_start|>{{ m.role }}\n{{ m.content }}{{ ' last' if m.role == 'user' and loop.index > 5 }}<|im_end|>\n"
    template = "{% for m in messages %}" + shown + "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    renderer = renderer_of(template, observation_role="tool")
    with pytest.raises(TemplateError, match="roles user is not constant"):
        renderer.check_tails()
