"""What a step of 65,536-token trajectories costs the driver: processor time by part, memory, bytes in the object store.

Run: ``python benchmarks/bench_scale.py [trajectories]`` (default 32; a multiple of 8)

The driver's own code runs: episodes of 32 turns whose answers are raw routes of 48 layers (top-8 of 128 experts) as a
server of ours sends them, decoding, stitching, the journal, the batch, its shards for 32 trainer ranks (TP4 EP8, as
``configs/paper-swe.yaml``) put into a real Ray object store, the merging of the ranks' answers and the records. Engines
and ranks are stand-ins that answer at once; HTTP is left out (``bench_http.py``). Shards are put data rank by data rank
and freed, so that the store holds those of one. The parts of each trajectory:

- ``decode``, ``stitch``, ``journal``: an answer's bytes to routes, rows to their place, the trajectory to the disk;
- ``episode``: the rest of the episode loop;
- ``batch``: groups to samples; ``dispatch``: routes to every rank, also on the wall clock with one thread and with the
  trainer's, the fastest of three (``wall_1``, ``wall``); ``merge``: the ranks' answers to metrics;
- ``records``: the trajectories of the step to the disk.

Then a step of 512 trajectories, of four and of sixteen times as many on as many times the GPUs: **modelled** from the
cost of a trajectory, which the two sizes that are measured (a half and all) show not to depend on their number.
``lost``: seconds in which the trainer waits for the driver (batch, dispatch, merge), against the seconds of a step by
``agent-rl plan``; with one thread, and with eight if dispatching keeps eight cores busy, which two cores cannot show.
``held``: the arrays of the trajectories in the driver; ``store``: what is in the object store.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import checkout  # noqa: F401
import numpy as np
import orjson
import ray
from bench_codec import EXPERTS, LAYOUT, TOP_K, synthetic_routes
from bench_loop import SlowEnvironment, tensor_bytes
from support.fake_workers import FakeWorkers
from timing import time_call

from agent_rl.config import R3Config, RolloutConfig
from agent_rl.config.loader import load_config
from agent_rl.controller.advantages import build_samples
from agent_rl.controller.journal import Journal
from agent_rl.engine.response import RequestContext, read_completion
from agent_rl.planner.assumptions import Assumptions
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.step_time import plan_time
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.episode_recovery import TurnLog
from agent_rl.rollout.group import GroupSettings, Limiter, collect_groups
from agent_rl.rollout.records import write_trajectories
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.train.batching.partition import partition_sequences
from agent_rl.train.ray_session import ray_cluster
from agent_rl.train.ray_trainer import dispatch
from agent_rl.train.reports import RouteDifferences
from agent_rl.train.route_sharding import WorkerInfo, count_all_differing
from agent_rl.types import Completion, Sample, SamplingParams, TokenIds, Trajectory
from envs import Grade, Task
from r3.shard import RouteShard, ShardSpec
from r3.stitch import RouteStitcher
from tools import ToolCall
from tools.formats import tool_format

TOKENS, TURNS, ROUNDS = 65_536, 32, 3
TENSOR, EXPERT, RANKS, BUDGET = 4, 8, 32, 65_536
DATA = RANKS // TENSOR
PLANNED = Path(__file__).parents[1] / "configs/paper-swe.yaml"
FORMAT = tool_format("xml")
ANSWER = ByteRenderer().encode(FORMAT.render(ToolCall("execute_bash", {"cmd": "x" * 400})))
OUTPUT = "x" * (TOKENS // TURNS - len(ANSWER) - 64)


class Parts(Counter[str]):
    """Seconds of processor time by part."""

    @contextmanager
    def time(self, name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        began = clock()
        yield
        self[name] += clock() - began

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **options: Any) -> Any:
            with self.time(name, time.thread_time):
                return call(*args, **options)

        return wrapped


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


class RawEngine:
    """Answers with the bytes that a server of ours sends; each answer is decoded as one that came by HTTP."""

    def __init__(self, parts: Parts) -> None:
        self._read = parts.timed("decode", read_completion)
        rows, draw = synthetic_routes(2 * TOKENS // TURNS), np.random.default_rng(0)
        # Every turn has other experts, or the archive of a trajectory would be a fifth of what it is.
        self._turns = [draw.permutation(EXPERTS).astype(np.uint8)[rows].tobytes() for _ in range(TURNS)]
        self._row = LAYOUT.num_layers * TOP_K
        entries = [[-0.5, token, None] for token in ANSWER]
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries, "weight_version": "0"}
        self._json = orjson.dumps({"output_ids": list(ANSWER), "meta_info": meta})

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        assert routes_from is not None
        size = (len(tokens) + len(ANSWER) - 1 - routes_from) * self._row
        rows = memoryview(self._turns[routes_from * TURNS // TOKENS])[:size]
        body = b"".join((b"\x93routes\x01", size.to_bytes(8, "little"), rows, self._json))
        context = RequestContext("r", session, "http://engine", len(tokens), routes_from, LAYOUT)
        return await asyncio.to_thread(self._read, body, context, 0.0)


class StoringRanks(FakeWorkers):
    """Ranks of TP4 EP8. What they are sent goes to Ray's store, whose bytes are counted."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__(samples, DATA, LAYOUT.num_layers)
        columns = tuple(range(LAYOUT.num_layers))
        self.infos = [
            WorkerInfo(
                rank, rank // TENSOR, DATA, rank % TENSOR == 0, ShardSpec(columns, 0, 1, rank % TENSOR, TENSOR), 48
            )
            for rank in range(RANKS)
        ]
        self.bytes = 0

    def put(self, value: object) -> object:
        if isinstance(value, RouteShard):
            self.bytes += value.experts.nbytes + value.present.nbytes + value.identity.nbytes
        else:
            self.bytes += sum(s.tokens.nbytes + s.loss_mask.nbytes + s.logprobs.nbytes for s in value.values())  # type: ignore[attr-defined]
        return ray.put(value)


