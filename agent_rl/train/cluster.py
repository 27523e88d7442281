"""Ray, local or a cluster's: started quietly with modest resources, and stopped with nothing left. Imports ray."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from agent_rl.errors import TrainerError, UserError

OBJECT_STORE_BYTES = 256 << 20
STOP_SECONDS = 10.0
ANSWER_SECONDS = 10.0
_FOLDER = "agent-rl-ray-"
_MARK = "AGENT_RL_RAY_FOLDER"
_LOCK = "owner.lock"


@contextmanager
def ray_cluster(address: str | None, *, cpus: int) -> Iterator[None]:
    """Connect to ``address``, or start a Ray of our own that ends with the block. Raises TrainerError.

    The local one has no dashboard, keeps its files in a folder of its own, and its processes die with this one.
    """
    import ray

    if ray.is_initialized():
        raise TrainerError("this process is already connected to Ray: close the other trainer first")
    _remove_stale()
    folder = None if address else Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    lock = _hold(folder) if folder is not None else None
    try:
        _init(address, folder, cpus=cpus)
        yield
    finally:
        mine = _processes(folder) if folder is not None else set()
        ray.shutdown()
        _end(mine)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


async def check_ray(address: str, *, seconds: float = ANSWER_SECONDS) -> None:
    """Raises UserError where nothing listens at ``address`` (``HOST:PORT`` or ``ray://HOST:PORT``): Ray itself would go
    on asking for ten minutes. ``auto`` is looked up by Ray."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"train.ray_address: {address}: write it as HOST:PORT")
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, UnicodeError) as error:  # a timeout is an OSError too
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"no answer within {seconds:g} s"
        raise UserError(
            f"train.ray_address: {address}: {reason}; start a cluster there (`ray start --head`), mend the address, or "
            "leave the key out for a local Ray"
        ) from None
    writer.close()


def _hold(folder: Path) -> IO[bytes]:
    """Lock ``folder`` for as long as this process lives. (A process id tells less: it may be another's by now.)"""
    lock = (folder / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _is_stale(folder: Path) -> bool:
    """Whether the owner of ``folder`` is dead."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held by its living owner, or just being made
    return True


def _init(address: str | None, folder: Path | None, *, cpus: int) -> None:
    import ray

    # GNU OpenMP's threads spin while they wait; beside another busy process that made a rank 10 to 30 times slower.
    variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    local = {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": str(folder),
    }
    try:
        # Ray's processes rename themselves; SPT_NOENV keeps that from overwriting the environment that tells them.
        marks = {_MARK: str(folder), "SPT_NOENV": "1"} if folder else {}
        with _environment(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", **variables, **marks):
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({"runtime_env": {"env_vars": variables}} if address else local),
            )
    except Exception as error:  # Ray raises a bare one where a busy machine takes more than 30 s to start it
        where = f"the Ray cluster at {address}" if address else "a local Ray"
        raise TrainerError(f"{where} could not be reached: {str(error).splitlines()[0]}") from error


def _processes(folder: Path) -> set[int]:
    """The processes of the local Ray in ``folder``: all inherited its mark. (Some rename themselves, and some outlive
    their parents, so neither command lines nor parents tell.)"""
    mark = f"{_MARK}={folder}".encode()
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is another user's
    return found - {os.getpid()}


def _end(processes: set[int]) -> None:
    """Wait until they have ended, as Ray has told them to; kill what is left when the time is up."""
    deadline = time.monotonic() + STOP_SECONDS
    while left := {pid for pid in processes if Path(f"/proc/{pid}").exists()}:
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def _remove_stale() -> None:
    """End the local Rays whose owner was killed before it could, and remove their folders.

    Most of Ray's processes die with their owner; its agents were seen to live on for minutes.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        if _is_stale(folder):
            for pid in _processes(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables that only Ray's processes read, while they are started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
