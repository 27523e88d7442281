"""How far the trained weights are from those that sampled, by the age of the tokens: from the files of runs.

``python benchmarks/lag_table.py RUN [RUN ...]`` reads what finished steps left (``monitoring.token_detail``; a step
that measured the pass without replay tells both) and prints a row a run and lag: the sampled tokens, and with and
without replay the k3 estimate of the KL to the weights before the step, the mean probability ratio, and the share of
tokens beyond the objective's clip, each with its interval at 95 % (trajectories are drawn, not tokens: those of one are
alike). Runs of one config but for ``engine.pause_mode`` compare its modes; most tokens of a run are as old as its depth
where training is slow enough for sampling to run ahead, which short micro-batches make it::

    for mode in turn in_place; do
      for depth in 1 2 3; do
        agent-rl train configs/quickstart.yaml name=lag-$depth-$mode engine.pause_mode=$mode
        async_rollout.depth=$depth \\
          'train.old_logprob={source: rollout, measure_every: 1}' train.microbatch_tokens=512 eval.tasks=0 \\
          train.steps=16
      done
    done
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from agent_rl.config import Clip
from agent_rl.config.loader import load_config
from agent_rl.rollout.jsonl_zst import read_rows
from agent_rl.rollout.records import arrays_path, read_branch, rows_path, step_stem, steps_on_disk
from agent_rl.rollout.token_details import read_detail
from agent_rl.types import Branch

PASSES = ("r3", "off")


@dataclass
class Tokens:
    """Of each trajectory with tokens of a lag: how many, and by pass the sums of their figures."""

    counts: list[int] = field(default_factory=list)
    sums: dict[str, list[NDArray[np.float64]]] = field(default_factory=lambda: {name: [] for name in PASSES})

    def add(self, gaps: Mapping[str, NDArray[np.float16]], clip: Clip) -> None:
        """The tokens of one trajectory."""
        self.counts.append(len(gaps["r3"]))
        for name, gap in gaps.items():
            self.sums[name].append(figures(gap.astype(np.float64), clip))

    def estimate(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The means of the figures over tokens, and half of each one's interval; not numbers of a pass not taken."""
        counts, sums = np.array(self.counts, np.float64), np.array(self.sums[name])
        if len(sums) != len(counts):
            return np.full(3, np.nan), np.full(3, np.nan)
        mean = sums.sum(axis=0) / counts.sum()
        off = sums - mean * counts[:, None]
        return mean, 1.96 * np.sqrt((off**2).sum(axis=0)) / counts.sum()


def figures(gap: NDArray[np.float64], clip: Clip) -> NDArray[np.float64]:
    """k3, ratio and clipped, added up over tokens with a ``gap`` of log-probs, trainer less engine."""
    ratio = np.exp(gap)
    outside = (ratio < 1 - clip.low) | (ratio > 1 + clip.high)
    return np.array([(ratio - 1 - gap).sum(), ratio.sum(), outside.sum()])


def by_lag(run: Path) -> dict[int, Tokens]:
    """The trained tokens of a run's first branches."""
    clip, found = load_config(run / "config.yaml").train.clip, defaultdict[int, Tokens](Tokens)
    for step in steps_on_disk(run):
        for number, branch in branches(run, step):
            detail = read_detail(step_stem(run, step), number)
            if detail is None:
                continue
            gaps = {"r3": detail.gap} | (
                {} if detail.gap_without_replay is None else {"off": detail.gap_without_replay}
            )
            lags = step - 1 - versions(branch)
            for lag in np.unique(lags).tolist():
                found[lag].add({name: gap[lags == lag] for name, gap in gaps.items()}, clip)
    return dict(sorted(found.items()))


def branches(run: Path, step: int) -> Iterator[tuple[int, Branch]]:
    """The first branch of every trajectory of ``step``, by its number."""
    path = rows_path(step_stem(run, step))
    with safe_open(arrays_path(path), framework="numpy") as tensors:
        for number, row in enumerate(read_rows(path)):
            yield number, read_branch(row, 0, tensors.get_tensor, routes=False)


def versions(branch: Branch) -> NDArray[np.int64]:
    """Of every sampled token, the number of the step whose weights sampled it."""
    numbers = np.full(len(branch.tokens), -1)
    for span in branch.versions:
        numbers[span.start : span.stop] = int(span.version)
    return numbers[branch.loss_mask]


def main(runs: Sequence[Path]) -> None:
    print("| run | lag | tokens | replay | k3, nats | mean ratio | beyond the clip |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        for lag, tokens in by_lag(run).items():
            for name in PASSES:
                (k3, ratio, clipped), (k3_off, ratio_off, clipped_off) = tokens.estimate(name)
                print(
                    f"| {run.name} | {lag} | {sum(tokens.counts):,} | {name} | {k3:.2e} ± {k3_off:.1e} | "
                    f"{ratio:.5f} ± {ratio_off:.5f} | {100 * clipped:.3f} ± {100 * clipped_off:.3f} % |"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    main(parser.parse_args().runs)
