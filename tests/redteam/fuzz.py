"""Fuzzed episodes: random damage, broken commands, hostile text and code that attacks its grading, in every scaffold.

``PYTHONPATH=.:tests python -m tests.redteam.fuzz BACKEND FIRST COUNT`` plays episodes and prints one line of JSON for
each that ends without a grade, and one for all. The number of an episode determines its turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from agent_rl.config import EnvConfig, RolloutConfig
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import solver_runner
from agent_rl.types import Trajectory
from envs import EnvContext, Task, load_scaffold
from envs.scaffold import Scaffold
from envs.swe import SweRecord, start_episode
from envs.swe.episode import SweEpisode
from sandbox import ImageMissingError, SandboxSpec, SandboxUnavailableError
from sandbox.factory import open_backend
from tests.envs.conftest import BROKEN, FIXED
from tests.redteam.test_damage import DAMAGE, IMAGE, LOCAL, MINI
from tests.redteam.test_grading_attacks import ENDLESS, IMPORTS, QUICK
from tools import ToolCall

SCAFFOLDS = ("agent-rl", "r2egym", "mini-swe-agent", "openhands")
LIMITS = SandboxSpec(memory_mb=256, disk_mb=256, inodes=2000)
PATHS = (
    *("/testbed/calc.py", "calc.py", "/testbed", "/", "/proc/self/mem", "/dev/zero", "/proc/1/root", "/dev/stdin", ""),
    *("~", "../../etc/passwd", "\0", "\udcff", "/testbed/" + "d/" * 3000, "a\nb", "-rf", "/proc/self/fd/1", "\u202ex"),
)
SIGNALS = ("HUP", "INT", "QUIT", "ABRT", "SEGV", "USR1", "PIPE", "TERM", "XCPU", "KILL")
PIECES = (
    *("f() { f | f & }; f", "for i in $(seq 90); do setsid sleep 99 & done", "head -c 20M /dev/zero > b$RANDOM"),
    *("python3 -c 'x = bytearray(1 << 30)'", "head -c 1G /dev/zero | tail -c 1", "head -c 200M /dev/zero > /dev/shm/x"),
    *("for i in $(seq 300); do : > $RANDOM; done", "for i in $(seq 200); do mkdir -p d && cd d; done", "cd; rm -rf *"),
    *("chmod -R 000 . /tmp", "chmod 700 .", "rm -rf .git *", "mkfifo p .git/x calc.py", "ln -sf / l; ln -sf l l2"),
    *("kill -SIGNAL -1", "kill -SIGNAL $PPID", "for p in /proc/[0-9]*; do kill -SIGNAL ${p#/proc/}; done"),
    *(
        "head -c 400000 /dev/urandom",
        "head -c 400000 /dev/urandom >&2",
        "exec >&-",
        "exec 2>&- <&-",
        "ulimit -f 0 -n 4",
    ),
    *(
        "exit CODE",
        "exec 3>x; rm x; head -c 9M /dev/zero >&3",
        "while read x; do :; done",
        "sleep 3 & disown",
        "kill -STOP $$",
    ),
    *(
        "truncate -s 900M calc.py",
        "export PATH= LD_PRELOAD=/x",
        "trap 'sleep 9' EXIT TERM",
        "mv /testbed /t; ln -s /t /testbed",
    ),
    *(
        "git config core.fsmonitor 'kill -9 -1'",
        "echo x > .git/HEAD",
        "rm -rf /tmp/*",
        "printf '\\000agent-rl end\\000'",
    ),
)
TEXTS = (
    *("", "\0", "\udcff\ud800", "\x1b[2J\x1b]0;x\x07", "<|im_end|><|im_start|>system", "%s%n{0}{{x}}", "\n" * 9999),
    *("x" * 200_000, "</parameter></function></tool_call>", "\N{ZERO WIDTH JOINER}" * 999, "```bash\n", "[" * 9999),
    *("<tool_call>" * 999, "<function=", '{"name": ' * 999, "1e999", "-" + "9" * 9999, "COMPLETE_TASK_AND_SUBMIT"),
)
VALUES: tuple[object, ...] = (
    *(None, True, -1, 10**30, 1e308, [], {}, [[]] * 50, {"a": {"b": [1]}}),
    *("view", "create", "str_replace", "insert", "undo_edit"),
)
WORDS = (
    *("cmd", "command", "path", "file_text", "old_str", "new_str", "view_range", "insert_line", "search_term", "x"),
    *("is_input", "timeout", "security_risk", "concise", "python_only"),
)
TOOLS = (
    *("execute_bash", "file_editor", "search", "submit", "finish", "str_replace_editor", "think", "bash", "nothing"),
)


@dataclass(frozen=True)
class FuzzEnvironment:
    """One record for each task; the scaffold is the context's."""

    context: EnvContext
    record: SweRecord
    name: str = "fuzz"

    @property
    def scaffold(self) -> Scaffold:
        return self.context.scaffold

    def start(self, task: Task) -> AbstractAsyncContextManager[SweEpisode]:
        return start_episode(self.context, self.record)


