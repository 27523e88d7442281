"""Tasks of ten published packages and of this repository: how many, how fast, and whether the doctor agrees.

python benchmarks/own_tasks.py --out OUT      (downloads; half an hour on two idle cores, then the doctor as long)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "toolz",
    "boltons",
    "humanize",
    "cachetools",
    "natsort",
    "voluptuous",
    "isodate",
    "pathspec",
    "parso",
    "sqlparse",
)


def agent_rl(*arguments: str | Path) -> int:
    """Run a command of agent-rl; its output goes to ours."""
    command = [sys.executable, "-m", "agent_rl.cli", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode


def build(out: Path, package: str) -> None:
    """A few steps between releases, and bugs in the newest release that was downloaded."""
    agent_rl("tasks", "from-releases", package, "--out", out, "--tasks", "2", "--candidates", "4")
    sdists = sorted((out / "sdists").glob(f"{package}-*.tar.gz"), key=lambda path: path.stat().st_mtime_ns)
    if sdists:
        agent_rl("tasks", "inject", sdists[0], "--out", out, "--tasks", "9", "--candidates", "16")


def healthy(out: Path) -> int:
    """The records in the build's directory."""
    tasks = out / "tasks.jsonl"
    return tasks.read_bytes().count(b"\n") if tasks.exists() else 0


def measure(out: Path) -> None:
    """Build, and print tasks a minute, processor seconds a task and the machine's load."""
    began, before = time.monotonic(), healthy(out)
    for package in PACKAGES:
        build(out, package)
    agent_rl("tasks", "from-git", ROOT, "--out", out, "--tasks", "8", "--candidates", "60")
    agent_rl("tasks", "inject", ROOT, "--out", out, "--tasks", "4", "--candidates", "8")
    minutes, made = (time.monotonic() - began) / 60, healthy(out) - before
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (used.ru_utime + used.ru_stime) / max(1, made)
    load = os.getloadavg()[2]
    print(
        f"{made} healthy tasks in {minutes:.1f} min: {made / minutes:.1f} a minute, {cpu:.1f} processor seconds a task"
    )
    print(f"load over the last 15 minutes: {load:.1f} on {os.cpu_count()} cores", flush=True)


def doctor(out: Path) -> int:
    """The doctor on all tasks, and Pass@1 of the true fixes and of doing nothing."""
    code = agent_rl("doctor", "real", f"env.options.path={out / 'tasks.jsonl'}", "--out", out / "doctor")
    tasks = json.loads((out / "doctor" / "doctor.json").read_text())["tasks"]
    for policy in ("gold", "noop"):
        runs = [outcome for task in tasks for outcome in task[policy]]
        print(f"{policy}: {sum(map(bool, runs))} of {len(runs)} runs resolved, {len(tasks)} tasks")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the build; one that was begun is gone on with"
    )
    parser.add_argument("--only", choices=("build", "doctor"), help="one half of it")
    arguments = parser.parse_args(argv)
    if arguments.only != "doctor":
        measure(arguments.out)
    return doctor(arguments.out) if arguments.only != "build" else 0


if __name__ == "__main__":
    sys.exit(main())
