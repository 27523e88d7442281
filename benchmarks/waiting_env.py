"""The quickstart's tasks with tools that wait before each call, as sandboxes on other machines do.

The wall time of steps with sampling beside training over that of synchronous ones, with tools that wait::

    export PYTHONPATH=benchmarks
    set -- env.name=waiting_env:WaitingEnvironment rollout.concurrency=128 train.steps=7 eval.tasks=0 \\
      train.old_logprob.source=rollout
    agent-rl train configs/quickstart.yaml "$@" name=sync
    agent-rl train configs/quickstart.yaml "$@" name=beside async_rollout.depth=1 async_rollout.max_staleness=2
    python benchmarks/waiting_env.py runs/sync runs/beside

The last line prints the seconds a step of each run, from the end of its first step to the end of its last, and their
ratio. The first step is left out: both wait for all of its episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from agent_rl.monitoring.metrics_log import read_metrics
from envs import Episode, Grade, Task
from envs.context import EnvContext
from envs.mini import MiniEnvironment
from tools import ToolCall, ToolResult, ToolSet


@dataclass(frozen=True)
class WaitingTools:
    """``tools`` after a lognormal wait of ``median`` seconds."""

    tools: ToolSet
    median: float
    sigma: float
    draw: random.Random

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self.tools.schemas()

    async def call(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(self.draw.lognormvariate(log(self.median), self.sigma))
        return await self.tools.call(call)


@dataclass(frozen=True)
class WaitingEpisode:
    """``episode`` with other tools."""

    episode: Episode
    tools: ToolSet

    @property
    def messages(self) -> Sequence[Mapping[str, str]]:
        return self.episode.messages

    async def grade(self) -> Grade:
        return await self.episode.grade()


class WaitingEnvironment(MiniEnvironment):
    """``median`` (seconds) and ``sigma`` are those of the lognormal wait before each call."""

    def __init__(self, context: EnvContext, *, median: float = 1.5, sigma: float = 0.6, **options: Any) -> None:
        super().__init__(context, **options)
        self._wait, self._draw = (median, sigma), random.Random(0)

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[WaitingEpisode]:  # type: ignore[override]
        async with super().start(task) as episode:
            yield WaitingEpisode(episode, WaitingTools(episode.tools, *self._wait, self._draw))


def seconds_a_step(run: Path) -> float:
    """The mean wall time of the steps after the first."""
    ended = [row["time/ended"] for row in read_metrics(run)]
    return (ended[-1] - ended[0]) / (len(ended) - 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    before, after = map(seconds_a_step, parser.parse_args().runs)
    print(f"{before:.1f} s and {after:.1f} s a step: {after / before:.2f}")