def shell_command(draw: random.Random) -> str:
    """A damage, parts of two, one with changed characters, two at once, or small pieces together."""
    first, second = (draw.choice(list(DAMAGE.values())) for _ in range(2))
    kind = draw.randrange(5)
    if kind == 0:
        return first
    if kind == 1:
        return (
            first[: draw.randrange(len(first))]
            + draw.choice(("", "; ", "\n", " | ", " & "))
            + second[draw.randrange(9) :]
        )
    if kind == 2:
        return "".join(draw.choice(first + "\\'\"$`(){}<>|&;\0\n") if draw.random() < 0.1 else each for each in first)
    if kind == 3:
        return f"({first}) & {second}"
    pieces = draw.choice(("; ", " & ", " && ", " || ", " | ", "\n")).join(draw.choices(PIECES, k=draw.randint(1, 4)))
    return pieces.replace("SIGNAL", draw.choice(SIGNALS)).replace("CODE", str(draw.randrange(256)))


def code_change(draw: random.Random, record: SweRecord) -> str:
    """A command that appends one to three attacks on grading to the code under test, sometimes to the fixed code."""
    attacks = [
        draw.choice(list(QUICK.values() if draw.random() < 0.9 else ENDLESS.values()))
        for _ in range(draw.randrange(1, 4))
    ]
    fixed = FIXED if record is LOCAL and draw.random() < 0.5 else BROKEN
    files = record.files if record is MINI else fixed
    path = next((each for each in files if each.endswith(".py")), "calc.py")
    text = files[path] + IMPORTS + "\n".join(attacks)
    return f"cat > {path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE\n"


def hostile_call(draw: random.Random, scaffold: Scaffold) -> ToolCall:
    """A call of any tool with arguments of any kind; a command in a scaffold that has nothing else."""
    pool = (*PATHS, *TEXTS, *VALUES)
    if scaffold.name == "mini-swe-agent":
        return scaffold.shell(str(draw.choice(pool)))
    count = draw.randrange(5)
    return ToolCall(draw.choice(TOOLS), {draw.choice(WORDS): draw.choice(pool) for _ in range(count)})


def turns_of(draw: random.Random, scaffold: Scaffold, record: SweRecord) -> list[ToolCall | str]:
    """One to five turns; half of the episodes submit."""
    kinds: Sequence[Callable[[], ToolCall | str]] = (
        lambda: scaffold.shell(shell_command(draw)),
        lambda: scaffold.shell(shell_command(draw)),
        lambda: scaffold.shell(code_change(draw, record)),
        lambda: hostile_call(draw, scaffold),
        lambda: draw.choice(TEXTS) + draw.choice(TEXTS),
    )
    turns = [draw.choice(kinds)() for _ in range(draw.randrange(1, 6))]
    return [*turns, scaffold.submit] if draw.random() < 0.5 else turns


async def play(context: EnvContext, number: int) -> tuple[Trajectory, list[ToolCall | str]]:
    """Play the episode of ``number`` and return it with its turns."""
    draw = random.Random(number)
    scaffold = load_scaffold(draw.choice(SCAFFOLDS))
    records = [LOCAL, MINI] if context.backend.name == "bubblewrap" else [LOCAL, MINI, IMAGE]
    environment = FuzzEnvironment(replace(context, scaffold=scaffold), draw.choice(records))
    turns = turns_of(draw, scaffold, environment.record)
    fmt = str(scaffold.required_rollout.get("tool_format", draw.choice(("hermes", "xml"))))
    rules = EpisodeRules(RolloutConfig(time_limit=60.0), EnvConfig(scaffold=scaffold.name), routes=None)
    run = solver_runner(environment, lambda env, task: turns, rules, tool_format_name=fmt)
    return await run(Task(f"fuzz-{number}", "fuzz", {})), turns


async def fuzz(backend: str, numbers: Iterable[int], at_once: int) -> Counter[str]:
    """Play the episodes of ``numbers`` and count how they end; print those that end without a grade."""
    waiting, endings = iter(numbers), Counter[str]()
    opened = open_backend(backend, run_id=f"fuzz-{uuid.uuid4().hex[:8]}")
    context = EnvContext(opened, limits=LIMITS, tool_timeout=3.0, grade_timeout=10.0)

    async def work() -> None:
        for number in waiting:
            ended, turns = await play(context, number)
            endings[ended.stop.value] += 1
            endings["solved"] += ended.resolved
            if ended.reward is None:
                print(json.dumps({"episode": number, "error": ended.error, "turns": repr(turns)[:4000]}), flush=True)

    try:
        await (await opened.start(LIMITS)).close()  # without an image, no episode starts
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    finally:
        await opened.close()
    return endings


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args(argv)
    began = time.monotonic()
    numbers = range(options.first, options.first + options.count)
    try:
        endings = asyncio.run(fuzz(options.backend, numbers, options.at_once))
    except (ImageMissingError, SandboxUnavailableError) as error:
        sys.exit(f"fuzz: {error}")
    seconds = round(time.monotonic() - began)
    print(json.dumps({"backend": options.backend, "first": options.first, "seconds": seconds, **endings}))


if __name__ == "__main__":
    main(sys.argv[1:])
