"""Thinking on or off, and a template's own variables: what ``rollout.thinking`` and ``rollout.template_options`` set.

The published templates read one of two switches: ``enable_thinking`` (Qwen, GLM, Nemotron) or ``thinking`` (DeepSeek,
Kimi). A template that reads neither cannot be switched; gpt-oss has ``reasoning_effort``, which is an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agent_rl.errors import TemplateError
from agent_rl.render.template import variables_of
from tools import Reasoning

Thinking = Literal["default", "on", "off"]
SWITCHES = ("enable_thinking", "thinking")
_OURS = ("messages", "tools", "documents", "add_generation_prompt")


def template_variables(source: str, thinking: Thinking, options: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the template ``source``. Raises ``TemplateError`` for one that the template does not read."""
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
