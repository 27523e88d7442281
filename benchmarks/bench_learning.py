"""Pass@1 of other ways to learn against that of RL alone, at equal cost.

    OMP_NUM_THREADS=1 python benchmarks/bench_learning.py sft|critic|distill ... [--seeds 0 1 2] [--name bench]
        [--steps 10] [--rl-steps 14] [--eval-tasks 256] [section.key=value ...]

Each arm trains with its shipped config for ``--steps`` steps. RL alone is the quickstart, with a checkpoint of every
step; an arm is compared with the last step that RL ends within the arm's cost:

    sft      wall time: `agent-rl rollout` of 64 tasks, `agent-rl sft` on its successes (sft-small), RL from there
    critic   episodes: single rollouts with a critic (critic-small) against groups of 8
    distill  sampled tokens: a teacher without rewards (distill-small); the teacher is RL alone of the first seed,
             after `--rl-steps` steps

Times are those of the rollout and the steps, without starts, checkpoints and evaluations. Both checkpoints are
evaluated on the same held-out tasks by `agent-rl eval`. Prints each pair, and per arm the mean difference over the
seeds with its 95 % interval (Student's t). Overrides are of every training. What is done is left out when the script
is started again, so it can be run in pieces; use a quiet machine for ``sft``, whose times are compared.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_rl_command import agent_rl
from paper_figures import paired_difference

from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.rollout.records import trajectories_path

RUNS, RL = Path("runs"), "configs/quickstart.yaml"
Row = Mapping[str, float]


@dataclass(frozen=True)
class Arm:
    """``cost``: of a step, in ``unit``. ``before``: trains what the arm starts from; its overrides and its cost."""

    config: str
    unit: str
    cost: Callable[[Row], float]
    before: Callable[[Namespace, int], tuple[list[str], float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="ARM | section.key=value")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--name", default="bench", help="start of the runs' names")
    parser.add_argument("--steps", type=int, default=10, help="steps of an arm; of RL after fine-tuning")
    parser.add_argument("--rl-steps", type=int, default=14, help="first steps of RL alone; more follow where needed")
    parser.add_argument("--eval-tasks", type=int, default=256)
    options = parser.parse_intermixed_args()
    options.overrides = [each for each in options.arms if "=" in each]
    for arm in (each for each in options.arms if "=" not in each):
        pairs = {seed: compare(arm, seed, options) for seed in options.seeds}
        mean = paired_difference(*({seed: pair[side] for seed, pair in pairs.items()} for side in (0, 1)))
        print(f"{arm} - RL alone: {mean} points of Pass@1, {len(pairs)} seeds", flush=True)


def compare(arm: str, seed: int, options: Namespace) -> tuple[float, float]:
    """Pass@1 of RL alone and of the arm for a seed."""
    kind, name = ARMS[arm], run_name(options, arm, seed)
    overrides, cost = kind.before(options, seed)
    train(kind.config, name, seed, options.steps, [*overrides, *options.overrides])
    cost += sum(map(kind.cost, read_metrics(RUNS / name)))
    steps, done = rl_alone(options, seed, options.rl_steps), options.rl_steps
    while sum(map(kind.cost, steps)) < cost:
        done += max(1, options.rl_steps // 4)
        steps = rl_alone(options, seed, done)
    last = sum(sum(map(kind.cost, steps[:count])) <= cost for count in range(1, len(steps) + 1))
    alone = evaluate(run_name(options, "rl", seed), last, options.eval_tasks)
    passed = evaluate(name, options.steps, options.eval_tasks)
    costs = f"{cost:,.0f} {kind.unit}; RL alone made {last} steps of {sum(map(kind.cost, steps[:last])):,.0f}"
    print(f"{arm}, seed {seed}: Pass@1 {passed:.1%}, RL alone {alone:.1%} ({costs})", flush=True)
    return alone, passed


def run_name(options: Namespace, arm: str, seed: int) -> str:
    return f"{options.name}-{arm}-{seed}"


def rl_alone(options: Namespace, seed: int, steps: int) -> Sequence[Row]:
    """Train RL alone; its metrics by step."""
    name = run_name(options, "rl", seed)
    train(RL, name, seed, steps, ["train.checkpoint_every=1", "train.keep_every=1", *options.overrides])
    return read_metrics(RUNS / name)


def nothing(_options: Namespace, _seed: int) -> tuple[list[str], float]:
    return [], 0.0


def fine_tuned(options: Namespace, seed: int) -> tuple[list[str], float]:
    """Sample 64 tasks with the starting model, and fine-tune on two successes of each at most."""
    sampling, tuned = run_name(options, "sample", seed), run_name(options, "tuned", seed)
    rollout = RUNS / f"{sampling}-rollout"
    if not trajectories_path(rollout, 0).exists():
        agent_rl("rollout", RL, f"name={sampling}", f"seed={seed}", "eval.tasks=0", "--tasks", "64")
    if not (RUNS / tuned / "summary.json").exists():
        data = [f"sft.data=[{{path: {rollout}, best_of: 2}}]", "sft.validation_share=0", "eval.tasks=0"]
        agent_rl("sft", "configs/sft-small.yaml", f"name={tuned}", f"seed={seed}", *data)
    episodes = list(read_rows(trajectories_path(rollout, 0)))
    seconds = max(row["began"] + row["seconds"] for row in episodes) - min(row["began"] for row in episodes)
    return [f"model={RUNS / tuned}"], seconds + sum(row["time/step"] for row in read_metrics(RUNS / tuned))


def taught(options: Namespace, _seed: int) -> tuple[list[str], float]:
    """Train the teacher."""
    rl_alone(options, options.seeds[0], options.rl_steps)
    return [f"train.distill.teacher={RUNS / run_name(options, 'rl', options.seeds[0])}@{options.rl_steps}"], 0.0


def sampled_tokens(row: Row) -> float:
    return row["rollout/sampled_tokens_mean"] * row["rollout/trajectories"]


ARMS = {
    "sft": Arm(RL, "s", lambda row: row["time/step"], fine_tuned),
    "critic": Arm("configs/critic-small.yaml", "episodes", lambda row: row["rollout/trajectories"], nothing),
    "distill": Arm("configs/distill-small.yaml", "sampled tokens", sampled_tokens, taught),
}


def train(config: str, name: str, seed: int, steps: int, overrides: Sequence[str]) -> None:
    if not (RUNS / name / "checkpoints" / f"step-{steps:06}").exists():
        common = (f"name={name}", f"seed={seed}", f"train.steps={steps}", "eval.tasks=0", "eval.every=0")
        agent_rl("train", config, *common, *overrides)


def evaluate(name: str, step: int, tasks: int) -> float:
    """Pass@1 of a checkpoint on the held-out tasks; that of the starting model for step 0."""
    out = RUNS / name / "eval" / f"step-{step}"
    if not (out / "report.json").exists():
        model = [f"model={RUNS / name}@{step}"] if step else []
        agent_rl("eval", RL, *model, "--tasks", str(tasks), "--out", str(out))
    return float(json.loads((out / "report.json").read_text())["pass_at_1"])


if __name__ == "__main__":
    main()
