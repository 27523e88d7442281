"""Checks that a chat template gives a constant opening and delta, by rendering growing conversations.

The loop builds ``initial prompt + turn 1 + delta(observation 1) + turn 2 + ...``, where the turns are the model's own
tokens, which stay as they were sampled. So the template must write the same opening however many messages follow, and
the same text around every observation: for one, two and three observations, with and without tools, after turns with
and without thoughts. It may rewrite earlier turns, for example drop their ``<think>`` blocks: the loop does not use
them. A template that moves the system prompt or counts messages is refused.

The header of a tool's message may name the tool (gpt-oss) or the call's id (Kimi): the delta depends on these two.
Some templates accept a tool's message only after a turn with ``tool_calls`` (gpt-oss, MiniMax), or write it in another
way there (DeepSeek-V3.2): a turn is probed as text and with a call.

The probes never end with an assistant message, because a template may close a last assistant message in a special way
(Qwen3 inserts an empty ``<think>`` block), which the loop never requests.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
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
_NAME, _ID = "agent_rl_tool", "agent_rl_call"
_AWKWARD = "\n  <a href=\"b\">\u00e9 {{ c }} 'd'</a>\n\ttail \n"


@dataclass(frozen=True, slots=True)
class Delta:
    """The text that an observation adds: ``before + text + after``. ``before`` starts with the end of the
    assistant's turn, ``after`` ends with the generation prompt. ``writes``: the template writes the text as it is,
    strips it or quotes it as JSON. ``after_call``: it writes another text after a turn without a call."""

    before: str
    after: str
    writes: Literal["plain", "stripped", "json"] = "plain"
    after_call: bool = False

    @property
    def needs_call(self) -> bool:
        """Whether the text depends on the call before the observation."""
        return self.after_call or _NAME in self.before + self.after or _ID in self.before + self.after

    def text(self, observation: str, name: str = _NAME, call_id: str = _ID) -> str:
        """The text for an ``observation`` of the call ``call_id`` of the tool ``name``."""
        if self.writes == "stripped":
            observation = observation.strip()
        elif self.writes == "json":
            observation = json.dumps(observation, ensure_ascii=False)
        before, after = (part.replace(_NAME, name).replace(_ID, call_id) for part in (self.before, self.after))
        return before + observation + after


@dataclass(frozen=True, slots=True)
class Probed:
    """A template that passed for one role: its delta, and a rendered conversation with one observation."""

    delta: Delta
    start: list[dict[str, Any]]
    prompt: str
    conversation: str
    observation: str


def probe(template: ChatTemplate, role: Role, ends: Collection[str]) -> Probed:
    """Check ``template`` with observations of ``role``. ``ends``: the eos tokens. Raises ``TemplateError`` with the
    reason."""
    called = None
    if role == "tool":
        with suppress(TemplateError):
            called = _probe(template, role, ends)
    try:
        said = _probe(template, role, ())
    except TemplateError:
        if called is None:
            raise
        return called
    if called is None or called.delta == said.delta:
        return said
    return replace(called, delta=replace(called.delta, after_call=True))


def _probe(template: ChatTemplate, role: Role, ends: Collection[str]) -> Probed:
    """Probe with turns of text, or with turns that call a tool and end with one of ``ends``."""
    start = _start(template)
    results = [
        _grow(template, start, role, tools, thought, ends)
        for tools in (None, [_TOOL])
        for thought in _kinds_of_turn(template.render(start, tools))
    ]
    if len({result.delta for result in results}) > 1:
        raise TemplateError("the text around an observation depends on the tools or on the turn before it")
    if _opens_thinking(results[0].prompt) != _opens_thinking(results[0].delta.after):
        raise TemplateError("the prompt opens thoughts either before the first turn or after an observation, not both")
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


def reasoning_of(template: ChatTemplate, markers: Reasoning) -> Reasoning:
    """The ``markers`` of thoughts, and whether the prompt of ``template`` opens thoughts."""
    return replace(markers, prompt_opens=template.render(_start(template), None).rstrip().endswith(markers.open))


def closes_thoughts(template: ChatTemplate, markers: Reasoning) -> bool:
    """Whether the prompt of ``template`` ends after thoughts, so that a turn has none."""
    return template.render(_start(template), None).rstrip().endswith(markers.close)


def around_thoughts(template: ChatTemplate, markers: Reasoning) -> tuple[str, str]:
    """The text that ``template`` writes between the prompt and a turn's thoughts, and between these and its text. A
    template that has the closing marker but writes no thoughts gets Qwen's form; one without the marker has no thoughts
    and gets "" twice."""
    thought, said = "agent-rl: a thought", {"role": "assistant", "content": _SPOKEN}
    thinking = said | {"reasoning_content": thought, "thinking": thought}
    start = _start(template)
    with suppress(TemplateError):
        rendered = template.render([*start, thinking], None, generation_prompt=False)
        before, _, after = rendered.partition(thought)
        between, found, _ = after.partition(_SPOKEN)
        if found and markers.close in between:
            prompt = template.render(start, None)
            return before.removeprefix(prompt) if before.startswith(prompt) else f"{markers.open}\n", between
    if markers.close not in template.source:
        return "", ""
    return "" if markers.prompt_opens else f"{markers.open}\n", f"\n{markers.close}\n\n"


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
    return prompt.rstrip().endswith(THINK.open)


def _grow(
    template: ChatTemplate,
    start: list[dict[str, Any]],
    role: Role,
    tools: Tools | None,
    thought: bool,
    ends: Collection[str],
) -> Probed:
    prompt, opening = template.render(start, tools), template.render(start, tools, generation_prompt=False)
    messages = list(start)
    delta = None
    conversation = ""
    for number in range(1, _TURNS + 1):
        said, seen = f"act {number}", f"seen {number}"
        name, call_id = (_NAME, _ID) if number == 1 else (f"tool_{number}", f"call_{number}")
        thoughts = f"<think>\nthought {number}\n</think>\n\n" if thought else ""
        messages.append(_calling(thoughts, said, name, call_id) if ends else _saying(thoughts + said))
        messages.append(
            {"role": role, "content": seen} | ({"name": name, "tool_call_id": call_id} if role == "tool" else {})
        )
        rendered = template.render(messages, tools)
        if not rendered.startswith(opening):
            raise TemplateError(_why(rendered, opening))
        _, separator, tail = rendered.rpartition(said)
        if not separator:
            raise TemplateError(f"it changes the assistant's text: {said!r} is missing")
        if ends:
            tail = _from_end_of_turn(tail, ends)
        if delta is None:
            delta = _with_writing(template, messages, tools, _delta(tail, seen, role))
            conversation = rendered
        if tail != delta.text(seen, name, call_id):
            raise TemplateError(f"the text around observation {number} differs from the text around the first one")
    assert delta is not None
    return Probed(delta, start, prompt, conversation, "seen 1")


def _saying(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _calling(text: str, said: str, name: str, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"text": said}}
    return _saying(text) | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _from_end_of_turn(tail: str, ends: Collection[str]) -> str:
    found = [position for end in ends if (position := tail.find(end)) >= 0]
    if not found:
        raise TemplateError("no eos token ends a turn with a call")
    return tail[min(found) :]


def _delta(tail: str, seen: str, role: Role) -> Delta:
    before, separator, after = tail.partition(seen)
    if not separator or seen in after:
        raise TemplateError(f"it must render the text of a message of role {role} exactly once")
    return Delta(before, after)


def _with_writing(template: ChatTemplate, messages: list[dict[str, Any]], tools: Tools | None, delta: Delta) -> Delta:
    """``delta`` with how the template writes an observation's text."""
    rendered = template.render([*messages[:-1], {**messages[-1], "content": _AWKWARD}], tools)
    candidates = [delta, replace(delta, writes="stripped")]
    if delta.before.endswith('"') and delta.after.startswith('"'):
        candidates.append(Delta(delta.before[:-1], delta.after[1:], writes="json"))
    for candidate in candidates:
        if rendered.endswith(candidate.text(_AWKWARD)):
            return candidate
    raise TemplateError("it changes the text of an observation, for example by escaping it")


def _why(rendered: str, opening: str) -> str:
    first = next(index for index, (a, b) in enumerate(zip(rendered + "\0", opening, strict=False)) if a != b)
    before, now = opening[first : first + 40], rendered[first : first + 40]
    return f"it changes the text before a turn once more messages follow: {before!r} becomes {now!r}"
