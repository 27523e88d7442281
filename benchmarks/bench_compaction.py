"""Pass@1 on tasks longer than the context: without compaction, with it, and after training with it.

    OMP_NUM_THREADS=1 python benchmarks/bench_compaction.py [--seeds 0 1 2] [--steps 12] [--tasks 256]

For each seed: RL of configs/orders-small.yaml (one order an episode) for its 20 steps, compared with its start
(`start`, `end`). The model is then prepared for several orders in a context that holds them: fine-tuned on solutions,
and trained by RL for ``--steps`` steps (`whole`). It gets the same tasks in a context that cannot hold them
(configs/compaction-small.yaml): evaluated without compaction (`cut`) and with it (`compacted`), trained with it for
``--steps`` steps (`trained`), and trained with the summaries' loss masked (`masked`). All are evaluated on the held-out
tasks by `agent-rl eval`, with 95 % intervals, and compared by `agent-rl eval compare`. What is done is left out when
the script is started again.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from agent_rl.monitoring.metrics_log import read_metrics

ORDERS, COMPACTION, SFT = (f"configs/{name}-small.yaml" for name in ("orders", "compaction", "sft"))
START, ORDER_STEPS, SFT_STEPS = "tiny-moe", 20, 24
WHOLE = ("rollout.compaction=null", "rollout.max_tokens=640")
RUNS = Path("runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="steps with compaction")
    parser.add_argument("--tasks", type=int, default=256, help="held-out tasks of an evaluation")
    options = parser.parse_args()
    for seed in options.seeds:
        measure(seed, options.steps, options.tasks)


def measure(seed: int, steps: int, tasks: int) -> None:
    """Run all arms of one seed and print their evaluations."""
    arms = ("orders", "taught", "whole", "compaction", "masked")
    orders, taught, whole, trained, masked = (f"bench-{name}-{seed}" for name in arms)
    train(ORDERS, orders, ORDER_STEPS, f"seed={seed}")
    seconds = sum(row["time/step"] for row in read_metrics(RUNS / orders))
    print(f"== seed {seed}: one order an episode, {ORDER_STEPS} steps in {seconds:.0f} s")
    compared = (("start", START), ("end", at(orders, ORDER_STEPS)))
    compare(*(evaluate(ORDERS, orders, arm, model, tasks) for arm, model in compared))
    teach(taught, at(orders, ORDER_STEPS), f"seed={seed}")
    train(COMPACTION, whole, steps, f"seed={seed}", f"model={at(taught, SFT_STEPS)}", *WHOLE)
    before = at(whole, steps)
    model = f"model={before}"
    train(COMPACTION, trained, steps, f"seed={seed}", model)
    train(COMPACTION, masked, steps, f"seed={seed}", model, "rollout.compaction.train_summary=false")
    print(f"== seed {seed}: several orders, longer than the context, {steps} steps")
    evaluate(COMPACTION, trained, "whole", before, tasks, *WHOLE)
    cut = evaluate(COMPACTION, trained, "cut", before, tasks, "rollout.compaction=null")
    compacted = evaluate(COMPACTION, trained, "compacted", before, tasks)
    for first, second in (
        (cut, compacted),
        (compacted, evaluate(COMPACTION, trained, "trained", at(trained, steps), tasks)),
        (compacted, evaluate(COMPACTION, trained, "masked", at(masked, steps), tasks)),
    ):
        compare(first, second)


def at(name: str, step: int) -> str:
    return f"{RUNS / name}@{step}"


def teach(name: str, model: str, *overrides: str) -> None:
    """Fine-tune ``model`` on the solutions of 48 tasks of the split train, in a context that holds them."""
    solutions, run = RUNS / "bench-solutions", RUNS / name
    if not solutions.exists():
        where = ("--split", "train", "--tasks", "48", "--out", str(solutions))
        agent_rl("eval", COMPACTION, *WHOLE, "--policy", "gold", *where)
    if len(read_metrics(run)) < SFT_STEPS:
        data = (f"sft.data=[{{path: {solutions}}}]", "sft.validation_share=0", "sft.batch_rows=8", "sft.epochs=4")
        rate = (f"train.checkpoint_every={SFT_STEPS}", "train.lr=6.0e-4")
        agent_rl("sft", SFT, f"name={name}", f"model={model}", *data, *rate, *overrides)


def train(config: str, name: str, steps: int, *overrides: str) -> None:
    last = f"train.checkpoint_every={steps}"
    if len(read_metrics(RUNS / name)) < steps:
        agent_rl("train", config, f"name={name}", f"train.steps={steps}", "eval.tasks=0", last, *overrides)


def evaluate(config: str, run: str, arm: str, model: str, tasks: int, *overrides: str) -> Path:
    """The directory of the evaluation of ``model``."""
    out = RUNS / run / "eval" / arm
    agent_rl("eval", config, f"model={model}", *overrides, "--tasks", str(tasks), "--out", str(out))
    return out


def compare(first: Path, second: Path) -> None:
    agent_rl("eval", "compare", str(first), str(second))


def agent_rl(*arguments: str) -> None:
    print(f"$ agent-rl {shlex.join(arguments)}", flush=True)
    if (code := subprocess.run([sys.executable, "-m", "agent_rl.cli", *arguments], check=False).returncode) != 0:
        sys.exit(code)


if __name__ == "__main__":
    main()
