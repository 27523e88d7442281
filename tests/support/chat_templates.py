"""A tokenizer trained on the spot, and chat templates of the kinds that models come with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agent_rl.render import ChatModel, ChatRenderer

WORDS = r"""(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = """
{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- for message in messages %}
{%- if loop.first and tools %}
{{- turn('system', (message.content + '\\n\\n' if message.role == 'system' else '') + 'Tools: ' + (tools | tojson)) }}
{%- endif %}
{%- if message.role == 'tool' %}
{{- turn('user', '<tool_response>\\n' + message.content + '\\n</tool_response>') }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- turn(message.role, CONTENT) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
PROMPT{% endif %}"""

PLAIN = CHATML.replace("CONTENT", "message.content").replace("PROMPT", "")

VISIBLE = "message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' {} else message.content"
LAST_QUERY = """
{%- set ns = namespace(last_query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
"""
EMPTY_THOUGHT = (
    "('<think>\\n\\n</think>\\n\\n' + message.content) if loop.last and '<think>' not in message.content else "
)

TEMPLATES = {
    "plain": PLAIN,
    # as Qwen3: thoughts are kept after the last real user message, and a last assistant message gets an empty one
    "keeps_thoughts_of_the_task": LAST_QUERY
    + CHATML.replace("PROMPT", "").replace(
        "CONTENT",
        f"(({EMPTY_THOUGHT} message.content) if message.role == 'assistant' and loop.index0 > ns.last_query else "
        + VISIBLE.format("")
        + ")",
    ),
    "drops_thoughts": CHATML.replace("CONTENT", VISIBLE.format("")).replace("PROMPT", ""),
    "opens_thought": CHATML.replace("CONTENT", "message.content").replace("PROMPT", "<think>\n"),
    "counts_messages": "{{ messages | length }} messages\n" + PLAIN,
    "system_last": "{% for m in messages[1:] + messages[:1] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}",
    "no_tool_role": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% endfor %}" + PLAIN,
    "escapes_tool_text": PLAIN.replace("message.content + '\\n</tool", "(message.content | upper) + '\\n</tool"),
    "trims": PLAIN.replace("message.content", "(message.content | trim)"),
    "no_end_token": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    "drops_observations": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role != 'tool' and not (m.role == 'user' and loop.index > 2) %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}",
}


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE with Qwen's kind of pre-tokenizer, trained on the sources of the tests."""
    made, by_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), by_bytes])
    made.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, **options)
    sources = Path(__file__), Path(__file__).parents[1] / "render" / "test_chat_renderer.py"
    texts = [path.read_text() for path in sources]
    made.train_from_iterator([*texts, "user\nassistant\n\n\n</tool_response>" * 20], trainer)
    added = [AddedToken(text, special=False, normalized=False) for text in ("<tool_response>", "</tool_response>")]
    made.add_tokens(added)
    return made


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def token_id(token: str) -> int:
    return tokenizer().token_to_id(token)


def renderer_of(template: str, *, eos_token_ids: tuple[int, ...] = (), **options: Any) -> ChatRenderer:
    """A renderer with one of ``TEMPLATES``, or with the source of another one."""
    model = ChatModel(tokenizer(), TEMPLATES.get(template, template), eos_token_ids=eos_token_ids)
    return ChatRenderer(model, **options)
