"""The process of one rehearsed rank: a job on its standard input, a record as the last line of its standard output."""

from __future__ import annotations

import sys

from agent_rl.dryrun.fake_device import load_guard
from agent_rl.dryrun.job import RankJob
from agent_rl.planner.hardware import GPUS


def main() -> None:
    job = RankJob.load(sys.stdin.buffer.read())
    load_guard(job.library)
    from agent_rl.dryrun.rank import Stage, rehearse  # imports torch

    record = rehearse(job, Stage.set_up(GPUS[job.config.hardware.gpu]))
    sys.stdout.buffer.write(b"\n" + record.dump() + b"\n")


if __name__ == "__main__":
    main()
