"""What the sources of old log-probs are worth: the engine's own spread, and training runs with each of them.

``python benchmarks/bench_old_logprobs.py`` starts one real server and evaluates the same sequences again and again, in
batches of different company: what the mean of n evaluations can take away is the spread it finds. It prints, for each
company, the share of tokens whose evaluations differ at all, a token's variance, and the variance of the means of 2, 4
and 8 evaluations (disjoint ones of the same 16), and how far an evaluation is from the log-prob sampled with.

``--table OUT`` also trains the task of ``--config`` (the quickstart) in small: replay r3 and off, times recompute,
rollout and rescore (``--evaluations``, 8 by default), times three seeds. Each run is resumed where it was left, and
skipped where it is done; OUT then holds ``old_logprobs.json`` and the table as Markdown. The runs share one server, one
at a time. Rollout and rescore leave the trainer's pass out of steps that do not measure the mismatch; ``ratio`` is the
time of a step relative to recompute with the same replay and seed. What that saves, at equal settings:

    python benchmarks/bench_old_logprobs.py --table runs/old-quickstart --replays off --sources recompute rescore
    python benchmarks/bench_old_logprobs.py --table runs/old-paper --config configs/paper-small.yaml --replays off
        --sources recompute rescore

``--pairs OUT`` takes the first step of every run in OUT, whose trajectories are all the starting model's, and asks for
one update on each under every source, replay and correction, from the same weights: what differs between the lines of
its table is the line's own doing, not the sampling's. It needs no sandboxes and no Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.config.loader import install_model, load_config
from agent_rl.controller.advantages import build_samples
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories
from agent_rl.rollout.rescore import rescore_metrics
from agent_rl.types import Group, Rescored, Sample, SamplingParams, Trajectory

PROMPT_TOKENS, SAMPLED_TOKENS, EVALUATIONS = 100, 100, 16
SEEDS = (0, 1, 2)
T_OF_SEEDS = 4.303  # Student's t for 95 % and three seeds
MEASURED = {
    "reward": "reward/mean",
    "k3-KL": "mismatch/k3_kl",
    "gradient norm": "train/grad_norm",
    "clipped": "train/clip_fraction",
    "variance": "old_logprob/variance",
    "spread": "old_logprob/spread_fraction",
    "from rollout": "old_logprob/rollout_abs_diff",
    "tail s": "time/rescore_tail",
    "pass s": "time/old_logprob",
    "step s": "time/step",
}
REPLAYS, SOURCES = ("r3", "off"), ("recompute", "rollout", "rescore")


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of which the last ``SAMPLED_TOKENS`` at most were sampled, with these log-probs."""

    tokens: list[int]
    logprobs: NDArray[np.float64]


# ---------------------------------------------------------------- the engine's own spread


async def spread(engine: SGLangEngine, others: int) -> dict[str, dict[str, float]]:
    """By company: what 16 evaluations of each of four sequences came to."""
    rng = np.random.default_rng(0)
    drawn = [await _sampled(engine, rng) for _ in range(others)]
    watched, crowd = drawn[:4], drawn[4:]
    found = {}
    for name, company in _companies(engine, crowd, rng).items():
        evaluations = [[await company(one) for _ in range(EVALUATIONS)] for one in watched]
        found[name] = _figures(watched, evaluations)
        print(f"{name:>22}: " + ", ".join(f"{key} {value:.3g}" for key, value in found[name].items()), flush=True)
    return found


def _companies(
    engine: SGLangEngine, crowd: Sequence[Scored], rng: np.random.Generator
) -> Mapping[str, Callable[[Scored], Awaitable[NDArray[np.float64]]]]:
    """Ways to evaluate a sequence, by what the engine has to do beside it."""

    async def alone(one: Scored) -> NDArray[np.float64]:
        return await _scores(engine, one)

    async def among(one: Scored, company: Sequence[Scored]) -> NDArray[np.float64]:
        order = [*company, one]
        rng.shuffle(order)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(_scores(engine, each)) for each in order]
        return tasks[order.index(one)].result()

    async def copies(one: Scored) -> NDArray[np.float64]:
        return await among(one, [Scored(one.tokens, one.logprobs) for _ in range(7)])

    async def some(one: Scored) -> NDArray[np.float64]:
        picked = rng.permutation(len(crowd))[: int(rng.integers(1, 8))]
        return await among(one, [crowd[at] for at in picked])

    async def all_of_them(one: Scored) -> NDArray[np.float64]:
        return await among(one, crowd)  # more tokens than one prefill takes: some sequence is cut

    async def decoding(one: Scored) -> NDArray[np.float64]:
        sampling = SamplingParams(max_new_tokens=int(rng.integers(8, 64)))
        async with asyncio.TaskGroup() as scope:
            for at, other in enumerate(crowd[:6]):
                prompt = other.tokens[:PROMPT_TOKENS]
                scope.create_task(engine.generate(prompt, sampling, routes_from=None, session=str(at)))
            result = scope.create_task(_scores(engine, one))
        return result.result()

    return {
        "alone": alone, "with 7 copies": copies, "with 1 to 7 others": some, "with all others": all_of_them,
        "while others sample": decoding,
    }  # fmt: skip


