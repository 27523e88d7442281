"""Modelled expert parallelism with and without balancing: the evaluation of ForeMoE's paper (figures 8 to 12, table 4).

    python benchmarks/bench_balance.py --out runs/balance                # generated skews, EP16 to EP128
    python benchmarks/bench_balance.py --quick                           # a quarter of the micro-batches
    python benchmarks/bench_balance.py RUN --ranks-per-node 2            # captured routes of a run

Times are those of ``r3/balance/time_model.py`` on nodes of eight H100 with NVLink and InfiniBand (``HARDWARE``), for
one recompute and one update of Qwen3-30B-A3B (48 layers) and Qwen3-235B-A22B (94 layers): 14,500 tokens a rank in
sequences of 8,192, 128 experts, top-8, four slots. Everything beside the expert layers runs at the same share of the
peak. Skews come from the regime ``main`` of ``tests/support/balance_workloads.py``; as its layers are alike, loads and
times are those of four layers. Moves of experts to new owners count, EPLB's do not. Prints tables and one JSON object;
``--out`` draws the figures: 8 speed-up, 9 loads, 10 time by part, 11 parts of the planner left out, 12 cost of planning
and age of a placement. Planning times are processor times of one core, for all layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
from balance_stages import Stages, staged, update_within_machine
from matplotlib.figure import Figure
from support.balance_workloads import REGIMES, Pass, skewed_steps

from agent_rl.commands.balance import run_counts
from agent_rl.planner.known_models import planned_model
from agent_rl.train.batching.cost import sequence_cost
from agent_rl.train.expert_balancing.renewal import link_weight
from r3.balance import ExpertLayout, PlanArrays, PlannerOptions, TimeModel, plan_pass
from r3.balance.baselines import eplb
from r3.balance.cost import borrowed, imbalance, rank_load
from r3.balance.placement import joint_placement
from r3.balance.plan import Ints
from r3.balance.planners import Reach, by_source_node, transport
from r3.balance.time_model import HARDWARE, ExpertShape, Work, work_of

H100, PER_NODE, SEQUENCE, EVERY, SEED = HARDWARE["cuda"], 8, 8192, 4, 2
MODELS = {48: "Qwen/Qwen3-30B-A3B", 94: "Qwen/Qwen3-235B-A22B"}
RANKS = (16, 32, 64, 128)
PAPER_SPEEDUP = 1.45
"""The paper's largest speed-up at 64 GPUs over another training system, measured end to end."""


@dataclass(frozen=True)
class Case:
    """Steps ``[M, L, R, E]`` on one layout, and the model's times: ``forward`` and ``update`` of expert layers, seconds
    of everything else in both passes of one layer (``beside``)."""

    layout: ExpertLayout
    shape: ExpertShape
    steps: Sequence[Ints]
    beside: float

    @property
    def forward(self) -> TimeModel:
        return TimeModel.of(self.shape, H100, self._each, update=False, pool=True)

    @property
    def update(self) -> TimeModel:
        return TimeModel.of(self.shape, H100, self._each, update=True, pool=False)

    @property
    def _each(self) -> int:
        return self.layout.ranks // self.layout.nodes


@dataclass
class Result:
    """A planner's plans of some steps: loads over the mean in updates, seconds by part of a layer and micro-batch."""

    loads: list[float] = field(default_factory=list)
    borrowed: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("products", "links", "experts", "beside"), 0.0)
    )
    instances: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values()) / self.instances

    def add(self, time_model: TimeModel, plans: PlanArrays, *, update: bool, fetches: bool = True) -> None:
        work = work_of(plans)
        if not fetches:  # replicas stay for the whole step
            work = Work(work.load, work.link, 0 * work.crossing, 0 * work.local)
        whole, products, links = time_model.time(work), time_model.pair * work.load, time_model.link * work.link
        for name, part in (("products", products), ("links", links), ("experts", whole - products - links)):
            self.parts[name] += float(part.sum()) / 1e12
        if update:
            self.loads += imbalance(rank_load(plans)).ravel().tolist()
            self.borrowed.append(float(borrowed(plans).mean()))
            self.instances += work.load.size


