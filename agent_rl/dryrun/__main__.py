"""The process of one dry-run rank: reads a job from standard input, writes a record as the last line of its output."""

from __future__ import annotations

import sys

from agent_rl.dryrun.fake_device import load_device_guard
from agent_rl.dryrun.job import RankJob
from agent_rl.planner.hardware import GPUS
from agent_rl.utils.imports import quick_imports


def main() -> None:
    job = RankJob.load(sys.stdin.buffer.read())
    load_device_guard(job.library)
    with quick_imports():
        from agent_rl.dryrun.rank import RankEnvironment, dry_run_rank  # imports torch

    record = dry_run_rank(job, RankEnvironment.install(GPUS[job.config.hardware.gpu]))
    sys.stdout.buffer.write(b"\n" + record.dump() + b"\n")


if __name__ == "__main__":
    main()