def runner(parts: Parts) -> Any:
    renderer, env, engine = ByteRenderer(), WordyEnvironment(0), RawEngine(parts)
    limits = RolloutConfig(max_turns=TURNS, max_tokens=TOKENS, max_new_tokens=2048, describe_tools=False)
    rules = EpisodeRules(limits, routes=R3Config())

    async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
        return await run_episode(env, task, engine, renderer, FORMAT, rules, log=log)

    return run


async def rollout(count: int, directory: Path, parts: Parts) -> list[Any]:
    """The groups of a step, journaled."""
    journal = Journal(directory / "journal", "run")
    journal.recover(0, {0: "start"}, lambda position: True)
    await journal.begin(1, "start")
    tasks = WordyEnvironment(0).tasks("train")[: count // 8]
    runners = {task.id: journal.runner(number, runner(parts)) for number, task in enumerate(tasks)}
    with ExitStack() as stack:
        for owner, name, part in (
            (RouteStitcher, "append", "stitch"),
            (RouteStitcher, "finish", "stitch"),
            (Journal, "_write", "journal"),
        ):
            stack.enter_context(mock.patch.object(owner, name, parts.timed(part, getattr(owner, name))))
        with parts.time("episode"):
            done = await collect_groups(
                tasks, lambda task: runners[task.id](task), GroupSettings(size=8), limiter=Limiter(8)
            )
    parts["episode"] -= parts["decode"] + parts["stitch"] + parts["journal"]
    journal.close()
    return list(done.groups)


def train(samples: list[Sample], parts: Parts) -> int:
    """What the driver does for the ranks; the bytes that it put into the store."""
    lengths = [len(sample.tokens) for sample in samples]
    micro_batches = partition_sequences(lengths, budget=BUDGET, ranks=DATA)
    ranks = StoringRanks(samples)
    every = ranks.infos

    def send() -> None:
        for data_rank in range(DATA):
            ranks.infos = [info for info in every if info.data_rank == data_rank]
            dispatch(ranks, samples, micro_batches, routes=True)  # type: ignore[arg-type]

    walls: dict[str, list[float]] = {"wall_1": [], "wall": []}
    for _ in range(ROUNDS):
        with mock.patch("agent_rl.train.ray_trainer.DISPATCH_THREADS", 1):
            walls["wall_1"].append(time_call(send))
        ranks.bytes, parts["dispatch"] = 0, 0.0
        with parts.time("dispatch"):
            walls["wall"].append(time_call(send))
    parts |= {name: min(seconds) for name, seconds in walls.items()}
    whole = [WorkerInfo(rank, rank, DATA, True, ShardSpec(tuple(range(48))), 48) for rank in range(DATA)]
    ranks.infos = whole
    differs = [answered(ranks, samples, micro_batches[info.data_rank]) for info in whole]
    with parts.time("merge"):
        count_all_differing(samples, micro_batches, whole, differs)
    return ranks.bytes


def answered(ranks: FakeWorkers, samples: list[Sample], batches: Any) -> Any:
    parts = tuple(np.concatenate([ranks._of(samples[index]) for index in ids]) for ids in batches)
    return RouteDifferences(LAYOUT.num_layers, parts, parts)


async def step(count: int) -> dict[str, float]:
    parts = Parts()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        groups = await rollout(count, directory, parts)
        held = sum(tensor_bytes(t) for group in groups for t in group.trajectories)
        tokens = [len(t.tokens) for group in groups for t in group.trajectories]
        with parts.time("batch"):
            samples = list(build_samples(groups).samples)
        stored = train(samples, parts)
        with parts.time("records"):
            write_trajectories(directory, 1, groups)
        disk = disk_bytes(directory)
    per = {name: 1e3 * seconds / count for name, seconds in parts.items()}
    sizes = {"held_mib": held / count / 2**20, "stored_mib": stored / count / 2**20, "disk_mib": disk / count / 2**20}
    return {"trajectories": count, "tokens": float(np.mean(tokens)), **per, **sizes}


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def planned_seconds() -> dict[str, float]:
    """The seconds of a step's rollout and of its training, of trajectories of the full length."""
    config = load_config(PLANNED)
    model, assume = planned_model(config.model), Assumptions.of(config, "cuda")
    assume = assume.overridden([f"tokens={TOKENS}", f"turns={TURNS}", f"sampled_tokens={TURNS * len(ANSWER)}"])
    plan = plan_time(config, model, "cuda", assume)
    return {phase.name: phase.seconds for phase in plan.phases}


def report(found: dict[str, float]) -> None:
    waits = sum(found[name] for name in ("batch", "dispatch", "merge"))
    work = waits + sum(found[name] for name in ("decode", "stitch", "journal", "episode", "records"))
    threaded = waits - found["dispatch"] * (1 - 1 / 8)
    planned = planned_seconds()
    print(f"\nplanned step on 32 + 16 H100 SXM, s: {', '.join(f'{k} {v:,.0f}' for k, v in planned.items())}")
    print(
        f"{'trajectories':>13} {'driver CPU s':>13} {'lost s':>8} {'of a step':>10} {'8 threads':>10} {'held GB':>8} "
        f"{'store GB':>9}"
    )
    for times in (1, 4, 16):
        count = 512 * times
        print(
            f"{count:>13,} {count * work / 1e3:>13,.0f} {count * waits / 1e3:>8,.0f} "
            f"{count * waits / 1e3 / sum(planned.values()):>10.1%} "
            f"{count * threaded / 1e3 / sum(planned.values()):>10.1%} {count * found['held_mib'] * 2**20 / 1e9:>8,.0f} "
            f"{count * found['stored_mib'] * 2**20 / 1e9:>9,.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trajectories", nargs="?", type=int, default=32)
    count = parser.parse_args().trajectories
    with ray_cluster(None, cpus=1):
        for size in (max(8, count // 2 // 8 * 8), count, count):
            found = asyncio.run(step(size))
            print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)
    report(found)


if __name__ == "__main__":
    main()
