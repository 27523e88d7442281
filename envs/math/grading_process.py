"""Parses and compares answers with math-verify: the worker program of :mod:`envs.math.grader`.

Each input line is a JSON list with a task's name and its texts. The output line is JSON: the task's result, null if it
exceeded a limit, or "late" if the machine gave it too little CPU time. The texts come from a model, and ten characters
(``9^{9^{9}}``) can request unlimited memory and time in code that no signal interrupts. Each task therefore runs in a
fork of this process: a limit ends it, and its changes to memory and the library's caches do not persist.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

CPU_SECONDS = 2
FAIR_SECONDS = 1.0
"""CPU seconds that suffice for every honest answer. A task that used them and is not done exceeded its limit."""
WALL_SECONDS = 60.0
LATE = "late"
MEMORY_BYTES = 1 << 30
_CHUNK = 1 << 16
_MAX_TEXT = 200
_PERCENT = re.compile(r"(?:\s|~|\\[ ,;:!]){0,4}(?:\\?%|(?<![A-Za-z])(?:[Pp]ercent(?:age)?|[Pp]ct)(?![A-Za-z]))")
_BOXED = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)


def parse_expression(text: str) -> list[Any]:
    """The library's result: a sympy object if it can parse the text, and the parsed text.

    Percent signs are left out, as in the graders of MATH and PRM800K: ``50\\%`` is 50. To the library it is 50 and 0.5.
    """
    parsed: list[Any] = parse(rf"\boxed{{{_PERCENT.sub('', text)}}}", extraction_config=_BOXED, parsing_timeout=None)
    return parsed


def can_parse(*texts: str) -> list[bool]:
    """Whether each text is an expression."""
    return [any(not isinstance(part, str) for part in parse_expression(text)) for text in texts]


def compare(truth: str, answer: str) -> tuple[bool, str]:
    """Whether ``answer`` equals ``truth``, and the parsed text; empty if ``answer`` cannot be parsed."""
    parsed = parse_expression(answer)
    text = next((part for part in parsed if isinstance(part, str)), "")
    if all(isinstance(part, str) for part in parsed):
        return False, ""
    return bool(verify(parse_expression(truth), parsed, timeout_seconds=None)), text[:_MAX_TEXT]


TASKS: Mapping[str, Callable[..., Any]] = {"can_parse": can_parse, "compare": compare}


def run_forked(name: str, *texts: str) -> Any:
    """The task's result from a forked process; None if it exceeded a limit or crashed; ``LATE`` if it was not done in
    ``WALL_SECONDS`` with less than ``FAIR_SECONDS`` of CPU time."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _run(writes, name, *texts)
    os.close(writes)
    try:
        ready, _, _ = select.select([reads], [], [], WALL_SECONDS)
        data = os.read(reads, _CHUNK) if ready else b""  # it fits into the pipe's buffer
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
    if not ready and used.ru_utime + used.ru_stime < FAIR_SECONDS:
        return LATE
    return json.loads(data) if data else None


def _run(writes: int, name: str, *texts: str) -> None:
    """Run the task in the child, which always exits here."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        os.write(writes, json.dumps(TASKS[name](*texts)).encode())
    finally:
        os._exit(0)


def main() -> None:
    """Serve tasks until the input ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Warm up the library before the first fork, or each fork would repeat its initialization.
    compare(r"\frac{3}{4}", "0.75")
    compare(r"3\sqrt{2}", r"\sqrt{18}")
    compare(r"\{2, 3\}", "x=2, y=4")
    for line in sys.stdin:
        print(json.dumps(run_forked(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
