"""What an episode costs beside its sandboxes, and how many the scripted agent finishes in a minute.

Run: ``python benchmarks/bench_episodes.py [backend] [tasks]`` (default: bubblewrap, 64 generated tasks)

First, one after another and in turns, so that other load falls on all: a bare sandbox that runs ``python3``, the
start of an episode, the grading of the true fix; medians, and ratios to the bare sandbox. Then the gold solver on
all tasks, 8 at once: the loop, the tools, the diff, the fresh sandbox and the tests of the grading, with a scripted
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import uuid

from agent_rl.evaluation.evaluate import evaluate
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import Limiter
from agent_rl.rollout.scripted_policies import solver_runner
from envs import EnvContext
from envs.mini import MiniEnvironment
from envs.swe import grade_patch, start_episode
from envs.swe.records import parse_record
from envs.swe.sandboxes import sandbox_spec
from sandbox import SandboxPool, open_backend

ROUNDS = 10
AT_ONCE = 8


async def costs(context: EnvContext, environment: MiniEnvironment) -> None:
    """Print what start and grading take, over a bare sandbox."""
    task = environment.tasks("heldout")[0]
    record = parse_record({**task.record, "verified": False}, task.id)
    strip, starts, grades = [], [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        async with context.sandbox(sandbox_spec(context, record, None)) as sandbox:
            await sandbox.exec("python3 -c pass", timeout=60)
        strip.append(time.perf_counter() - began)
        began = time.perf_counter()
        async with start_episode(context, record):
            starts.append(time.perf_counter() - began)
        grades.append((await grade_patch(context, record, record.gold)).seconds)
    base = statistics.median(strip)
    print(f"bare sandbox that runs python3: {base * 1e3:.0f} ms")
    for name, seconds in {"an episode's start": starts, "a grading": grades}.items():
        print(f"{name}: {statistics.median(seconds) * 1e3:.0f} ms, {statistics.median(seconds) / base:.2f} of it")


async def throughput(environment: MiniEnvironment) -> None:
    """Print how many episodes the gold solver finishes in a minute."""
    tasks = environment.tasks("heldout")
    run = solver_runner(environment, "gold", EpisodeRules())
    report = await evaluate(tasks, run, policy="gold", limiter=Limiter(AT_ONCE))
    rate = report.graded / report.seconds * 60
    print(
        f"gold solver: {report.graded} episodes, Pass@1 {report.pass_at_1:.0%}, {rate:.0f} a minute, {AT_ONCE} at once"
    )


async def main(backend: str, count: int) -> None:
    pool = SandboxPool(open_backend(backend, run_id=f"bench-{uuid.uuid4().hex[:8]}"))
    try:
        context = EnvContext(pool)
        environment = MiniEnvironment(context, heldout_tasks=count)
        await environment.prepare("heldout")
        await costs(context, environment)
        await throughput(environment)
    finally:
        await pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="bubblewrap", help="of the sandboxes")
    parser.add_argument("tasks", nargs="?", type=int, default=64, help="generated tasks")
    options = parser.parse_args()
    asyncio.run(main(options.backend, options.tasks))
