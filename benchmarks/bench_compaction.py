"""Pass@1 on tasks longer than the context: without compaction, with it, and after training with it.

    OMP_NUM_THREADS=1 python benchmarks/bench_compaction.py [--seeds 0 1 2] [--steps 9] [--tasks 256]

The tasks are those of configs/compaction-small.yaml. ``tiny-moe`` is fine-tuned on solutions in a context that holds
them (`whole`). In the context of the config, which does not, it is evaluated without compaction (`cut`) and with it
(`compacted`). For each seed it is trained by RL with compaction for ``--steps`` steps (`trained-SEED`), and from the
same start with the summaries' loss masked (`masked-SEED`). All are evaluated on the held-out tasks by `agent-rl eval`,
with 95 % intervals, and compared by `agent-rl eval compare`. What is done is left out when the script is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from agent_rl_command import agent_rl

from agent_rl.config import RunConfig
from agent_rl.config.loader import MODELS, load_config
from agent_rl.controller.rollout_runtime import call_format
from agent_rl.evaluation.report import wilson_interval
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.render import ChatRenderer
from agent_rl.rollout.initial_prompt import build_initial_prompt
from envs.orders import Orders
from envs.types import Task

COMPACTION, SFT = (f"configs/{name}-small.yaml" for name in ("compaction", "sft"))
EPOCHS, SOLUTIONS, SFT_STEPS = 4, 192, 96
WHOLE = ("rollout.compaction=null", "rollout.max_tokens=640")
RUNS, TAUGHT = Path("runs"), "bench-taught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=9, help="steps with compaction")
    parser.add_argument("--tasks", type=int, default=256, help="held-out tasks of an evaluation")
    options = parser.parse_args()
    teach()
    before = f"{RUNS / TAUGHT}@{SFT_STEPS}"
    compacted = evaluate("compacted", before, options.tasks)
    cut = evaluate("cut", before, options.tasks, "rollout.compaction=null")
    compare(cut, compacted)
    for arm, overrides in (("trained", ()), ("masked", ("rollout.compaction.train_summary=false",))):
        for seed in options.seeds:
            train(f"bench-{arm}-{seed}", options.steps, f"seed={seed}", f"model={before}", *overrides)
            after = evaluate(f"{arm}-{seed}", f"{RUNS}/bench-{arm}-{seed}@{options.steps}", options.tasks)
            compare(compacted, after)
    evaluate("whole", before, options.tasks, *WHOLE)
    print_long_tasks()


def print_long_tasks() -> None:
    """Pass@1 of each evaluation on the tasks whose solution exceeds the context before its last look or change."""
    config = load_config(Path(COMPACTION))
    needed = asyncio.run(tokens_needed(config))
    for report in sorted((RUNS / TAUGHT / "eval").glob("*/report.json")):
        outcomes = json.loads(report.read_text())["outcomes"]
        solved = [each["resolved"] for each in outcomes if needed[each["task_id"]] > config.rollout.max_tokens]
        rate = sum(solved) / len(solved)
        print(f"{report.parent.name}, {len(solved)} tasks: {rate:.3f}", wilson_interval(rate, len(solved)))


async def tokens_needed(config: RunConfig) -> dict[str, int]:
    """Tokens of the solution of each held-out task up to its last look or change, by id."""
    renderer = ChatRenderer(MODELS["tiny-moe"])
    fmt, needed = call_format(config, renderer), {}
    for row in Orders.tasks("heldout", Orders.Options(**config.env.options)):
        task, orders = Task(row["id"], "orders", row), Orders()
        messages = await orders.setup(task)
        tokens = len(build_initial_prompt(renderer, fmt, messages, [], describe_tools=False)[1])
        for call in Orders.solution(task):
            tokens += len(renderer.written(fmt.render(call))) + 1
            result = await getattr(orders, call.name)(**call.arguments)
            if call.name != "finish":
                needed[task.id] = tokens
            text = result if isinstance(result, str) else result.text
            tokens += len(renderer.observation(text, "user", stop=renderer.end_of_turn_id))
    return needed


def teach() -> None:
    """Fine-tune the config's model on the solutions of tasks of the split train, in a context that holds them."""
    solutions = RUNS / "bench-solutions"
    if not (solutions / "report.json").exists():
        where = ("--split", "train", "--tasks", str(SOLUTIONS), "--out", str(solutions))
        agent_rl("eval", COMPACTION, *WHOLE, "--policy", "gold", *where)
    if len(read_metrics(RUNS / TAUGHT)) < SFT_STEPS:
        rows = (f"sft.data=[{{path: {solutions}}}]", "sft.batch_rows=8", f"sft.epochs={EPOCHS}")
        rate = ("sft.validation_share=0", f"train.checkpoint_every={SFT_STEPS}", "train.lr=6.0e-4")
        agent_rl("sft", SFT, f"name={TAUGHT}", *rows, *rate)


def train(name: str, steps: int, *overrides: str) -> None:
    if len(read_metrics(RUNS / name)) < steps:
        agent_rl("train", COMPACTION, f"name={name}", f"train.steps={steps}", "eval.tasks=0", *overrides)


def evaluate(arm: str, model: str, tasks: int, *overrides: str) -> Path:
    """The directory of the evaluation of ``model``."""
    out = RUNS / TAUGHT / "eval" / arm
    if not (out / "report.json").exists():
        agent_rl("eval", COMPACTION, f"model={model}", *overrides, "--tasks", str(tasks), "--out", str(out))
    return out


def compare(first: Path, second: Path) -> None:
    agent_rl("eval", "compare", str(first), str(second))


if __name__ == "__main__":
    main()
