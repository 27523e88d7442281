from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agent_rl.errors import TemplateError
from agent_rl.render import ChatModel, ChatRenderer

MESSAGES = [{"role": "system", "content": "Fix bugs."}, {"role": "user", "content": "f(1) is 2, should be 1."}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look <here>: é", "parameters": {}}}]
PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "</tool_response>", "\n", "\n\n", " ", "def f(x):", "é"]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=12).map("".join)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer, templates: dict[str, str]) -> ChatRenderer:
    return ChatRenderer(ChatModel(tokenizer, templates["plain"]))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_opening_is_the_template_s_text(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    expected = (
        "<|im_start|>system\nFix bugs.<|im_end|>\n<|im_start|>user\nf(1) is 2, should be 1.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert renderer.opening(MESSAGES) == ids(tokenizer, expected)


def test_opening_shows_the_tools(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    tokens = renderer.opening(MESSAGES, TOOLS)
    shown = "Tools: " + json.dumps(TOOLS, ensure_ascii=False)
    text = f"<|im_start|>system\nFix bugs.\n\n{shown}<|im_end|>\n<|im_start|>user\nf(1) is 2, should be 1.<|im_end|>\n"
    assert tokens == ids(tokenizer, text + "<|im_start|>assistant\n")


def test_observation_continues_after_the_stop_token(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    delta = "\n<|im_start|>user\n<tool_response>\nedited\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert renderer.observation("edited", stop_included=True) == ids(tokenizer, delta)
    assert renderer.observation("edited", stop_included=False) == ids(tokenizer, "<|im_end|>" + delta)
    plain = "\n<|im_start|>user\nedited<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.observation("edited", "user", stop_included=True) == ids(tokenizer, plain)


@given(
    turns=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="|"), max_size=30), min_size=1, max_size=4)
)
@settings(max_examples=60, deadline=None)
def test_a_whole_episode_is_the_template_s_rendering(
    renderer: ChatRenderer, tokenizer: Tokenizer, turns: list[str]
) -> None:
    """Opening, turns and deltas, put together, are what the tokenizer gives for the text as a whole."""
    tokens, text = renderer.opening(MESSAGES), tokenizer.decode(renderer.opening(MESSAGES), skip_special_tokens=False)
    for seen in turns:
        tokens += ids(tokenizer, "act<|im_end|>") + renderer.observation(seen, stop_included=True)
        text += f"act<|im_end|>\n<|im_start|>user\n<tool_response>\n{seen}\n</tool_response><|im_end|>\n"
        text += "<|im_start|>assistant\n"
    assert tokens == ids(tokenizer, text)


@given(seen=TEXTS)
@settings(max_examples=200, deadline=None)
def test_content_never_becomes_control_tokens(renderer: ChatRenderer, tokenizer: Tokenizer, seen: str) -> None:
    end, start = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|im_start|>")
    tokens = renderer.observation(seen, stop_included=False)
    assert (tokens.count(end), tokens.count(start), tokens.count(tokenizer.token_to_id("<|endoftext|>"))) == (2, 2, 0)
    assert renderer.decode(tokens) == f"\nuser\n<tool_response>\n{seen}\n</tool_response>\nassistant\n"
    opening = renderer.opening([{"role": "user", "content": seen}], [{"a": seen, seen: [seen]}])
    assert opening.count(end) == 2
    assert opening.count(start) == 3


def test_text_of_control_tokens_comes_through_next_to_private_use_characters(renderer: ChatRenderer) -> None:
    seen = "\ue000<|im_end|>\ue001"
    assert seen in renderer.decode(renderer.observation(seen, stop_included=True))


@pytest.mark.parametrize("pairs", [0, 100])
def test_no_text_holds_every_guard(renderer: ChatRenderer, pairs: int) -> None:
    """All 6,400 characters of the private use area, and as many pairs of them."""
    every = "".join(map(chr, range(0xE000, 0xF900)))
    first = "".join(every[0] + other for other in every[:pairs])
    seen = f"<|im_end|>{every}{first}"
    assert seen in renderer.decode(renderer.observation(seen, stop_included=True))


def test_decode_leaves_control_tokens_out(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    assert renderer.decode(ids(tokenizer, "<tool_response>é x<|im_end|>")) == "<tool_response>é x"


@pytest.mark.parametrize("name", ["plain", "keeps_thoughts_of_the_task", "opens_thought", "trims"])
def test_prefix_preserving_templates_pass(tokenizer: Tokenizer, templates: dict[str, str], name: str) -> None:
    renderer = ChatRenderer(ChatModel(tokenizer, templates[name]))
    assert renderer.observation_role == "tool"
    assert renderer.stop_token_ids == (tokenizer.token_to_id("<|im_end|>"),)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("drops_thoughts", "drops <think> blocks from earlier turns"),
        ("counts_messages", "rewrites what stands before a turn once more messages follow: '2 messages"),
        ("system_last", "rewrites what stands before a turn"),
        ("no_end_token", "no special token ends the assistant's turn"),
        ("drops_observations", "does not show the text of a message of role tool"),
    ],
)
def test_other_templates_are_refused_with_the_reason(
    tokenizer: Tokenizer, templates: dict[str, str], name: str, reason: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatRenderer(ChatModel(tokenizer, templates[name]))
    message = str(caught.value)
    assert message.startswith("the chat template is not prefix-preserving: ")
    assert reason in message
    assert "\n" not in message


def test_a_model_without_thoughts_may_use_a_template_that_drops_them(
    tokenizer: Tokenizer, templates: dict[str, str]
) -> None:
    renderer = ChatRenderer(ChatModel(tokenizer, templates["drops_thoughts"]), thinking=False)
    assert renderer.observation_role == "tool"


def test_thoughts_dropped_after_a_user_message_make_that_role_unusable(
    tokenizer: Tokenizer, templates: dict[str, str]
) -> None:
    model = ChatModel(tokenizer, templates["keeps_thoughts_of_the_task"])
    with pytest.raises(TemplateError, match="role user; use tool"):
        ChatRenderer(model).observation("seen", "user", stop_included=True)
    assert ChatRenderer(model, thinking=False).observation("seen", "user", stop_included=True)


@pytest.mark.parametrize("name", ["no_tool_role", "escapes_tool_text"])
def test_observations_go_under_user_where_tool_does_not_work(
    tokenizer: Tokenizer, templates: dict[str, str], name: str
) -> None:
    renderer = ChatRenderer(ChatModel(tokenizer, templates[name]))
    assert renderer.observation_role == "user"
    assert "user\nseen" in renderer.decode(renderer.observation("seen", stop_included=True))


def test_a_trimming_template_s_delta_is_trimmed(tokenizer: Tokenizer, templates: dict[str, str]) -> None:
    renderer = ChatRenderer(ChatModel(tokenizer, templates["trims"]))
    spaced = renderer.observation("\n seen \n", stop_included=True)
    assert spaced == renderer.observation("seen", stop_included=True)


def write_dir(directory: Path, tokenizer: Tokenizer, template: str, bos: object = "<|endoftext|>") -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<|im_end|>", "bos_token": bos})
    )


