"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, ended by their process ids."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
MISSING = [] if os.geteuid() == 0 else ["root"]
MISSING += [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
ReturnToService=2
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 RealMemory=8000
PartitionName=low Nodes=n[0-1] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=n[0-1] PriorityTier=10 PreemptMode=OFF
"""
"""``cred_expire``: a requeued job waits as long as credentials live, by default 120 s."""
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "REQUEUED")


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    directory: Path

    def call(self, *command: str | Path, cwd: Path | None = None) -> str:
        environment = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """The id of a new job."""
        return self.call("sbatch", "--parsable", *options, script, cwd=script.parent)

    def cancel_all(self) -> None:
        """End every job and its processes, which outlive Slurm's daemons."""
        self.call("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 60
        while self.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)

    def state(self, job: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        fields = self.call("scontrol", "show", "job", "-o", job).split(" ")
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def ended(self, job: str, timeout: float) -> dict[str, str]:
        """The fields of ``job`` when it has ended. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (fields := self.state(job))["JobState"] in ACTIVE:
            if time.monotonic() > deadline:
                raise TimeoutError(fields)
            time.sleep(0.2)
        return fields


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """A cluster with its files in ``directory``, which has a short name. Partition ``high`` preempts ``low``."""
    (directory / "state").mkdir()
    munge = directory / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(secrets.token_bytes(1024))
    (munge / "key").chmod(0o600)
    config = directory / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().split(".")[0], directory=directory, ports=_free_ports()))
    cluster = SlurmCluster(directory)
    path = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    files = {f"--{name}-file": munge / name for name in ("key", "pid", "log", "seed")}
    commands = [
        ["munged", "--force", "--socket", munge / "socket", *(each for pair in files.items() for each in pair)],
        ["slurmctld", "-f", config, "-c"],
        *(["slurmd", "-N", node, "-f", config] for node in ("n0", "n1")),
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=30, env=path)
        deadline = time.monotonic() + 30
        while cluster.call("sinfo", "-h", "-o", "%D", "-t", "idle", "-p", "low") != "2":
            assert time.monotonic() < deadline, cluster.call("sinfo", "-N")
            time.sleep(0.1)
        yield cluster
        cluster.cancel_all()
    finally:
        _end([*directory.glob("slurm*.pid"), munge / "pid"])


def _free_ports() -> list[int]:
    """Three ports, the last two of which follow each other."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            port = second.getsockname()[1]
            try:
                third.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return [first.getsockname()[1], port, port + 1]


def _end(pidfiles: Sequence[Path]) -> None:
    pids = [int(text) for pidfile in pidfiles if pidfile.exists() and (text := pidfile.read_text().strip())]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
