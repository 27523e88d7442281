"""What sampling ahead costs in memory: 512 trajectories of 16,128 tokens a batch, at depth 0 and 3.

``python benchmarks/bench_depth_memory.py`` runs steps of 64 groups of 8 episodes with places for
half of them, each depth in a process of its own: pump, buffer, journal, episodes with their transcripts and routes (12
layers of top-4), the samples of a step and its records on the disk are the real ones; the engine is scripted, and
training is a wait. An episode has 16 turns, and its pace is lognormal (sigma 0.58, cut at four means). It prints one
JSON object with a row for each depth, and the ratio of the two peaks (goal: 1.2):

- ``peak``: MiB of the process at its peak; ``batch``: those of the arrays of one batch;
- ``gathered``: the most groups of later batches that had ended when a step took its own;
- ``seconds``: wall time of the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_async import GROUPS, SIZE, SLOTS, durations
from bench_loop import LAYOUT, SlowEnvironment, tensor_bytes
from resident_memory import resident
from support.scripted_engine import ScriptedEngine

from agent_rl.config import R3Config, RolloutConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.controller.async_rollout.buffer import BufferRules, RolloutBuffer
from agent_rl.controller.async_rollout.producer import RolloutProducer
from agent_rl.controller.async_rollout.task_ledger import Outcome, TaskLedger
from agent_rl.controller.journal import Journal
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.episode_recovery import LoggedRunner, TurnLog
from agent_rl.rollout.group import GroupSettings, Limiter
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import Completion, Group, SamplingParams, TokenIds, Trajectory
from agent_rl.utils.concurrency import reduce_gc_pauses
from envs import Grade, Task
from tools import ToolCall
from tools.formats import tool_format

TURNS, ANSWER, STEPS = 16, 0.5, 4
OUTPUT = "x" * 921
MIB = 1 << 20


class WordyEnvironment(SlowEnvironment):
    """Answers each call at once and at length; every second episode solves its task."""

    ended = itertools.count()

    async def execute_bash(self, cmd: str) -> str:
        """Run a command.

        Args:
            cmd: The command.
        """
        return OUTPUT

    async def grade(self) -> Grade:
        return Grade(reward=float(next(self.ended) % 2), resolved=False)


class PacedEngine(ScriptedEngine):
    """Answers each session at a pace of its own, ``latency`` seconds a turn on average."""

    def __init__(self, answer: list[int], latency: float) -> None:
        super().__init__(lambda session, turn, tokens: answer, layout=LAYOUT, weight_version="0")
        self._mean, self._paces = latency, dict[str, float]()
        self._drawn: Iterator[float] = durations(0)

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        if session not in self._paces:
            self._paces[session] = self._mean * next(self._drawn)
        await asyncio.sleep(self._paces[session])
        completion = await super().generate(tokens, sampling, routes_from=routes_from, session=session)
        return replace(completion, logprobs=(-self._paces[session],) * len(completion.tokens))  # no two episodes alike


def runner() -> LoggedRunner:
    renderer, fmt, env = ByteRenderer(), tool_format("xml"), WordyEnvironment(0)
    answer = renderer.encode(fmt.render(ToolCall("execute_bash", {"cmd": "python -m pytest -x tests"})))
    engine = PacedEngine(answer, ANSWER)
    limits = RolloutConfig(max_turns=TURNS, max_tokens=32_768, describe_tools=False)
    rules = EpisodeRules(limits, routes=R3Config())

    async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
        return await run_episode(env, task, engine, renderer, fmt, rules, log=log)

    return run


async def steps(depth: int, directory: Path, train_seconds: float) -> dict[str, float]:
    """The steps of a run; its figures."""
    buffer = RolloutBuffer(BufferRules(GROUPS, depth, depth, 4 * GROUPS, STEPS), TaskLedger())
    journal, gathered, size = Journal(directory / "journal", "run"), 0, 0
    journal.recover(0, {0: "start"}, lambda position: True)
    await journal.begin(1, "start")
    tasks, limiter = SlowEnvironment(0).tasks("train"), Limiter(SLOTS)
    pump = RolloutProducer(GroupSettings(SIZE), tasks, buffer, journal, runner(), seed=0, limiter=limiter)
    async with pump.running():
        for step in range(1, STEPS + 1):
            taken = await pump.hand_over(await buffer.take())
            gathered = max(gathered, buffer.ledger.count(Outcome.KEPT))
            groups = [group for group in taken.values() if isinstance(group, Group)]
            size = sum(tensor_bytes(trajectory) for group in groups for trajectory in group.trajectories)
            samples = build_samples(groups).samples
            await asyncio.sleep(train_seconds)
            await asyncio.to_thread(write_trajectories, directory, step, groups)
            await journal.begin(step + 1, str(step))
            del taken, groups, samples
            buffer.release()
    journal.close()
    return {"gathered": gathered, "batch": size / MIB}


def measured(depth: int, train_seconds: float) -> dict[str, float]:
    """A run in this process, which is a fresh one."""
    reduce_gc_pauses()  # as the commands do
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(steps(depth, Path(directory), train_seconds))
    peak = resident("VmHWM") / MIB
    return {"depth": depth, "peak": peak, **figures, "seconds": time.perf_counter() - began}


def bench(train_seconds: float) -> dict[str, Any]:
    rows = []
    for depth in (0, 3):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measured, (depth, train_seconds)))
    return {"rows": rows, "peak_over_synchronous": rows[1]["peak"] / rows[0]["peak"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=float, default=20.0, help="seconds that a step trains")
    print(json.dumps(bench(parser.parse_args().train), indent=1))