async def _sampled(engine: SGLangEngine, rng: np.random.Generator) -> Scored:
    prompt = rng.integers(2, engine.model_spec.vocab_size - 2, PROMPT_TOKENS).tolist()
    got = await engine.generate(prompt, SamplingParams(max_new_tokens=SAMPLED_TOKENS), routes_from=None, session="s")
    return Scored([*prompt, *got.tokens], np.array(got.logprobs))


async def _scores(engine: SGLangEngine, one: Scored) -> NDArray[np.float64]:
    return np.array((await engine.rescore(one.tokens, session="spread")).logprobs[PROMPT_TOKENS:])


def _figures(watched: Sequence[Scored], evaluations: Sequence[Sequence[NDArray[np.float64]]]) -> dict[str, float]:
    values = np.concatenate([np.stack(each) for each in evaluations], axis=1)  # [evaluations, tokens]
    sampled = np.concatenate([one.logprobs for one in watched])
    figures = {
        "spread_fraction": float((np.ptp(values, axis=0) > 0).mean()),
        "variance_of_1": float(values.var(axis=0, ddof=1).mean()),
    }
    for n in (2, 4, 8):
        means = values.reshape(EVALUATIONS // n, n, -1).mean(axis=1)
        figures[f"variance_of_{n}"] = float(means.var(axis=0, ddof=1).mean())
    return figures | {"from_sampled": float(np.abs(values.mean(axis=0) - sampled).mean())}


# ---------------------------------------------------------------- training runs


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: whose routes are replayed, what the ratio is taken against, and the seed."""

    replay: str
    source: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.replay}-{self.source}-{self.seed}"


def cells(replays: Sequence[str] = REPLAYS, sources: Sequence[str] = SOURCES) -> list[Cell]:
    """All runs, seed by seed: what is done when it is stopped early is whole seeds."""
    return [Cell(replay, source, seed) for seed in SEEDS for replay in replays for source in sources]


def train(cell: Cell, out: Path, model: Path, url: str, chosen: argparse.Namespace) -> bool:
    """Run ``cell`` to its end, from where it was left; whether it got there."""
    overrides = [
        f"name={cell.name}", f"runs_dir={out}", f"model={model}", f"seed={cell.seed}", f"engine.urls=[{url}]",
        "env.options={train_tasks: 160, heldout_tasks: 8}", "eval.tasks=0", "r3.probe=false", "guard.action='off'",
        f"rollout.tasks_per_step={chosen.tasks}", f"train.steps={chosen.steps}", "train.measure_without_replay_every=0",
        "train.checkpoint_every=1", "train.keep_checkpoints=1", f"train.replay='{cell.replay}'",
        f"train.old_logprob.source={cell.source}", f"train.old_logprob.rescore.n={chosen.evaluations}",
    ]  # fmt: skip
    log = out / f"{cell.name}.log"
    with log.open("ab") as file:
        command = [sys.executable, "-m", "agent_rl.cli", "train", str(chosen.config), *overrides]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if done.returncode:
        print(f"{cell.name} ended with {done.returncode}; see {log}; another call goes on with it", flush=True)
    return done.returncode == 0


async def run_cells(out: Path, model: Path, chosen: argparse.Namespace) -> None:
    """Run what is not done yet, on one server; write the table after each run."""
    every = cells(chosen.replays, chosen.sources)
    left = [cell for cell in every if not (out / cell.name / "summary.json").exists()]
    if left:
        extra = load_config(chosen.config).engine.extra_args
        config = EngineConfig(
            threads=1, max_total_tokens=65536, max_running_requests=64, start_timeout=600, extra_args=extra
        )
        async with EngineServer(config, model, out / "engine.log") as server:
            for cell in left:
                started = time.perf_counter()
                if await asyncio.to_thread(train, cell, out, model, server.url, chosen):
                    print(f"{cell.name}: {time.perf_counter() - started:.0f} s", flush=True)
                    write_table(out)
    write_table(out)


def write_table(out: Path) -> None:
    """``old_logprobs.json`` and ``old_logprobs.md`` of the runs that are done."""
    done = {cell: read_metrics(out / cell.name) for cell in cells() if (out / cell.name / "summary.json").exists()}
    variants = sorted({(cell.replay, cell.source) for cell in done}, reverse=True)
    figures = {}
    for replay, source in variants:
        runs = [rows for cell, rows in done.items() if (cell.replay, cell.source) == (replay, source)]
        figures[f"{replay} {source}"] = _over_seeds(runs)
        if ratios := _step_ratios(done, replay, source):
            figures[f"{replay} {source}"]["ratio"] = _of_seeds(ratios)
    (out / "old_logprobs.json").write_text(json.dumps(figures, indent=1))
    (out / "old_logprobs.md").write_text(markdown(figures))


def _step_ratios(done: Mapping[Cell, Sequence[Mapping[str, float]]], replay: str, source: str) -> list[float]:
    """The mean time of a step over that with recompute, for each seed that has both."""
    means = {cell: statistics.fmean(row["time/step"] for row in rows) for cell, rows in done.items()}
    pairs = [(Cell(replay, source, seed), Cell(replay, "recompute", seed)) for seed in SEEDS]
    return [means[one] / means[base] for one, base in pairs if one in means and base in means]


def _of_seeds(means: Sequence[float]) -> dict[str, float]:
    half = T_OF_SEEDS * statistics.stdev(means) / math.sqrt(len(means)) if len(means) == len(SEEDS) else math.nan
    return {
        "mean": statistics.fmean(means),
        "half_interval": half,
        "std_over_steps": math.nan,
        "seeds": float(len(means)),
    }


def _over_seeds(runs: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Each metric's mean over a run's steps, averaged over seeds with its 95 % interval; and the steps' own spread."""
    found = {}
    for name, metric in MEASURED.items():
        per_step = [[row[metric] for row in rows if metric in row] for rows in runs]
        means = [statistics.fmean(values) for values in per_step if values]
        if not means:
            continue
        steps = [statistics.stdev(values) for values in per_step if len(values) > 1]
        found[name] = _of_seeds(means) | {"std_over_steps": statistics.fmean(steps) if steps else math.nan}
    return found


def markdown(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The table; a cell is the mean over seeds and half its 95 % interval, the gradient norm's also its spread."""
    columns = (*MEASURED, "ratio")
    lines = ["| replay | source | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for variant, metrics in figures.items():
        replay, source = variant.split()
        row = [_cell(name, metrics.get(name)) for name in columns]
        lines.append(f"| {replay} | {source} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _cell(name: str, found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    steps = f" (steps {found['std_over_steps']:.2g})" if name == "gradient norm" else ""
    if math.isnan(found["half_interval"]):
        return f"{found['mean']:.3g}, {found['seeds']:.0f} of {len(SEEDS)} seeds{steps}"
    return f"{found['mean']:.3g} ± {found['half_interval']:.2g}{steps}"


# ---------------------------------------------------------------- one update, every way


VARIANTS = [
    (replay, source, correction)
    for replay in ("r3", "off")
    for source in ("recompute", "rollout", "rescore")
    for correction in ("None", "tis", "icepop")
]
CORRECTIONS = {"None": {}, "tis": {"weight": "token"}, "icepop": {"weight": "token", "mask": "token"}}
PAIRED = ("mismatch/k3_kl", "train/grad_norm", "train/approx_kl", "train/clip_fraction", "train/correction_weight")


async def rescored(model: Path, logs: Path, groups: Sequence[Group], n: int) -> list[Group]:
    """The groups with their trajectories evaluated by a server of its own, which holds the weights that sampled."""
    config = EngineConfig(threads=1, max_total_tokens=65536, max_running_requests=64, start_timeout=600)

    async def one(engine: SGLangEngine, trajectory: Trajectory) -> Trajectory:
        tokens, mask = trajectory.tokens.tolist(), trajectory.loss_mask
        scores = [(await engine.rescore(tokens, session="pairs")).logprobs for _ in range(n)]
        return replace(trajectory, rescored=Rescored(np.array(scores, np.float32)[:, mask]))

    async with EngineServer(config, model, logs / "engine.log") as server:
        engine = SGLangEngine(server.url, read_model_spec(model), config)
        try:
            return [
                replace(group, trajectories=tuple([await one(engine, each) for each in group.trajectories]))
                for group in groups
            ]
        finally:
            await engine.close()


def updates(model: Path, batches: Sequence[Sequence[Sample]]) -> list[dict[str, dict[str, float]]]:
    """For every batch, the metrics of one update under every variant, by its name; the weights stay as they were."""
    from one_rank import free_port

    from agent_rl.train.batching.partition import split_step
    from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
    from agent_rl.train.route_sharding import shard_routes, without_routes
    from agent_rl.train.step_metrics import step_metrics
    from agent_rl.train.worker import TrainerWorker

    one = WorkerRequest(
        RunConfig(name="pairs", model=model), read_model_spec(model), model, None, device="cpu", threads=1
    )
    # So small a rate leaves every float32 weight as it is.
    rank = TrainerWorker(one, OptimizerSpec(lr=1e-30), 0, master_addr="127.0.0.1", master_port=free_port())
    found = []
    for samples in batches:
        shares = split_step(samples, mini_steps=1, budget=8192, ranks=1)[0]
        ids = [each for share in shares for each in share.micro_batches]
        shards = [shard_routes(samples, each, rank.info().shard) for each in ids]
        figures = {}
        for replay, source, correction in VARIANTS:
            train = {"replay": replay, "old_logprob": {"source": source}, "correction": CORRECTIONS[correction]}
            config = RunConfig.model_validate({"name": "pairs", "model": model, "train": train})
            order = StepRequest(config, measure_without_replay=False)
            report, *_ = rank.grpo(without_routes(samples, ids), shares, order, shards)
            assert report is not None
            values = step_metrics([report], None, None, config.train.clip)
            figures[f"{replay} {source} {correction}"] = {name: values[name] for name in PAIRED}
        found.append(figures)
    rank.close()
    return found


def pairs(out: Path, n: int) -> None:
    """Write ``pairs.json`` and ``pairs.md`` of the runs in ``out``."""
    runs = sorted(path.parent.parent for path in out.glob("*/trajectories/step-000001.jsonl.zst"))
    groups = [read_trajectories(run, 1) for run in runs]
    flat = asyncio.run(rescored(out / "model", out, [group for each in groups for group in each], n))
    batches, at = [], 0
    for each in groups:
        batches.append(build_samples(flat[at : at + len(each)]).samples)
        at += len(each)
    measured = updates(out / "model", [batch for batch in batches if batch])
    spread_of = rescore_metrics([trajectory for group in flat for trajectory in group.trajectories])
    (out / "pairs.json").write_text(json.dumps({"batches": measured, "rescored": spread_of}, indent=1))
    (out / "pairs.md").write_text(pairs_table(measured))
    print((out / "pairs.md").read_text(), json.dumps(spread_of), sep="\n")


def pairs_table(measured: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Means over batches; of the gradient norm the ratio to that of ``r3 recompute None`` on the same batch, with its
    standard error over batches."""
    lines = ["| replay | source | correction | k3-KL | gradient norm, ratio | k3(old, new) | clipped | weight |"]
    lines.append("|---" * 8 + "|")
    for variant in measured[0]:
        mean = {name: statistics.fmean(batch[variant][name] for batch in measured) for name in PAIRED}
        base = [batch["r3 recompute None"]["train/grad_norm"] for batch in measured]
        ratios = [batch[variant]["train/grad_norm"] / of for batch, of in zip(measured, base, strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        cells = [
            f"{mean['mismatch/k3_kl']:.3g}", f"{statistics.fmean(ratios):.4f} ± {error:.4f}",
            f"{mean['train/approx_kl']:.3g}", f"{mean['train/clip_fraction']:.3g}",
            f"{mean['train/correction_weight']:.4f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(variant.split())} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


async def measure_spread(model: Path, logs: Path, others: int) -> dict[str, dict[str, float]]:
    config = EngineConfig(threads=1, max_total_tokens=65536, max_running_requests=64, start_timeout=600)
    async with EngineServer(config, model, logs / "engine.log") as server:
        engine = SGLangEngine(server.url, read_model_spec(model), config)
        try:
            return await spread(engine, others)
        finally:
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=int, default=24, help="sequences that keep the watched four company")
    parser.add_argument("--table", type=Path, metavar="OUT", help="also train, and write the table here")
    parser.add_argument("--evaluations", type=int, default=8, help="n of rescore")
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"), help="config of --table")
    parser.add_argument("--replays", nargs="+", choices=REPLAYS, default=REPLAYS)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=3, help="tasks a step, eight trajectories each")
    parser.add_argument(
        "--pairs", type=Path, metavar="OUT", help="one update every way, on the first steps of its runs"
    )
    chosen = parser.parse_args()
    if chosen.pairs is not None:
        pairs(chosen.pairs.absolute(), chosen.evaluations)
        return
    if chosen.table is None:
        with tempfile.TemporaryDirectory() as scratch:
            install_model(model := Path(scratch) / "model")
            print(json.dumps(asyncio.run(measure_spread(model, Path(scratch), chosen.others))))
        return
    out = chosen.table.absolute()
    name = str(yaml.safe_load(chosen.config.read_text()).get("model", "tiny-moe"))
    install_model(model := out / "model", name)
    asyncio.run(run_cells(out, model, chosen))
    print((out / "old_logprobs.md").read_text())


if __name__ == "__main__":
    main()
