"""What the episode loop costs: many concurrent episodes against an engine and a sandbox that take fixed times.

``python benchmarks/bench_loop.py`` runs 256 episodes of 50 turns, 50 ms an answer and 5 ms a tool call, and prints one
JSON object (``--episodes 2048 --answer 2 --tool 0.2`` is a large rollout at the pace of a large model):

- ``wall_over_ideal``: wall time over that of an episode's waits, what an infinitely fast loop would take (goal: 1.15);
- ``wall_over_sleeps``: the same over the wall time of nothing but those sleeps, measured just before, so that what a
  busy machine adds to both is not put down to the loop;
- ``lag_p99_ms``: how late the event loop wakes a task that sleeps 10 ms, 99th percentile;
- ``cpu_ms_a_turn``: processor time of the whole process a turn, the scripted engine's making of routes included;
- ``turn_over_python``: that over the processor time of a fixed piece of Python work done in the same run (a tenth of a
  million additions), so that it means the same on any host;
- ``own_over_python``: the same of the loop alone: the engine's answers, the renderer's texts and the sleeps, asked for
  by a bare loop just before, are taken off;
- ``memory_over_tensors``: what a finished trajectory holds of the process's memory, over the bytes of its arrays;
- ``long_over_short``: processor time a turn in episodes of 400 turns over that in episodes of 50; 1 if nothing in the
  loop is proportional to the length so far (handing the prompt to an engine that copies it is).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from resident_memory import resident
from support.scripted_engine import ScriptedEngine
from timing import fastest, time_await

from agent_rl.config import RolloutConfig
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import GroupSettings, Limiter, collect_groups
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import SamplingParams, Trajectory
from agent_rl.utils.concurrency import LoopLag, reduce_gc_pauses, run_alongside
from envs import Grade, Task
from r3.payload import RouteLayout
from tools import FunctionToolSet, ToolCall, ToolSet
from tools.formats import tool_format

OUTPUT = "x" * 80
FORMAT = tool_format("xml")
LAYOUT = RouteLayout(num_layers=12, moe_layer_ids=tuple(range(12)), top_k=4, num_experts=64)


@dataclass
class SlowEnvironment:
    """One tool, which sleeps; every episode is resolved."""

    seconds: float
    name: str = "slow"
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": "go on"},)
    tools: ToolSet = field(init=False)

    def __post_init__(self) -> None:
        self.tools = FunctionToolSet([self.execute_bash])

    async def prepare(self, *splits: str) -> None:
        """Nothing to make ready."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"task-{index}", self.name, {}) for index in range(10_000)]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[SlowEnvironment]:
        yield self

    async def execute_bash(self, cmd: str) -> str:
        """Run a command.

        Args:
            cmd: The command.
        """
        await asyncio.sleep(self.seconds)
        return OUTPUT

    async def grade(self) -> Grade:
        return Grade(reward=1.0, resolved=True)

    def gold(self, task: Task) -> str:
        return ""


@cache
def scripted(latency: float) -> ScriptedEngine:
    """Answers every turn with one call of the tool, after ``latency`` seconds; its table of routes is made once."""
    called = ByteRenderer().encode(FORMAT.render(ToolCall("execute_bash", {"cmd": "python -m pytest -x tests"})))
    return ScriptedEngine(lambda session, turn, tokens: called, layout=LAYOUT, latency=latency)


def runner(turns: int, answer_seconds: float, tool_seconds: float) -> Any:
    """Runs an episode that calls the tool ``turns`` times."""
    renderer, env, engine = ByteRenderer(), SlowEnvironment(tool_seconds), scripted(answer_seconds)
    rules = EpisodeRules(RolloutConfig(max_turns=turns, max_tokens=1 << 30, describe_tools=False))

    async def run(task: Task) -> Trajectory:
        return await run_episode(env, task, engine, renderer, FORMAT, rules)

    return run


