"""Each format and SGLang's own parser of the family find the same calls in a turn, or differ for a listed reason."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.call_formats import MARKERS

from tools import ToolCall, parse_turn, tool_format
from tools.formats.harmony import HARMONY
from tools.split_reasoning import THINK

ENGINE_PYTHON = Path(__file__).parents[2] / ".venv-engine/bin/python"
PARSERS = {
    "hermes": "hermes",
    "qwen3-coder": "qwen3_coder",
    "glm": "glm47",
    "minimax": "minimax-m2",
    "kimi": "kimi_k2",
    "deepseek-v3": "deepseekv3",
    "deepseek-v3.1": "deepseekv31",
    "deepseek-dsml": "deepseekv32",
    "harmony": "gpt-oss",
}
"""The name of SGLang's parser for each format."""
TYPES = {"a": "string", "n": "integer", "o": "object", "l": "array", "b": "boolean"}
PROPERTIES = {name: {"type": kind} for name, kind in TYPES.items()}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": p}},
    }
    for name, p in (("f", PROPERTIES), ("now", {}))
]
TEXTS = (
    "x",
    "",
    " x y ",
    "a\nb",
    "\nx",
    "x\n",
    "\n\nx",
    "é 中",
    "12",
    "null",
    'say "hi"',
    "a\\nb",
    "<b>&amp;</b>",
    "{}",
    "True",
)
OTHERS: dict[str, tuple[Any, ...]] = {
    "n": (0, -3, 2**40),
    "o": ({}, {"k": [1, None, "v"]}, {"é": {"x": True}}),
    "l": ([], [1, 2], ["a\n", {}]),
    "b": (True, False),
}
Calls = list[list[Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of ``name``'s family. ``kind`` says how it was made, ``meant`` what was written before it was damaged."""

    name: str
    kind: str
    text: str
    meant: Sequence[ToolCall]


def written_turns(name: str) -> Iterator[Turn]:
    """Every shape of a turn with every value."""
    fmt = tool_format(name)
    values = [{"a": text} for text in TEXTS] + [{key: value} for key, some in OTHERS.items() for value in some]
    for arguments in [{}, {"a": "x", "n": 1, "o": {"k": 1}}, *values]:
        meant = ToolCall("f", arguments)
        call = fmt.render(meant)
        joined = call + ("<|start|>assistant" if name == "harmony" else "\n") + call
        for kind, text in {
            "one call": call,
            "two calls": joined,
            "unknown tool": fmt.render(ToolCall("fly", arguments)),
            "without its end": call[: -len(call) // 5],
            "without its last character": call[:-1],
            "without its beginning": call[4:],
            "spaces around": f"  {call}\n\n",
            "line ends dropped": call.replace(">\n<", "><"),
            "Python's words": call.replace("true", "True") if name in ("qwen3-coder", "glm", "minimax") else call,
        }.items():
            yield Turn(name, kind, text, [meant])


def generated_turns(name: str, count: int) -> Iterator[Turn]:
    pick, fmt = random.Random(name), tool_format(name)
    for _ in range(count):
        calls = []
        for _ in range(pick.choice((1, 1, 2, 3))):
            keys = pick.sample(sorted(PROPERTIES), k=pick.randint(0, 4))
            arguments = {key: pick.choice((*TEXTS, *MARKERS) if key == "a" else OTHERS[key]) for key in keys}
            calls.append(pick.choice((ToolCall("f", arguments), ToolCall("f", arguments), ToolCall("now", {}))))
        text = ("<|start|>assistant" if name == "harmony" else pick.choice(("\n", "", "\nthen "))).join(
            map(fmt.render, calls)
        )
        if pick.random() < 0.5:
            yield Turn(name, "sound", text, calls)
        else:
            at = pick.randrange(len(text))
            damaged = text[:at] + pick.choice(("", *MARKERS)) + text[at + pick.choice((0, 1, 10)) :]
            yield Turn(name, "damaged", damaged, calls)


def sglang_calls(turns: Sequence[Turn]) -> list[Calls | None]:
    """None where SGLang raises or returns arguments that are no JSON."""
    opened = {"harmony": "<|start|>assistant"}
    lines = [json.dumps([PARSERS[turn.name], opened.get(turn.name, "") + turn.text, TOOLS]) for turn in turns]
    program = Path(__file__).with_name("sglang_parsers.py")
    done = subprocess.run(
        [ENGINE_PYTHON, program], input="\n".join(lines), capture_output=True, text=True, timeout=1800, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "null"))]
    return [each and offered(each) for each in found]


def own_calls(turn: Turn) -> Calls:
    parsed = parse_turn(tool_format(turn.name), turn.text, TOOLS, HARMONY if turn.name == "harmony" else THINK)
    return offered([[call.name, dict(call.arguments)] for call in parsed.calls])


def offered(calls: Calls) -> Calls:
    """The calls of offered tools. Some of SGLang's parsers leave out others."""
    return [call for call in calls if call[0] in ("f", "now")]


def with_texts(calls: Calls, change: Callable[[str], Any]) -> Calls:
    """``calls`` with ``change`` applied to the arguments that are text, and without spaces around names."""
    return [
        [name, {key.strip(): change(value) if isinstance(value, str) else value for key, value in arguments.items()}]
        for name, arguments in calls
    ]


def is_part(calls: Calls, whole: Calls) -> bool:
    """Whether ``calls`` are some of ``whole``, in order."""
    rest = iter(whole)
    return all(call in rest for call in calls)


def are_meant(calls: Calls, turn: Turn) -> bool:
    """Whether each call has the name and the arguments' names of one that was written."""
    meant = [(call.name, set(call.arguments)) for call in turn.meant]
    return all((name, set(arguments)) in meant for name, arguments in calls)


def holds_marker(calls: Calls) -> bool:
    texts = [text for _, arguments in calls for pair in arguments.items() for text in pair if isinstance(text, str)]
    return any(marker in text for marker in MARKERS for text in texts)


VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "minimax": (
        "SGLang takes all newlines off a value and reads the text null as null",
        lambda text: None if text.lower() == "null" else text.strip("\n"),
    ),
    "deepseek-dsml": ("SGLang strips text, DeepSeek's own parser does not", str.strip),
    "qwen3-coder": ("SGLang reads the text null as null", lambda text: None if text.lower() == "null" else text),
}
INTACT = ("one call", "Python's words", "two calls", "unknown tool", "spaces around", "line ends dropped", "sound")


