"""Reads and compares answers with math-verify: the program behind :mod:`envs.math.grader`, which runs this file.

It takes a task a line as a JSON list, its name and its texts, and answers a line of JSON: what the task gave, null
where it passed a limit, or "late" where the machine gave it no time to come that far. A model wrote the texts, and one
of ten characters (``9^{9^{9}}``) can ask for more memory and time than there is, in places that no signal reaches. So
each task runs in a process of its own, a fork of this one: a limit ends it, and nothing that it did to the library's
caches or the memory stays.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

CPU_SECONDS = 2
FAIR_SECONDS = 1.0
"""Processor time with which every honest answer is done: one that had it and is not done is at fault itself."""
WALL_SECONDS = 60.0
LATE = "late"
MEMORY_BYTES = 1 << 30
_CHUNK = 1 << 16
_SHOWN = 200
_SANDBOXED = (LatexExtractionConfig(sandboxed_match_priority=0, try_extract_without_anchor=False),)


def read(text: str) -> list[Any]:
    """What the library makes of an expression: where it can read it a sympy object, and the text that it read."""
    found: list[Any] = parse(rf"\boxed{{{text}}}", extraction_config=_SANDBOXED, parsing_timeout=None)
    return found


def can_read(*texts: str) -> list[bool]:
    """Whether each text is an expression."""
    return [any(not isinstance(part, str) for part in read(text)) for text in texts]


def compare(truth: str, answer: str) -> tuple[bool, str]:
    """Whether ``answer`` equals ``truth``, and what was read of it; an empty text where nothing could be."""
    found = read(answer)
    text = next((part for part in found if isinstance(part, str)), "")
    if all(isinstance(part, str) for part in found):
        return False, ""
    return bool(verify(read(truth), found, timeout_seconds=None)), text[:_SHOWN]


TASKS: Mapping[str, Callable[..., Any]] = {"can_read": can_read, "compare": compare}


def apart(name: str, *texts: str) -> Any:
    """What the task gives in a process of its own; None where it passed a limit or ended without a word, ``LATE`` where
    it did neither in ``WALL_SECONDS`` and had no fair share of the processor in them."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _run(writes, name, *texts)
    os.close(writes)
    try:
        ready, _, _ = select.select([reads], [], [], WALL_SECONDS)
        data = os.read(reads, _CHUNK) if ready else b""  # it fits into a pipe, and is written at once
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
    if not ready and used.ru_utime + used.ru_stime < FAIR_SECONDS:
        return LATE
    return json.loads(data) if data else None


def _run(writes: int, name: str, *texts: str) -> None:
    """The child's part: it ends here, however the task does."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        os.write(writes, json.dumps(TASKS[name](*texts)).encode())
    finally:
        os._exit(0)


def main() -> None:
    """Serve until nobody asks any more."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What the library loads and builds at its first use, a fork would build again for every answer.
    compare(r"\frac{3}{4}", "0.75")
    compare(r"3\sqrt{2}", r"\sqrt{18}")
    compare(r"\{2, 3\}", "x=2, y=4")
    for line in sys.stdin:
        print(json.dumps(apart(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
