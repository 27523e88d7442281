"""Generated texts of each family's markers: none raises, every failure is one line, and the time is linear.

The ordinary suite reads 2,000 texts a format, ``pytest -m exhaustive`` 100,000 and measures the times.
"""

from __future__ import annotations

import random
import time

import pytest
from support.call_formats import JSON_FORMATS, MARKERS, TAG_FORMATS

from tools import ParseFailure, ToolCall, ToolCallFormat, parse_turn, tool_format
from tools.formats.harmony import HARMONY
from tools.split_reasoning import THINK

LONG = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]
SCHEMA = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
PIECES = (
    *MARKERS,
    "f",
    "a",
    "x",
    "1",
    "{}",
    "]",
    ":",
    ",",
    "\\",
    "\n",
    " ",
    "é",
    "\ud800",
    "NaN",
    "9" * 30,
    "</think>",
)
VALUES = ("", "x", "\n", " x\n", "é", 1, None, [1, {"b": "x"}], {"c": []}, *MARKERS)


def generated_text(pick: random.Random, fmt: ToolCallFormat) -> str:
    """Pieces, or calls with one piece put somewhere."""
    if pick.random() < 0.3:
        return "".join(pick.choices(PIECES, k=pick.randint(0, 30)))
    calls = [
        fmt.render(ToolCall(pick.choice("fg"), {name: pick.choice(VALUES) for name in pick.sample("abc", k=2)}))
        for _ in range(pick.randint(1, 3))
    ]
    text = pick.choice(("", "\n", "so ")).join(calls)
    at = pick.randint(0, len(text))
    return text[:at] + pick.choice(PIECES) + text[at + pick.choice((0, 0, 1, 20)) :]


@pytest.mark.parametrize("name", [*JSON_FORMATS, *TAG_FORMATS])
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=LONG)])
def test_no_generated_text_raises(name: str, count: int) -> None:
    pick, fmt, called = random.Random(name), tool_format(name), 0
    for _ in range(count):
        text = generated_text(pick, fmt)
        turn = parse_turn(fmt, text, SCHEMA, HARMONY if name == "harmony" else THINK)
        parsed = fmt.parse(text)
        assert isinstance(parsed, ToolCall) or (parsed.reason and "\n" not in parsed.reason)
        assert bool(turn.calls) == (turn.failure is None)
        called += bool(turn.calls)
    assert count // 4 < called < count


def best_seconds(fmt: ToolCallFormat, text: str) -> float:
    def once() -> float:
        began = time.process_time()
        parse_turn(fmt, text, SCHEMA)
        return time.process_time() - began

    return min(once() for _ in range(5))


@pytest.mark.parametrize("name", [*JSON_FORMATS, *TAG_FORMATS])
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_ten_times_the_text_takes_at_most_12_times_the_time(name: str) -> None:
    """Texts that take under 2 ms at 100 kB are not compared: the clock's noise is as large as they are."""
    fmt = tool_format(name)
    assert isinstance(fmt.parse(""), ParseFailure)
    call = fmt.render(ToolCall("f", {"a": "x", "b": "</a>"}))
    worst = 0.0

    def ratio(piece: str) -> float:
        short, long = (best_seconds(fmt, piece * (size // len(piece))) for size in (10_000, 100_000))
        return long / short if long > 0.002 else 0.0

    for piece in (*PIECES, call, call[: len(call) // 2], *(call + marker for marker in MARKERS)):
        worst = max(worst, min(ratio(piece) for _ in range(3)))
    print(f"{name}: 100 kB take at most {worst:.1f} times the time of 10 kB")
    assert worst <= 12
