"""A matrix of training runs: settings by seeds, each an `agent-rl train` of its own, one after another.

    python benchmarks/run_matrix.py configs/paper-small.yaml [--settings off r3 ...] [--seeds 0 1 2] [--minutes 600]
        [section.key=value ...]

Prints the command of every run before it starts it, so each can be made again alone. A run that has its summary is left
out, and one that was stopped goes on from its checkpoint: start the same command again. Seed after seed, so that all
settings have as many runs whenever it is stopped. The six settings of the paper are the default; the others are
KwaiKAT's sources of old log-probs, and the ablations of docs/research/paper-small.md. After ``--minutes`` the run under
way is stopped (it resumes), and so it is by Ctrl-C and SIGTERM. Last, the command that draws the runs. Exit code 1: not
all runs have ended.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from agent_rl.config import Ablation, RunConfig
from agent_rl.config.loader import load_config

_AHEAD = ("async_rollout.depth=2", "train.old_logprob.source=rollout", "train.old_logprob.measure_every=1")
SETTINGS: dict[str, tuple[str, ...]] = {
    "off": ("train.replay=off",),
    "r2": ("train.replay=r2",),
    "r3": ("train.replay=r3",),
    "tis": ("train.replay=off", "train.correction.weight=token"),
    "gspo": ("train.replay=off", "train.objective=gspo"),
    "gspo-r3": ("train.replay=r3", "train.objective=gspo"),
}
"""What each setting changes of the config."""
SOURCES: dict[str, tuple[str, ...]] = {
    source: ("train.replay=off", f"train.old_logprob={{source: {source}, measure_every: 1}}")
    for source in ("rollout", "rescore")
}
"""KwaiKAT's other sources of old log-probs; its comparison is ``off tis r3 rollout rescore``. The figures show the
mismatch of every step, which changes no update."""
ABLATIONS: dict[str, tuple[str, ...]] = {
    name.replace("_", "-"): ("train.replay=r3", f"r3.ablation={name}")
    for name in get_args(Ablation)
    if name not in ("none", "fresh_only")
} | {
    "fresh-only": ("train.replay=r3", "r3.ablation=fresh_only", *_AHEAD),
    "ahead": ("train.replay=r3", *_AHEAD),
}
"""What a fault in the routes' way would cost; ``ahead`` is what ``fresh-only`` is compared with."""
STOP_SECONDS = 120.0
"""What a run may take to stop; then it is killed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of every run")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS | SOURCES | ABLATIONS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=600.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + 60 * options.minutes
    made = []
    for seed in options.seeds:
        for setting in options.settings:
            overrides = overrides_of(options.config, setting, seed, options.overrides)
            run = load_config(options.config, overrides).run_dir
            made.append(run)
            if not (run / "summary.json").exists() and not train([str(options.config), *overrides], deadline):
                finish(made)
                sys.exit(1)
    finish(made)


def overrides_of(config: Path, setting: str, seed: int, common: Sequence[str]) -> list[str]:
    """What the run of a setting and a seed overrides; its name has both, and how many updates a step makes."""
    changed: RunConfig = load_config(config, common)
    name = f"{changed.name}-{setting}-{changed.train.mini_steps}-{seed}"
    return [*common, *(SETTINGS | SOURCES | ABLATIONS)[setting], f"name={name}", f"seed={seed}"]


def train(arguments: Sequence[str], deadline: float) -> bool:
    """Run to the end; False where it failed or the time was over, and what is left may go on later."""
    print(f"$ agent-rl train {shlex.join(arguments)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "agent_rl.cli", "train", *arguments]) as process:
        try:
            return process.wait(max(0.0, deadline - time.monotonic())) == 0
        except (subprocess.TimeoutExpired, SystemExit):
            process.terminate()
        except KeyboardInterrupt:
            pass  # the run has it from the terminal, too
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        return False


def finish(runs: Sequence[Path]) -> None:
    """Print the command that draws the runs that have made a step."""
    if directories := shlex.join(str(run) for run in runs if (run / "metrics.jsonl").exists()):
        print(f"$ python benchmarks/paper_figures.py {directories} --out {runs[0].parent / 'figures'}")


if __name__ == "__main__":
    main()
