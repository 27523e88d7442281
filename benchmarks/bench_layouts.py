"""How far every parallel layout is from one rank, and what sharing the optimizer out saves.

A tiny model is trained on the same micro-batches by one rank and by ``--ranks`` processes in each layout, with replay.
The table has the largest absolute difference of any number (of the gradient norm, relative), and the optimizer state
that a rank holds over what one rank alone holds: rows of one layout differ by whether it is shared out.

    python benchmarks/bench_layouts.py              # two ranks
    python benchmarks/bench_layouts.py --ranks 4    # layouts combined
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent_rl.config import ParallelConfig
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from agent_rl.train.parallel_checks import uses_distributed_optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "megatron"))
import layout_matrix as matrix
import megatron_tiny as tiny

SHARED_OVER_WHOLE = (
    ("data-optimizer", "data"),
    ("expert-optimizer", "expert"),
    ("context-optimizer", "context"),
    ("tensor-optimizer", "tensor-alone"),
)
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "data-expert-optimizer": {"expert": 2, **matrix.SHARED},
    "expert-allgather-optimizer": {"expert": 4, "dispatcher": "allgather", **matrix.SHARED},
    "tensor-pipeline": {"tensor": 2, "pipeline": 2},
    "tensor-data-optimizer": {"tensor": 2, "expert": 2, **matrix.SHARED},
    "tensor-context": {"tensor": 2, "context": 2, "expert": 4},
    "tensor-context-alone": {"tensor": 2, "context": 2, **matrix.SHARED},
    "context-expert-data": {"context": 2, "expert": 2, **matrix.SHARED},
    "context-pipeline": {"context": 2, "pipeline": 2, **matrix.SHARED},
    "pipeline-expert-optimizer": {"pipeline": 2, "expert": 2, **matrix.SHARED},
    "virtual-data-optimizer": {"pipeline": 2, "virtual_pipeline": 2, **matrix.SHARED},
}
"""``train.parallel`` of four ranks."""
KINDS = ("loss", "logprobs", "gradients", "grad_norm", "weights")


def four_rank_cases() -> list[tuple[str, str]]:
    """A model with experts, with and without recomputation; one without where the layout allows it."""
    return [
        (name, run)
        for name, parallel in FOUR_RANKS.items()
        for run in ("none", "full") + (() if "expert" in parallel else ("dense",))
    ]


def described(parallel: dict[str, Any], world_size: int) -> str:
    """A layout as a table says it."""
    short = {"tensor": "TP", "expert": "EP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP"}
    said = [f"{short[key]}{value}" for key, value in parallel.items() if key in short]
    said += [str(parallel["dispatcher"])] if "dispatcher" in parallel else []
    data = world_size // math.prod(parallel.get(key, 1) for key in ("tensor", "pipeline", "context"))
    said = [f"DP{data}"] * (data > 1) + said
    shared = uses_distributed_optimizer(ParallelConfig(world_size=world_size, **parallel))
    return " ".join(said) + ", optimizer shared" * shared


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--only", default="", help="Layouts whose name holds this.")
    world_size, only = (arguments := parser.parse_args()).ranks, arguments.only
    layouts = {
        name: parallel
        for name, parallel in (matrix.TWO_RANKS if world_size == 2 else FOUR_RANKS).items()
        if only in name
    }
    every = matrix.two_rank_cases() if world_size == 2 else four_rank_cases()
    cases = [(layout, run) for layout, run in every if layout in layouts]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch)
        models = matrix.directories(results)
        matrix.launch(world_size, layouts, cases, models, results, seconds=3600.0)
        device = torch.device("cpu")
        world = init_parallel(
            ParallelConfig(), 0, master_addr="127.0.0.1", master_port=tiny.free_port(), device=device
        )  # fmt: skip
        alone = matrix.alone(sorted({run for _, run in cases}), models, world)
        destroy_parallel()
        sizes: dict[tuple[str, str], float] = {}
        print(f"largest difference from one rank, {world_size} ranks\n")
        print(f"| layout | run | {' | '.join(KINDS)} | optimizer state of a rank | restores |")
        print("|---" * (len(KINDS) + 4) + "|")
        for layout, run in cases:
            ranks = matrix.loaded(results, f"{layout}-{run}", world_size)
            apart = matrix.differences(ranks, alone[run])
            figures = [f"{apart[kind]:.1e}" if kind in apart else "" for kind in KINDS]
            held = max(rank["state_numel"] for rank in ranks) / alone[run]["state_numel"]
            wrong = [line for rank in ranks for line in rank.get("wrong", []) + rank.get("restored", [])]
            restores = ("no: " + wrong[0] if wrong else "exactly") if "restored" in ranks[0] else ""
            sizes[layout, run] = held
            row = [described(layouts[layout], world_size), run, *figures, f"{held:.3f}", restores]
            print("| " + " | ".join(row) + " |", flush=True)
        for on, off in SHARED_OVER_WHOLE:
            if (on, "none") in sizes and (off, "none") in sizes:
                ratio = sizes[on, "none"] / sizes[off, "none"]
                print(f"optimizer state a rank holds, shared out over not, {off}: {ratio:.3f}")


if __name__ == "__main__":
    main()