Plan = Callable[[Ints, ExpertLayout, TimeModel], PlanArrays]


def generated(layers: int, ranks: int, size: Pass, steps: int) -> Case:
    model = planned_model(Path(MODELS[layers]))
    layout = ExpertLayout(128, ranks, 4, tuple(rank // PER_NODE for rank in range(ranks)))
    cost, expert = sequence_cost(model), ExpertShape(model.hidden, model.expert_inner, 2)
    flops = size.tokens * (cost.linear - layers * model.top_k * cost.expert + cost.quadratic * SEQUENCE) / layers
    counts = list(islice(skewed_steps(REGIMES["main"], layout, size, SEED), steps))
    return Case(layout, expert, counts, 4 * flops / H100.flops)


def foremoe(counts: Ints, layout: ExpertLayout, model: TimeModel) -> PlanArrays:
    return plan_pass(counts, layout, PlannerOptions(time=model))


def of_reach(reach: Reach) -> Plan:
    return lambda counts, layout, model: transport(counts, layout, reach, model)


def unbalanced(counts: Ints, layout: ExpertLayout, _model: TimeModel) -> PlanArrays:
    return PlanArrays.identity(layout, counts)


def planned(case: Case, plan: Plan, *, every: int = 0, ages: bool = False) -> Result | list[Result]:
    """Plans for all steps but the first. ``every``: steps between two renewals of the owners, whose moves count;
    ``ages``: a result for each step."""
    layout, results = case.layout, []
    for number, counts in enumerate(case.steps[1:]):
        result = Result()
        if every and number % every == 0:
            sources = by_source_node(counts, layout)
            new = replace(layout, placement=joint_placement(sources, layout, link_weight(layout, case.update)))
            pairs = zip(np.broadcast_to(layout.owner_rank, new.owner_rank.shape), new.owner_rank, strict=True)
            most = max(np.bincount(after[before != after], minlength=1).max() for before, after in pairs)
            result.parts["experts"] += counts.shape[1] * int(most) * case.shape.state_time(H100) / 1e12
            layout = new
        for model, update in ((case.forward, False), (case.update, True)):
            result.add(model, plan(counts, layout, model), update=update)
        result.parts["beside"] = case.beside * result.instances
        results.append(result)
    return results if ages else merged(results)


def merged(results: Sequence[Result]) -> Result:
    whole = Result()
    for each in results:
        whole.loads += each.loads
        whole.borrowed += each.borrowed
        whole.instances += each.instances
        for name, seconds in each.parts.items():
            whole.parts[name] += seconds
    return whole


def eplb_last_step(case: Case) -> Result:
    """Replicas of the last step's loads, two a rank, which stay for the step."""
    result, free = Result(), replace(case.layout, slots=case.layout.experts_per_rank + 2)
    for last, counts in zip(case.steps, case.steps[1:], strict=False):
        plans = eplb(counts, free, last.sum(axis=(0, 2)), 2)
        for model, update in ((case.forward, False), (case.update, True)):
            result.add(model, plans, update=update, fetches=False)
    result.parts["beside"] = case.beside * result.instances
    return result


def of_paper(case: Case, plan: Callable[[Ints, ExpertLayout], PlanArrays], instances: int = 2) -> Result:
    """The paper's planners on few layers, as they take milliseconds for each; owners by the loads of the last step."""
    layout = replace(case.layout, slots=8 + case.layout.experts_per_rank)
    few = replace(case, layout=layout, steps=[step[:, :instances] for step in case.steps[:2]])
    placed = joint_placement(by_source_node(few.steps[0], layout), layout, 0.0)
    owned = replace(few, layout=replace(layout, placement=placed))
    found = planned(owned, lambda counts, on, _model: plan(counts, on))
    assert isinstance(found, Result)
    return found


def compared(case: Case) -> dict[str, Result]:
    """Every planner's result on one case."""
    slots = case.layout.slots
    runs: dict[str, Callable[[], Result | list[Result]]] = {
        "none": lambda: planned(case, unbalanced),
        "EPLB, last step": lambda: eplb_last_step(case),
        "the paper's stages": lambda: of_paper(case, lambda counts, on: staged(counts, on, Stages())),
        "the paper's Algorithm 3": lambda: of_paper(case, lambda counts, on: update_within_machine(counts, on, 2)),
        "within nodes": lambda: planned(case, of_reach(Reach(True, slots))),
        "within nodes, renewed": lambda: planned(case, of_reach(Reach(True, slots)), every=EVERY),
        "within nodes, each step": lambda: planned(case, of_reach(Reach(True, slots)), every=1),
        "across nodes, 2 slots": lambda: planned(case, of_reach(Reach.choices(case.layout)[1])),
        "foremoe, owners stay": lambda: planned(case, foremoe),
        "foremoe": lambda: planned(case, foremoe, every=EVERY),
        "foremoe, each step": lambda: planned(case, foremoe, every=1),
    }
    return {name: result for name, run in runs.items() if isinstance(result := run(), Result)}


def planning_seconds(layers: int, ranks: int, microbatches: int) -> float:
    """Processor time of planning one update pass, the fastest of three."""
    case = generated(layers, ranks, Pass(microbatches=microbatches, layers=layers), 1)
    times = []
    for _ in range(3):
        started = time.thread_time()
        foremoe(case.steps[0], case.layout, case.update)
        times.append(time.thread_time() - started)
    return min(times)


def table(title: str, columns: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def rows_of(name: str, results: Mapping[str, Result]) -> Iterator[Sequence[str]]:
    none, last = results["none"].seconds, results.get("EPLB, last step")
    for planner, result in results.items():
        load = f"{np.mean(result.loads):.3f}, {np.quantile(result.loads, 0.95):.3f}"
        over = f"{last.seconds / result.seconds:.2f}" if last else ""
        yield (name, planner, load, f"{np.mean(result.borrowed):.1f}", f"{none / result.seconds:.2f}", over)


COLUMNS = ("case", "planner", "load of an update (mean, p95)", "borrowed", "speed-up over none", "over EPLB")


def draw_cases(out: Path, cases: Mapping[str, Mapping[str, Result]]) -> None:
    """Figures 8 to 11."""
    names, chosen = list(cases), ("EPLB, last step", "the paper's stages", "within nodes, each step", "foremoe")
    speed, loads = Figure((10, 4), layout="constrained"), Figure((10, 4), layout="constrained")
    axes, below = speed.subplots(), loads.subplots()
    for number, planner in enumerate(chosen):
        heights = [each["none"].seconds / each[planner].seconds if planner in each else 0 for each in cases.values()]
        axes.bar(np.arange(len(names)) + 0.2 * number, heights, 0.19, label=planner)
    axes.axhline(PAPER_SPEEDUP, color="gray", linestyle=":", label="the paper's largest at 64 GPUs, end to end")
    axes.set(
        xticks=np.arange(len(names)) + 0.3,
        xticklabels=[name.replace(", ", "\n") for name in names],
        ylabel="modelled speed-up over none",
        ylim=(0.9, None),
    )
    largest = cases[next((name for name in names if name.startswith("EP64")), names[-1])]
    for planner, result in largest.items():
        ordered = np.sort(result.loads)
        below.plot(ordered, np.linspace(0, 1, len(ordered)), label=planner)
    below.set(xlabel="fullest rank over the mean", ylabel="share of micro-batches and layers")
    parts, ablation = Figure((9, 4), layout="constrained"), Figure((9, 4), layout="constrained")
    bars, left = parts.subplots(), np.zeros(len(largest))
    for part in ("beside", "products", "links", "experts"):
        width = np.array([1e3 * each.parts[part] / each.instances for each in largest.values()])
        bars.barh(list(largest), width, left=left, label=part)
        left += width
    bars.set(xlabel="modelled ms of a layer and micro-batch, recompute and update")
    ablated = [
        name for name in largest if name not in ("EPLB, last step", "the paper's stages", "the paper's Algorithm 3")
    ]
    ablation.subplots().barh(ablated, [largest["none"].seconds / largest[name].seconds for name in ablated])
    ablation.axes[0].set(xlabel="modelled speed-up over none", xlim=(0.9, None))
    axes.legend(fontsize="small", ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1))
    for axis in (below, bars):
        axis.legend(fontsize="small")
    for number, figure in enumerate((speed, loads, parts, ablation), 8):
        figure.savefig(out / f"figure-{number}.png", dpi=120)


def draw_costs(out: Path, seconds: Mapping[str, Mapping[int, float]], ages: Mapping[str, Sequence[float]]) -> None:
    """Figure 12."""
    figure = Figure((10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, by_ranks in seconds.items():
        left.plot(list(by_ranks), list(by_ranks.values()), marker="o", label=name)
    left.set(xlabel="expert ranks", ylabel="CPU seconds of planning an update pass", xscale="log", yscale="log")
    for name, loads in ages.items():
        right.plot(loads, marker="o", label=name)
    right.set(xlabel="steps since the owners were renewed", ylabel="mean load of an update within nodes")
    for axis in (left, right):
        axis.legend(fontsize="small")
    figure.savefig(out / "figure-12.png", dpi=120)


def placement_ages(size: Pass) -> dict[str, list[float]]:
    """The mean load within nodes by steps since the owners were renewed."""
    ages = {}
    for ranks in RANKS[1:3]:
        case = generated(48, ranks, size, 6)
        results = planned(case, of_reach(Reach(True, 4)), every=99, ages=True)
        assert isinstance(results, list)
        ages[f"EP{ranks}"] = [float(np.mean(each.loads)) for each in results]
    return ages


def run_cases(run: Path, per_node: int) -> dict[str, dict[str, Result]]:
    """The results on captured routes, by the numbers of expert ranks that divide the experts."""
    cases = {}
    for ranks in (2, 4, 8, *RANKS):
        if (found := run_counts(run, ranks, ranks_per_node=per_node)) is None:
            continue
        layout, steps, shape = found
        case = Case(layout, shape, steps, 0.0)
        wanted = {"none": unbalanced, "within nodes": of_reach(Reach(True, layout.slots)), "foremoe": foremoe}
        results = {name: planned(case, plan) for name, plan in wanted.items()}
        if len(steps) > 1:
            results["EPLB, last step"] = eplb_last_step(case)
        cases[f"EP{ranks}"] = {name: each for name, each in results.items() if isinstance(each, Result)}
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="Directory of a run with routes; default: generated skews.")
    parser.add_argument("--out", type=Path, help="Directory for the figures.")
    parser.add_argument("--ranks-per-node", type=int, default=PER_NODE)
    parser.add_argument("--quick", action="store_true", help="A quarter of the micro-batches.")
    given = parser.parse_args()
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    size = Pass(microbatches=4 if given.quick else 16, layers=4)
    if given.run:
        cases = run_cases(given.run, given.ranks_per_node)
    else:
        cases = {
            f"EP{ranks}, {layers} layers": compared(generated(layers, ranks, size, 1 + EVERY))
            for layers in MODELS
            for ranks in RANKS
        }
    for name, results in cases.items():
        table(name, COLUMNS, rows_of(name, results))
    if given.out:
        draw_cases(given.out, cases)
    figures: dict[str, object] = {
        name: {
            planner: {"load": float(np.mean(each.loads)), "ms": 1e3 * each.seconds} for planner, each in results.items()
        }
        for name, results in cases.items()
    }
    if not given.run:
        seconds = {
            f"{layers} layers, 8 micro-batches": {ranks: planning_seconds(layers, ranks, 8) for ranks in RANKS}
            for layers in MODELS
        }
        ages = placement_ages(size)
        table("Table 4: CPU seconds of planning an update pass", ("pass", *(f"EP{ranks}" for ranks in RANKS)),
              ((name, *(f"{each:.3f}" for each in of.values())) for name, of in seconds.items()))  # fmt: skip
        table("Mean load within nodes by steps since a renewal", ("ranks", *map(str, range(5))),
              ((name, *(f"{load:.3f}" for load in loads)) for name, loads in ages.items()))  # fmt: skip
        figures |= {"planning": seconds, "ages": ages}
        if given.out:
            draw_costs(given.out, seconds, ages)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
