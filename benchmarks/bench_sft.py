"""Pass@1 of fine-tuning on own successes and then RL, against RL alone in the same time.

    OMP_NUM_THREADS=1 python benchmarks/bench_sft.py [--seeds 0 1 2] [--tasks 64] [--steps 20] [--eval-tasks 256]

For each seed: (sft) `agent-rl rollout` of the quickstart, `agent-rl sft` on its successes, RL for ``--steps`` steps
from there; (rl) RL from the starting model for as many steps as take the same time, with a checkpoint of every step.
The time of an arm is that of its rollout and its steps, without starts, checkpoints and evaluations. Both are evaluated
on the held-out tasks by `agent-rl eval`, and compared by `agent-rl eval compare`. What is done is left out when the
script is started again. Use a quiet machine: the times of the two arms are compared.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.rollout.records import trajectories_path

CONFIG, SFT = "configs/quickstart.yaml", "configs/sft-small.yaml"
RUNS = Path("runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=64, help="tasks of the rollout")
    parser.add_argument("--steps", type=int, default=20, help="steps of RL after fine-tuning")
    parser.add_argument("--eval-tasks", type=int, default=256)
    options = parser.parse_args()
    for seed in options.seeds:
        measure(seed, options.tasks, options.steps, options.eval_tasks)


def measure(seed: int, tasks: int, steps: int, eval_tasks: int) -> None:
    """Run both arms of one seed and print their times and evaluations."""
    names = {arm: f"bench-{arm}-{seed}" for arm in ("sample", "tuned", "sft", "rl")}
    common, rollout = [f"seed={seed}", "eval.tasks=0"], RUNS / f"{names['sample']}-rollout"
    if not trajectories_path(rollout, 0).exists():
        agent_rl("rollout", CONFIG, f"name={names['sample']}", *common, "--tasks", str(tasks))
    if not (RUNS / names["tuned"] / "summary.json").exists():
        data = f"sft.data=[{{path: {rollout}, best_of: 2}}]"
        agent_rl("sft", SFT, f"name={names['tuned']}", *common, data, "sft.validation_share=0")
    train(names["sft"], steps, *common, f"model={RUNS / names['tuned']}")
    before = sampling_seconds(rollout) + sum(step_seconds(names["tuned"]))
    limit = before + sum(step_seconds(names["sft"]))
    done = steps
    train(names["rl"], done, *common, "train.checkpoint_every=1", "train.keep_every=1")
    while sum(step_seconds(names["rl"])) < limit:
        done += max(1, steps // 4)
        train(names["rl"], done, *common, "train.checkpoint_every=1", "train.keep_every=1")
    last = steps_within(step_seconds(names["rl"]), limit)
    print(
        f"seed {seed}: rollout and fine-tuning {before:.0f} s, in all {limit:.0f} s; RL alone made {last} steps in it"
    )
    outs = [evaluate(names[arm], step, eval_tasks) for arm, step in (("rl", last), ("sft", steps))]
    agent_rl("eval", "compare", *map(str, outs))


def train(name: str, steps: int, *overrides: str) -> None:
    if len(step_seconds(name)) < steps:
        agent_rl("train", CONFIG, f"name={name}", f"train.steps={steps}", *overrides)


def evaluate(name: str, step: int, tasks: int) -> Path:
    """The directory of the evaluation of a checkpoint."""
    out = RUNS / name / "eval" / f"step-{step}"
    agent_rl("eval", CONFIG, f"model={RUNS / name}@{step}", "--tasks", str(tasks), "--out", str(out))
    return out


def sampling_seconds(rollout: Path) -> float:
    """From the first episode's start to the last one's end."""
    rows = list(read_rows(trajectories_path(rollout, 0)))
    return float(max(row["began"] + row["seconds"] for row in rows) - min(row["began"] for row in rows))


def step_seconds(name: str) -> list[float]:
    return [row["time/step"] for row in read_metrics(RUNS / name)]


def steps_within(seconds: list[float], limit: float) -> int:
    """How many steps end within ``limit``."""
    return sum(sum(seconds[:count]) <= limit for count in range(1, len(seconds) + 1))


def agent_rl(*arguments: str) -> None:
    print(f"$ agent-rl {shlex.join(arguments)}", flush=True)
    if (code := subprocess.run([sys.executable, "-m", "agent_rl.cli", *arguments], check=False).returncode) != 0:
        sys.exit(code)


if __name__ == "__main__":
    main()
