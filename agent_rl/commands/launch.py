"""``agent-rl launch slurm``: a batch script that runs a config on the nodes of a Slurm job.

The script is a header, which depends on the config, and ``slurm.sh``, which does not. It requeues itself when the job
is preempted or reaches its time limit; the run resumes from its last checkpoint and its journal.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.errors import UserError

BODY = Path(__file__).with_name("slurm.sh")
_TIME = re.compile(r"(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What the job asks of Slurm.

    ``time``: the limit in Slurm's form. ``nodes``: their number, by default what the config's GPUs need. ``options``:
    more options of sbatch. ``setup``: commands before the run. ``grace``: seconds before the limit at which the run is
    stopped. ``requeues``: how often the job requeues itself.
    """

    time: str
    nodes: int | None = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    grace: int = 300
    requeues: int = 20


def slurm_script(config: RunConfig, arguments: Sequence[str], job: SlurmJob) -> str:
    """The batch script that trains ``config``, given as ``arguments`` of ``agent-rl train`` or ``sft``. Raises
    UserError."""
    nodes = job.nodes or planned_nodes(config)
    _check(config, job, nodes)
    gpus = config.hardware.gpus_per_node if planned_gpus(config) else 0
    options = [
        f"--job-name={config.name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        f"--time={job.time}",
        f"--output={config.name}-%j.log",
        f"--chdir={Path.cwd()}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{job.grace}",
        *job.options,
    ]
    address = ["train.ray_address=auto"] if nodes > 1 else []
    command = [sys.executable, "-m", "agent_rl.cli", "train" if config.sft is None else "sft", *arguments, *address]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in options),
        *job.setup,
        f"python={shlex.quote(sys.executable)}",
        f"ray={shlex.quote(str(Path(sys.executable).with_name('ray')))}",
        f"requeues={job.requeues}",
        f"command=({shlex.join(command)})",
    ]
    return "\n".join(lines) + "\n\n" + BODY.read_text()


def planned_nodes(config: RunConfig) -> int:
    """The nodes that the config's GPUs fill; one for a run on CPUs."""
    return max(1, -(-planned_gpus(config) // config.hardware.gpus_per_node))


def planned_gpus(config: RunConfig) -> int:
    """GPUs of the workers and of the engines that the run starts; 0 where the config plans none."""
    engine = config.engine
    if config.hardware.gpu_memory_gb is None:
        return 0
    engines = 0 if engine.colocate or engine.urls or engine.urls_file else engine.count * engine.gpus
    return config.train.parallel.world_size + engines


def _check(config: RunConfig, job: SlurmJob, nodes: int) -> None:
    if not _TIME.fullmatch(job.time):
        raise UserError(f"--time {job.time}: write it as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
    for option in job.options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(f"--option {option!r}: write an option of sbatch on one line, for example --partition=gpu")
    check_placement(config, nodes)


def check_placement(config: RunConfig, nodes: int) -> None:
    """Raise UserError for a config that does not fit a Ray of its own on ``nodes`` nodes."""
    if config.train.ray_address is not None:
        raise UserError(f"train.ray_address is {config.train.ray_address}: remove it; the job starts its own Ray")
    if nodes > 1 and config.engine.placement == "local" and not (config.engine.urls or config.engine.urls_file):
        raise UserError(f"engine.placement is local and the job has {nodes} nodes: set it to ray, or pass --nodes 1")