def test_reads_a_hugging_face_directory(tmp_path: Path, tokenizer: Tokenizer, templates: dict[str, str]) -> None:
    write_dir(tmp_path, tokenizer, "{{ bos_token }}" + templates["plain"], {"content": "<|endoftext|>"})
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    renderer = ChatRenderer(tmp_path)
    assert renderer.stop_token_ids == (2, 0)
    assert renderer.opening(MESSAGES)[:2] == [0, 1]
    (tmp_path / "chat_template.jinja").write_text(templates["plain"])
    assert ChatRenderer(tmp_path).opening(MESSAGES)[0] == 1, "chat_template.jinja goes before tokenizer_config.json"


@pytest.mark.slow
def test_same_tokens_as_transformers(tmp_path: Path, tokenizer: Tokenizer, templates: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("plain", "keeps_thoughts_of_the_task", "trims"):
        write_dir(tmp_path, tokenizer, templates[name])
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        renderer = ChatRenderer(tmp_path)
        grown = renderer.opening(MESSAGES, TOOLS)
        assert grown == reference.apply_chat_template(MESSAGES, TOOLS, add_generation_prompt=True)
        messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nact"}]
        messages.append({"role": "tool", "content": "def f(x):\n\n    return 'é'"})
        grown += ids(tokenizer, messages[-2]["content"]) + renderer.observation(
            messages[-1]["content"], stop_included=False
        )
        assert grown == reference.apply_chat_template(messages, TOOLS, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "tokenizer.json: not there"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json: not valid JSON"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{}"}, "no chat template"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "no valid Jinja: line 1"),
        ({"tokenizer.json": None, "chat_template.jinja": "{{ messages.x.y }}"}, "fails on messages of roles"),
    ],
)
def test_a_broken_directory_is_told_in_one_line(
    tmp_path: Path, tokenizer: Tokenizer, files: dict[str, str | None], reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(tokenizer.to_str() if text is None else text)
    with pytest.raises(TemplateError) as caught:
        ChatRenderer(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_eos_token_that_content_could_spell_is_refused(tokenizer: Tokenizer, templates: dict[str, str]) -> None:
    close = tokenizer.token_to_id("</tool_response>")
    with pytest.raises(TemplateError, match="not marked special"):
        ChatRenderer(ChatModel(tokenizer, templates["plain"], eos_token_ids=(close,)))


def test_template_options_reach_the_template(tokenizer: Tokenizer, templates: dict[str, str]) -> None:
    source = templates["plain"] + "{% if add_generation_prompt and mood %}[{{ mood }}]{% endif %}"
    with pytest.raises(TemplateError, match="rewrites"):
        ChatRenderer(ChatModel(tokenizer, source), options={"mood": "calm"})
    assert ChatRenderer(ChatModel(tokenizer, source)).opening(MESSAGES)


TAILS = [["tool"], ["tool", "tool"], ["user"], ["tool", "user"], ["user", "user"]]


@pytest.mark.parametrize("roles", TAILS)
@pytest.mark.parametrize("name", ["plain", "trims", "keeps_thoughts_of_the_task"])
def test_an_extension_is_what_the_template_writes_after_a_turn(
    tokenizer: Tokenizer, templates: dict[str, str], name: str, roles: list[str]
) -> None:
    renderer = ChatRenderer(ChatModel(tokenizer, templates[name]), thinking=False)
    renderer.check_tails()
    start = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    tail = [{"role": role, "content": f"<|im_end|> seen {at}"} for at, role in enumerate(roles)]
    opening = renderer.opening(start)
    said = tokenizer.encode("done", add_special_tokens=False).ids
    whole = renderer.opening([*start, {"role": "assistant", "content": "done"}, *tail])
    assert [*opening, *said, *renderer.extension(tail, stop_included=False)] == whole
    assert renderer.extension(tail, stop_included=True) == renderer.extension(tail, stop_included=False)[1:]


def test_tails_that_change_with_what_stands_before_are_refused(tokenizer: Tokenizer) -> None:
    shown = "<|im_start|>{{ m.role }}\n{{ m.content }}{{ ' last' if m.role == 'user' and loop.index > 5 }}<|im_end|>\n"
    template = "{% for m in messages %}" + shown + "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    renderer = ChatRenderer(ChatModel(tokenizer, template), thinking=False, observation_role="tool")
    with pytest.raises(TemplateError, match="messages of user follow is not constant"):
        renderer.check_tails()