WHOLE_JSON = ("hermes", "kimi", "deepseek-v3", "deepseek-v3.1")
INNER_TAGS = {
    "qwen3-coder": "<parameter=",
    "glm": "<arg_",
    "minimax": "<parameter name=",
    "deepseek-dsml": "<｜DSML｜p",
}


def judge(turn: Turn, own: Calls, other: Calls | None) -> str | None:
    """Why the calls differ, or None for a difference that nobody has judged."""
    reason, change = VALUES.get(turn.name, ("SGLang keeps spaces around a name", lambda text: text))
    if other is not None and with_texts(own, change) == with_texts(other, change):
        return reason
    if turn.name == "harmony" and turn.kind == "spaces around":
        return "SGLang accepts no space before the channel"
    if turn.kind in INTACT:
        return "a marker inside a value misleads SGLang" if holds_marker(own) and are_meant(own, turn) else None
    if other is None:
        return "SGLang returns arguments that are no JSON"
    own, other = with_texts(own, change), with_texts(other, change)
    if is_part(own, other):
        return "SGLang runs a malformed call, or one after it"
    if turn.name in INNER_TAGS and INNER_TAGS[turn.name] in str(own):
        return "a value without its end: here it reaches to the next end, SGLang ends it earlier or drops the call"
    if are_meant(own, turn) or (turn.name in WHOLE_JSON and is_part(other, own)):
        return "SGLang drops a call: an end is missing, or another call is malformed"
    if all(holds_marker([call]) for call in own if call not in other):
        return "a marker inside a value misleads SGLang"
    return None


@pytest.mark.exhaustive
@pytest.mark.sglang
@pytest.mark.timeout(3600)
def test_sglangs_parsers_find_the_same_calls_but_for_judged_differences() -> None:
    turns = [turn for name in PARSERS for turn in (*written_turns(name), *generated_turns(name, 2000))]
    judged: Counter[tuple[str, str]] = Counter()
    unlisted = []
    for turn, other in zip(turns, sglang_calls(turns), strict=True):
        own = own_calls(turn)
        reason = "equal" if own == other else judge(turn, own, other)
        judged[turn.name, reason or "unlisted"] += 1
        if reason is None:
            unlisted.append((turn, own, other))
    for (name, reason), count in sorted(judged.items()):
        print(f"{name}: {count} {reason}")
    assert not unlisted
