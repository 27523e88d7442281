"""Pass@1 of single rollouts with a critic (SAO) against groups of 8 (GRPO), at equal numbers of episodes.

    OMP_NUM_THREADS=1 python benchmarks/bench_critic.py [--seeds 0 1 2] [--depths 0 2] [--steps 20] [--episodes 96]
        [--eval-tasks 256] [section.key=value ...]

For each depth (`async_rollout.depth`: 0 is synchronous, 2 trains on tokens of up to two updates ago) and seed it trains
the quickstart in both settings, one run after another, with the same episodes per step, objective and mask of tokens,
and evaluates the last step on the held-out tasks. Prints Pass@1 of each run, and per depth the mean difference over the
seeds with a 95 % interval: Student's t over the differences of the pairs. What is done is left out when the script is
started again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent_rl.monitoring.metrics_log import read_metrics

CONFIG, RUNS = "configs/critic-small.yaml", Path("runs")
GROUP = 8
GRPO = ("train.baseline=mean", "train.advantage_scale=group", "train.critic={warmup_steps: 0}")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % quantiles of Student's t by the number of pairs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=96, help="episodes of a step, a multiple of 8")
    parser.add_argument("--eval-tasks", type=int, default=256)
    options = parser.parse_args()
    for depth in options.depths:
        pairs = [pair(depth, seed, options) for seed in options.seeds]
        print(f"depth {depth}: {difference(pairs)}", flush=True)


def pair(depth: int, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Pass@1 of both settings for a seed."""
    settings = {
        "sao": ("rollout.group_size=1", f"rollout.tasks_per_step={options.episodes}"),
        "grpo": (f"rollout.group_size={GROUP}", f"rollout.tasks_per_step={options.episodes // GROUP}", *GRPO),
    }
    passed = {}
    for setting, changes in settings.items():
        name = f"bench-critic-{setting}-{depth}-{seed}"
        common = (f"name={name}", f"seed={seed}", f"async_rollout.depth={depth}", f"train.steps={options.steps}")
        common += ("eval.every=0", f"eval.tasks={options.eval_tasks}", *options.overrides)
        passed[setting] = run(name, [*common, *changes])
        rows = read_metrics(RUNS / name)
        seconds, explained = sum(row["time/step"] for row in rows), rows[-1].get("critic/explained_variance")
        also = "" if explained is None else f", explained variance {explained:.2f}"
        result = f"Pass@1 {passed[setting]:.1%}, {seconds:.0f} s of steps{also}"
        print(f"depth {depth} seed {seed} {setting}: {result}", flush=True)
    return passed["sao"], passed["grpo"]


def run(name: str, overrides: Sequence[str]) -> float:
    """Train, unless it is done; Pass@1 after the last step."""
    summary = RUNS / name / "summary.json"
    if not summary.exists():
        print(f"$ agent-rl train {CONFIG} {shlex.join(overrides)}", flush=True)
        command = [sys.executable, "-m", "agent_rl.cli", "train", CONFIG, *overrides]
        if (code := subprocess.run(command, check=False).returncode) != 0:
            sys.exit(code)
    return float(json.loads(summary.read_text())["pass_at_1_after"])


def difference(pairs: Sequence[tuple[float, float]]) -> str:
    """The mean of SAO less GRPO in points, with its interval where there are several seeds."""
    points = 100 * np.array([sao - grpo for sao, grpo in pairs])
    if len(points) < 2:
        return f"SAO - GRPO {points.mean():+.1f} points (one seed)"
    quantile = STUDENT[max(count for count in STUDENT if count <= len(points))]
    reach = quantile * points.std(ddof=1) / len(points) ** 0.5
    return f"SAO - GRPO {points.mean():+.1f} points [{points.mean() - reach:+.1f}, {points.mean() + reach:+.1f}]"


if __name__ == "__main__":
    main()
