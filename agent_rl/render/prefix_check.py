"""Whether a chat template is prefix-preserving, found by rendering growing conversations.

What the loop builds is ``opening + turn 1 + delta(observation 1) + turn 2 + ...``, where the turns are the model's own
tokens. What the template gives for the same conversation must be that same text, for one, two and three observations,
without tools and with them. A template that drops ``<think>`` from earlier turns, moves the system prompt, or writes
otherwise when more messages follow shows the model at every turn another past than the one it acted on; it is refused.

The probes never end in an assistant message: a template may close a last assistant message in a way of its own (Qwen3
puts an empty ``<think>`` block there), which the loop never asks it to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_rl.errors import TemplateError
from agent_rl.render.template import ChatTemplate, Messages, Tools

Role = Literal["tool", "user"]

TAILS: tuple[tuple[Role, ...], ...] = (("tool",), ("tool", "tool"), ("user",), ("tool", "user"))
"""Roles of what agent programs send after a turn."""

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
# Quotes, markup and non-ASCII tell a template that escapes its content, the outer blanks one that trims it.
_AWKWARD = "\n  <a href=\"b\">\u00e9 {{ c }} 'd'</a>\n\ttail \n"


@dataclass(frozen=True, slots=True)
class Delta:
    """What an observation adds: ``before + text + after``. ``before`` starts with the end of the assistant's turn,
    ``after`` ends with the generation prompt; ``trims`` says that the template strips the text first."""

    before: str
    after: str
    trims: bool

    def text(self, observation: str) -> str:
        return self.before + (observation.strip() if self.trims else observation) + self.after


@dataclass(frozen=True, slots=True)
class Probed:
    """A template that passed, for one role: its delta, and a conversation with one observation as it rendered it."""

    delta: Delta
    start: list[dict[str, Any]]
    opening: str
    conversation: str
    observation: str


def probe(template: ChatTemplate, role: Role, *, thinking: bool) -> Probed:
    """Check ``template`` with observations under ``role``.

    ``thinking`` also demands that ``<think>`` blocks in earlier turns are kept. Raises ``TemplateError``, the reason.
    """
    start = _start(template)
    results = [
        _grow(template, start, role, tools, thought)
        for tools in (None, [_TOOL])
        for thought in _kinds_of_turn(template.render(start, tools), thinking)
    ]
    if len({result.delta for result in results}) > 1:
        raise TemplateError("the text around an observation depends on the tools or on the turn before it")
    return results[0]


def after_turn(template: ChatTemplate, messages: Messages) -> str:
    """What ``template`` writes after a turn where ``messages`` follow it. Raises ``TemplateError``."""
    turn = {"role": "assistant", "content": _SPOKEN}
    _, found, after = template.render([*_start(template), turn, *messages], None).partition(_SPOKEN)
    if not found:
        raise TemplateError("the chat template does not show an assistant's text before these messages")
    return after


def check_tail(template: ChatTemplate, roles: Sequence[Role]) -> None:
    """Raises ``TemplateError`` where a conversation with tools, and turns before, goes on otherwise after a turn than
    :func:`after_turn` says."""
    tail = [{"role": role, "content": f"seen {number}"} for number, role in enumerate(roles)]
    after = after_turn(template, tail)
    earlier = [{"role": "assistant", "content": "act 1"}, {"role": roles[0], "content": "seen"}]
    for tools in (None, [_TOOL]):
        for before in ([], earlier):
            start = [*_start(template), *before]
            built = template.render(start, tools) + "act 2"
            whole = template.render([*start, {"role": "assistant", "content": "act 2"}, *tail], tools)
            if not _opens_thinking(template.render(start, tools)) and whole != built + after:
                raise TemplateError(f"the text after a turn that messages of {', '.join(roles)} follow is not constant")


def _start(template: ChatTemplate) -> list[dict[str, Any]]:
    """Opening messages that the template takes: with a system message unless it refuses one."""
    system = {"role": "system", "content": "Probe rules."}
    user = {"role": "user", "content": "Probe task."}
    try:
        template.render([system, user], None)
    except TemplateError:
        return [user]
    return [system, user]


def _kinds_of_turn(opening: str, thinking: bool) -> list[bool]:
    """Whether to probe with plain turns (False), with turns that think (True), or both."""
    if _opens_thinking(opening):
        return [True]
    return [False, True] if thinking else [False]


def _opens_thinking(opening: str) -> bool:
    """Whether the generation prompt itself opens ``<think>``, so that a sampled turn starts inside it."""
    return opening.rstrip().endswith("<think>")


def _grow(
    template: ChatTemplate, start: list[dict[str, Any]], role: Role, tools: Tools | None, thought: bool
) -> Probed:
    opening = built = template.render(start, tools)
    messages = list(start)
    delta = None
    conversation = ""
    for number in range(1, _TURNS + 1):
        turn = f"<think>\nthought {number}\n</think>\n\nact {number}" if thought else f"act {number}"
        seen = f"seen {number}"
        messages += [{"role": "assistant", "content": turn}, {"role": role, "content": seen}]
        rendered = template.render(messages, tools)
        sampled = turn.removeprefix("<think>").lstrip("\n") if _opens_thinking(opening) else turn
        if not rendered.startswith(built + sampled):
            raise TemplateError(_why(rendered, built, turn, thought))
        if delta is None:
            delta = _delta(rendered.removeprefix(built + sampled), seen, role)
            delta = _with_trimming(template, messages, tools, delta)
            conversation = rendered
        built += sampled + delta.text(seen)
        if rendered != built:
            raise TemplateError(f"the text around observation {number} is not that around the first one")
    assert delta is not None
    return Probed(delta, start, opening, conversation, "seen 1")


def _delta(tail: str, seen: str, role: Role) -> Delta:
    before, found, after = tail.partition(seen)
    if not found or seen in after:
        raise TemplateError(f"it does not show the text of a message of role {role} once")
    return Delta(before, after, trims=False)


def _with_trimming(template: ChatTemplate, messages: list[dict[str, Any]], tools: Tools | None, delta: Delta) -> Delta:
    """Find out what the template does to an observation's text: nothing, or strip it."""
    rendered = template.render([*messages[:-1], {**messages[-1], "content": _AWKWARD}], tools)
    for candidate in (delta, Delta(delta.before, delta.after, trims=True)):
        if rendered.endswith(candidate.text(_AWKWARD)):
            return candidate
    raise TemplateError("it rewrites the text of an observation (escapes it, say)")


def _why(rendered: str, built: str, turn: str, thought: bool) -> str:
    if not rendered.startswith(built):
        at = next(index for index, (a, b) in enumerate(zip(rendered + "\0", built, strict=False)) if a != b)
        was, now = built[at : at + 40], rendered[at : at + 40]
        dropped = " (it drops <think> blocks from earlier turns)" if was.startswith("<think>") else ""
        return f"it rewrites what stands before a turn once more messages follow: {was!r} becomes {now!r}{dropped}"
    if thought and turn.partition("</think>")[0] not in rendered:
        return "it drops <think> blocks from earlier turns"
    return f"it rewrites the assistant's own text: {turn!r} becomes {rendered[len(built) :][:60]!r}"
