"""What hostile input costs the grading: 1 MiB of patch, of changed files and of test log, made to be slow to read.

``python benchmarks/bench_adversarial.py`` prints one JSON object. Each input is read as the grading reads it, in
a thread beside an event loop that does nothing else:

- ``seconds``: until it was read (goal: 0.5), and ``cpu_seconds`` of the thread, which a busy machine does not change;
- ``over_pass``: the same over the time of a plain pass over its lines;
- ``lag_ms``: how late the event loop woke a task that sleeps 1 ms, at most. Under ``machine`` stands what it is while
  nothing is read, and the load;
- ``held_ms``: processor time that the thread took between two turns of the loop, at most: what the reading itself adds
  to the lag, however busy the machine is (goal: 50).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from timing import time_call

from envs.swe.diff.agent_patch import file_patches
from envs.swe.diff.git_diff import screen, split_patch
from envs.swe.diff.snapshot import BaseSnapshot
from envs.swe.pytest_log import judge_pytest_log
from sandbox import TreeFile

SIZE = 1 << 20
HEADER = "= short test summary info =\n"
HIDDEN = [f"tests/part_{number % 20}/test_{number}.py" for number in range(500)]
EXPECTED = {f"tests/test_a.py::test_{'x' * (number % 300)}{number}": "PASSED" for number in range(1000)}


def fill(part: Callable[[int], str] | str) -> str:
    """1 MiB of a part, which may depend on its number."""
    if isinstance(part, str):
        return (part * (SIZE // len(part) + 1))[:SIZE]
    parts, size = [], 0
    while size < SIZE:
        parts.append(part(len(parts)))
        size += len(parts[-1])
    return "".join(parts)[:SIZE]


HEAD = "diff --git a/a b/a\n--- a/a\n+++ b/a\n"
PATCHES = {
    "headers alone": fill("diff --git a/a b/a\n"),
    "one file a new path": fill(lambda n: f"diff --git a/{n}/{'x/' * 80}a b/{n}/{'x/' * 80}a\nnew file mode 100644\n"),
    "paths of many parts": fill(lambda n: f"diff --git a/{'a/' * 2000}{n} b/{'a/' * 2000}{n}\n"),
    "one long path": "diff --git a/" + fill("tests/"),
    "hunks of one line": HEAD + fill("@@ -1 +1 @@\n-a\n+b\n"),
    "one long hunk": HEAD + f"@@ -1,{SIZE} +1,{SIZE} @@\n" + fill(" \n"),
    "lines of the head": "diff --git a/a b/a\n" + fill("rename from x\n"),
    "no end of modes": "diff --git a/a b/a\n" + fill("new file mode 100644\n"),
    "a quoted name": 'diff --git "a/' + fill("\\141"),
}
LOGS = {
    "ends of names in one line": HEADER + "FAILED a" + fill(" - ["),
    "ends of names in many lines": HEADER + fill("FAILED " + "a - " * 200 + "\n"),
    "many tests": HEADER + fill(lambda n: f"PASSED {n}\n"),
    "many summaries": fill(HEADER),
    "equal signs": fill("="),
    "a summary's head without an end": HEADER.rstrip() + fill(" ") + "x",
    "colours": HEADER + fill("\x1b[1;"),
    "parts of subtests": HEADER + "SUBFAILED(" + fill(")"),
}
FILES = {
    "one line many times": ("a\n" * 1000, fill("a\n")),
    "two lines in turns": (fill("a\nb\n"), fill("b\na\n")),
    "lines backwards": (fill(lambda n: f"{n}\n"), "\n".join(reversed(fill(lambda n: f"{n}\n").split("\n")))),
    "one long line": (fill("a"), fill("b")),
}


def read_patch(patch: str) -> None:
    screen(split_patch(patch), hidden=HIDDEN)


def read_log(log: str) -> None:
    judge_pytest_log(log, EXPECTED)


def compare(case: str) -> None:
    old, new = FILES[case]
    base = BaseSnapshot.from_files({"a.py": old})
    list(file_patches(base, {"a.py": TreeFile(stat.S_IFREG | 0o644, new.encode())}, ["a.py"], base.contents))


def plain_pass(text: str) -> float:
    """Seconds of this thread to strip every line."""
    return time_call(lambda: sum(len(line.strip()) for line in text.split("\n")), time.thread_time)


async def measure(read: Callable[[str], None], argument: str, text: str) -> Mapping[str, float]:
    lag = held = 0.0
    clocks: list[int] = []

    def work() -> float:
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        try:
            return time_call(partial(read, argument), time.thread_time)
        finally:
            clocks.clear()  # the clock of a thread that has ended can't be read

    async def watch() -> None:
        nonlocal lag, held
        taken = 0.0
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            lag = max(lag, time.perf_counter() - due)
            for clock in clocks:
                before, taken = taken, time.clock_gettime(clock)
                held = max(held, taken - (before or taken))

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    lag, began = 0.0, time.perf_counter()
    cpu = await asyncio.to_thread(work)
    seconds = time.perf_counter() - began
    watching.cancel()
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu, 3),
        "over_pass": round(cpu / plain_pass(text), 1),
        "lag_ms": round(1e3 * lag, 1),
        "held_ms": round(1e3 * held, 1),
    }


async def bench() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    return {
        "machine": {
            "load": {"a minute": os.getloadavg()[0]},
            "a thread that sleeps": await measure(lambda _: time.sleep(0.3), "", "x" * SIZE),
        },
        "patch": {case: await measure(read_patch, text, text) for case, text in PATCHES.items()},
        "log": {case: await measure(read_log, text, text) for case, text in LOGS.items()},
        "files": {case: await measure(compare, case, "".join(texts)) for case, texts in FILES.items()},
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(asyncio.run(bench()), indent=1))