async def collect(episodes: int, turns: int, answer_seconds: float, tool_seconds: float) -> list[Trajectory]:
    tasks = SlowEnvironment(0).tasks("train")[: episodes // 8]
    run = runner(turns, answer_seconds, tool_seconds)
    rollout = await collect_groups(tasks, run, GroupSettings(size=8), limiter=Limiter(episodes))
    return [trajectory for group in rollout.groups for trajectory in group.trajectories]


async def sleeps(episodes: int, turns: int, answer: float, tool: float) -> float:
    """Seconds that the engine's and the sandbox's sleeps alone take."""

    async def episode() -> None:
        for _ in range(turns):
            await asyncio.sleep(answer)
            await asyncio.sleep(tool)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as scope:
        for _ in range(episodes):
            scope.create_task(episode())
    return time.perf_counter() - began


async def stand_ins(episodes: int, turns: int, answer: float, tool: float) -> None:
    """What the loop has from others: as many answers, texts and sleeps, and nothing made of them."""
    renderer, env, engine, sampling = ByteRenderer(), SlowEnvironment(tool), scripted(answer), SamplingParams()

    async def episode(session: str) -> None:
        length, held = 1, 0
        for _ in range(turns):
            completion = await engine.generate(range(length), sampling, routes_from=held, session=session)
            held = length + len(completion.tokens) - 1
            renderer.decode(completion.tokens)
            length = held + 1 + len(renderer.observation(await env.execute_bash(""), stop=renderer.STOP))

    async with asyncio.TaskGroup() as scope:
        for number in range(episodes):
            scope.create_task(episode(str(number)))


async def measure_wall(episodes: int, turns: int, answer: float, tool: float) -> dict[str, float]:
    lag = LoopLag(interval=0.01)
    strip = await sleeps(episodes, turns, answer, tool)
    others = await time_await(stand_ins(episodes, turns, answer, tool), time.process_time)
    async with run_alongside(lag.watch()):
        wall, processor = time.perf_counter(), time.process_time()
        await collect(episodes, turns, answer, tool)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    ideal, python = turns * (answer + tool), python_seconds()
    return {
        "wall_seconds": wall,
        "ideal_seconds": ideal,
        "wall_over_ideal": wall / ideal,
        "wall_over_sleeps": wall / strip,
        "lag_p99_ms": lag.metrics()["loop/lag_p99_ms"],
        "cpu_ms_a_turn": 1e3 * processor / (episodes * turns),
        "turn_over_python": processor / (episodes * turns) / python,
        "own_over_python": (processor - others) / (episodes * turns) / python,
    }


def python_seconds(repeats: int = 20) -> float:
    """Processor time of 100,000 additions in plain Python, the least of some."""

    def additions() -> None:
        total = 0
        for number in range(100_000):
            total += number

    return fastest({"additions": additions}, repeats)["additions"]


def measure_memory(episodes: int, turns: int) -> dict[str, float]:
    """In a fresh process: what others left in this one would be used again."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory, (episodes, turns))


def memory(episodes: int, turns: int) -> dict[str, float]:
    return asyncio.run(held_memory(episodes, turns))


async def held_memory(episodes: int, turns: int) -> dict[str, float]:
    await collect(8, turns, 0, 0)  # caches of the libraries, filled once
    gc.collect()
    before = resident("VmRSS")
    trajectories = await collect(episodes, turns, 0, 0)
    gc.collect()
    held = resident("VmRSS") - before
    tensors = sum(tensor_bytes(trajectory) for trajectory in trajectories)
    return {
        "tokens_a_trajectory": len(trajectories[0].tokens),
        "tensor_bytes_a_trajectory": tensors / episodes,
        "memory_over_tensors": held / tensors,
    }


def tensor_bytes(trajectory: Trajectory) -> int:
    assert trajectory.routing is not None
    arrays = (trajectory.tokens, trajectory.loss_mask, trajectory.logprobs)
    routing = trajectory.routing
    return sum(array.nbytes for array in arrays) + routing.experts.nbytes + routing.present.nbytes


async def measure_scaling(short: int = 50, long: int = 400) -> dict[str, float]:
    await scripted(0).generate(range(200 * long), SamplingParams(), routes_from=0, session="makes the table of routes")
    per_turn = {}
    for turns, episodes in ((short, 64), (long, 8)):
        spent = await time_await(collect(episodes, turns, 0, 0), time.process_time)
        per_turn[turns] = spent / (episodes * turns)
    return {"long_over_short": per_turn[long] / per_turn[short]}


async def bench(episodes: int, turns: int, answer: float, tool: float) -> dict[str, float]:
    reduce_gc_pauses()  # as the commands do
    return {
        "episodes": episodes,
        "turns": turns,
        **await measure_wall(episodes, turns, answer, tool),
        **measure_memory(256, turns),
        **await measure_scaling(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--answer", type=float, default=0.05, help="seconds that the engine takes for a turn")
    parser.add_argument("--tool", type=float, default=0.005, help="seconds that a tool call takes")
    print(json.dumps(asyncio.run(bench(**vars(parser.parse_args()))), indent=1))
