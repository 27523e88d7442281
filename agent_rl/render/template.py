"""A model directory's chat template, read and rendered as in transformers, using only jinja2 and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from agent_rl.errors import TemplateError
from agent_rl.models.files import TEMPLATE_BYTES, TOKENIZER_BYTES, read_object, read_text
from tools import Reasoning

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Thinking = Literal["default", "on", "off"]
SWITCHES = ("enable_thinking", "thinking")
_OURS = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The parts of a model that rendering needs: its tokenizer, its template's source, its named special tokens
    (``bos_token``, ...), the token ids that end generation, and the ``model_type`` of its config."""

    tokenizer: Tokenizer
    template: str
    special: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = ""

    @classmethod
    def from_dir(cls, directory: Path) -> ChatModel:
        """Read a Hugging Face directory. Raises ``TemplateError`` that names the missing or damaged file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TemplateError(f"{path}: file not found; a fast tokenizer is required")
        try:
            tokenizer = Tokenizer.from_str(read_text(path, TOKENIZER_BYTES))
        except Exception as error:  # tokenizers raises bare Exception
            raise TemplateError(f"{path}: not a tokenizer: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        special = {key: _token_text(value) for key, value in config.items() if key.endswith("_token") and value}
        model_type = str(_read_json(directory / "config.json").get("model_type", ""))
        return cls(tokenizer, _template_source(directory, config), special, _eos_token_ids(directory), model_type)


def variables_of(source: str) -> set[str]:
    """The names that the template ``source`` reads, found without compiling it. Raises ``TemplateError``."""
    try:
        tree = _environment().parse(source)
        return {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None


class ChatTemplate:
    """A compiled template. ``options`` are its own variables, for example ``enable_thinking``."""

    def __init__(self, source: str, special: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self.source, self._variables = source, {**special, **options}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None

    def render(self, messages: Messages, tools: Tools | None, *, generation_prompt: bool = True) -> str:
        """The conversation as text. Raises ``TemplateError`` if the template fails."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template can raise what any expression in it raises
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(f"the chat template fails on messages of roles {roles}: {error}") from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training masks; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _template_source(directory: Path, config: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return read_text(file, TEMPLATE_BYTES)
        except ValueError as error:
            raise TemplateError(f"{file}: {error}") from None
    source = config.get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = entries[-1].get("template") if entries else None
    if not isinstance(source, str):
        raise TemplateError(f"{directory}: no chat template in chat_template.jinja or tokenizer_config.json")
    if len(source) > TEMPLATE_BYTES:
        raise TemplateError(f"{directory}: its chat template has more than {TEMPLATE_BYTES} characters")
    return source


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end generation: from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(directory / name).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(id) is int for id in listed):
                raise TemplateError(f"{directory / name}: eos_token_id is {str(ids)[:80]}; expected integers")
            return tuple(listed)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise TemplateError(f"{path}: not valid JSON: {error}") from None


def _token_text(value: Any) -> str:
    return str(value.get("content")) if isinstance(value, dict) else str(value)


def _to_json(value: Any, **options: Any) -> str:
    """transformers' filter; Jinja's own escapes HTML and non-ASCII characters."""
    dumps: Callable[..., str] = json.dumps
    return dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def template_variables(source: str, thinking: Thinking, options: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the template ``source``, from ``rollout.thinking`` and ``rollout.template_options``.

    The published templates read one of two switches: ``enable_thinking`` (Qwen, GLM, Nemotron) or ``thinking``
    (DeepSeek, Kimi). A template that reads neither cannot be switched; gpt-oss has ``reasoning_effort``, which is an
    option. Raises ``TemplateError`` for a variable that the template does not read.
    """
    read = variables_of(source)
    for name in options:
        if name in _OURS or name not in read:
            raise TemplateError(f"rollout.template_options: the chat template has no option {name!r}")
    if thinking == "default":
        return dict(options)
    switches = [name for name in SWITCHES if name in read]
    if not switches:
        raise TemplateError(
            f"rollout.thinking is {thinking}, but the chat template reads neither {' nor '.join(SWITCHES)}: "
            "set rollout.thinking to default"
        )
    return dict.fromkeys(switches, thinking == "on") | dict(options)


def check_thinking(thinking: Thinking, reasoning: Reasoning) -> None:
    """Raises ``TemplateError`` if thinking is off and the prompt still opens thoughts."""
    if thinking == "off" and reasoning.prompt_opens:
        raise TemplateError("rollout.thinking is off, but the chat template still opens thoughts in its prompt")
