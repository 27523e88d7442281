"""Checks that a chat template gives a constant opening and delta, by rendering growing conversations.

The loop builds ``initial prompt + turn 1 + delta(observation 1) + turn 2 + ...``, where the turns are the model's own
tokens, which stay as they were sampled. So the template must write the same opening however many messages follow, and
the same text around every observation: for one, two and three observations, with and without tools, after turns with
and without thoughts. It may rewrite earlier turns, for example drop their ``<think>`` blocks: the loop does not use
them. A template that moves the system prompt or counts messages is refused.

The probes never end with an assistant message, because a template may close a last assistant message in a special way
(Qwen3 inserts an empty ``<think>`` block), which the loop never requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agent_rl.errors import TemplateError
from agent_rl.render.template import ChatTemplate, Messages, Tools
from tools import THINK, Reasoning

Role = Literal["tool", "user"]

TAILS: tuple[tuple[Role, ...], ...] = (("tool",), ("tool", "tool"), ("user",), ("tool", "user"))
"""Roles of the messages that agent programs send after a turn."""

_TURNS = 3
_SPOKEN = "agent-rl: a turn"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
# Quotes, markup and non-ASCII detect a template that escapes content; outer blanks detect one that trims it.
_AWKWARD = "\n  <a href=\"b\">\u00e9 {{ c }} 'd'</a>\n\ttail \n"


@dataclass(frozen=True, slots=True)
class Delta:
    """The text that an observation adds: ``before + text + after``. ``before`` starts with the end of the
    assistant's turn, ``after`` ends with the generation prompt. ``trims``: the template strips the text first."""

    before: str
    after: str
    trims: bool

    def text(self, observation: str) -> str:
        return self.before + (observation.strip() if self.trims else observation) + self.after


@dataclass(frozen=True, slots=True)
class Probed:
    """A template that passed for one role: its delta, and a rendered conversation with one observation."""

    delta: Delta
    start: list[dict[str, Any]]
    prompt: str
    conversation: str
    observation: str


def probe(template: ChatTemplate, role: Role) -> Probed:
    """Check ``template`` with observations of ``role``. Raises ``TemplateError`` with the reason."""
    start = _start(template)
    results = [
        _grow(template, start, role, tools, thought)
        for tools in (None, [_TOOL])
        for thought in _kinds_of_turn(template.render(start, tools))
    ]
    if len({result.delta for result in results}) > 1:
        raise TemplateError("the text around an observation depends on the tools or on the turn before it")
    return results[0]


def after_turn(template: ChatTemplate, messages: Messages) -> str:
    """The text that ``template`` writes after a turn if ``messages`` follow. Raises ``TemplateError``."""
    turn = {"role": "assistant", "content": _SPOKEN}
    _, separator, after = template.render([*_start(template), turn, *messages], None).partition(_SPOKEN)
    if not separator:
        raise TemplateError("the chat template drops the assistant's text before these messages")
    return after


def check_tail(template: ChatTemplate, roles: Sequence[Role]) -> None:
    """Raises ``TemplateError`` if the text after a turn depends on the tools or on earlier turns."""
    tail = [{"role": role, "content": f"seen {number}"} for number, role in enumerate(roles)]
    after = after_turn(template, tail)
    earlier = [{"role": "assistant", "content": "act 1"}, {"role": roles[0], "content": "seen"}]
    for tools in (None, [_TOOL]):
        for before in ([], earlier):
            start = [*_start(template), *before]
            rendered = template.render([*start, {"role": "assistant", "content": "act 2"}, *tail], tools)
            if rendered.rpartition("act 2")[2] != after:
                raise TemplateError(f"the text between a turn and messages of roles {', '.join(roles)} is not constant")


def reasoning_of(template: ChatTemplate) -> Reasoning:
    """The markers of thoughts under ``template``."""
    return replace(THINK, prompt_opens=_opens_thinking(template.render(_start(template), None)))


def _start(template: ChatTemplate) -> list[dict[str, Any]]:
    """Initial messages that the template accepts: with a system message unless it refuses one."""
    system = {"role": "system", "content": "Probe rules."}
    user = {"role": "user", "content": "Probe task."}
    try:
        template.render([system, user], None)
    except TemplateError:
        return [user]
    return [system, user]


def _kinds_of_turn(prompt: str) -> list[bool]:
    """Which turns to probe with: with thoughts (True), and without (False) unless the prompt opens them."""
    return [True] if _opens_thinking(prompt) else [False, True]


def _opens_thinking(prompt: str) -> bool:
    """Whether the generation prompt opens ``<think>``, so that a sampled turn starts inside it."""
    return prompt.rstrip().endswith("<think>")


def _grow(
    template: ChatTemplate, start: list[dict[str, Any]], role: Role, tools: Tools | None, thought: bool
) -> Probed:
    prompt, opening = template.render(start, tools), template.render(start, tools, generation_prompt=False)
    messages = list(start)
    delta = None
    conversation = ""
    for number in range(1, _TURNS + 1):
        said, seen = f"act {number}", f"seen {number}"
        turn = f"<think>\nthought {number}\n</think>\n\n{said}" if thought else said
        messages += [{"role": "assistant", "content": turn}, {"role": role, "content": seen}]
        rendered = template.render(messages, tools)
        if not rendered.startswith(opening):
            raise TemplateError(_why(rendered, opening))
        _, separator, tail = rendered.rpartition(said)
        if not separator:
            raise TemplateError(f"it changes the assistant's text: {said!r} is missing")
        if delta is None:
            delta = _with_trimming(template, messages, tools, _delta(tail, seen, role))
            conversation = rendered
        if tail != delta.text(seen):
            raise TemplateError(f"the text around observation {number} differs from the text around the first one")
    assert delta is not None
    return Probed(delta, start, prompt, conversation, "seen 1")


def _delta(tail: str, seen: str, role: Role) -> Delta:
    before, separator, after = tail.partition(seen)
    if not separator or seen in after:
        raise TemplateError(f"it must render the text of a message of role {role} exactly once")
    return Delta(before, after, trims=False)


def _with_trimming(template: ChatTemplate, messages: list[dict[str, Any]], tools: Tools | None, delta: Delta) -> Delta:
    """``delta`` with ``trims`` set if the template strips an observation's text."""
    rendered = template.render([*messages[:-1], {**messages[-1], "content": _AWKWARD}], tools)
    for candidate in (delta, Delta(delta.before, delta.after, trims=True)):
        if rendered.endswith(candidate.text(_AWKWARD)):
            return candidate
    raise TemplateError("it changes the text of an observation, for example by escaping it")


def _why(rendered: str, opening: str) -> str:
    first = next(index for index, (a, b) in enumerate(zip(rendered + "\0", opening, strict=False)) if a != b)
    before, now = opening[first : first + 40], rendered[first : first + 40]
    return f"it changes the text before a turn once more messages follow: {before!r} becomes {now!r}"
