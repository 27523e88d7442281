"""Ray, local or a cluster's: asked before it is trusted, started quietly with modest resources, and stopped with
nothing left.

A process has one connection to Ray. Whoever needs Ray enters :func:`ray_session`: the first opens the connection and
ends it, all within use it too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from agent_rl.errors import TrainerError, UserError
from agent_rl.train import ray_leftovers as leftovers
from agent_rl.utils.concurrency import shielded

LEAST_STORE_BYTES = 256 << 20
ANSWER_SECONDS = 10.0
_CLIENT_PORT = 10001
_SHARED_MEMORY = Path("/dev/shm")
_STORE_SHARE = 4
"""A local Ray's object store may take one part in so many of what is free of the shared memory."""


async def check_ray(address: str, *, seconds: float = ANSWER_SECONDS) -> None:
    """Ask ``train.ray_address`` for a TCP connection. Raises UserError where none comes within ``seconds``.

    Ray itself would go on asking for ten minutes, deaf to Ctrl-C and SIGTERM. "local" starts a Ray, so nothing is
    asked; "auto" is the Ray on this machine or in ``RAY_ADDRESS``; "ray://HOST:PORT" is a Ray client server.
    """
    if address == "local":
        return
    target = await asyncio.to_thread(_found_by_ray) if address == "auto" else address
    host, port = _host_and_port(address, target)
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError) as error:  # a timeout is an OSError too
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"no answer within {seconds:g} s"
        where = address if target == address else f"{address}, {target}"
        raise UserError(
            f"train.ray_address: {where}: {reason}; start a cluster there (`ray start --head`), mend the address, or "
            "leave the key out for a local Ray"
        ) from None
    writer.close()


def _found_by_ray() -> str:
    """The address that ray.init would take for "auto"."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        address = None
    if address is None:
        raise UserError(
            "train.ray_address: auto: no Ray runs on this machine and RAY_ADDRESS is not set; start one with "
            "`ray start --head`, or leave the key out for a local Ray"
        )
    return str(address)


def _host_and_port(address: str, target: str) -> tuple[str, int]:
    parts = urlsplit(target if "://" in target else f"//{target}")
    try:
        host, port = parts.hostname, parts.port or (_CLIENT_PORT if parts.scheme == "ray" else None)
    except ValueError:  # no number, or none of a port
        host, port = None, None
    if not host or not port or parts.scheme not in ("", "ray"):
        raise UserError(f"train.ray_address: {address}: write it as HOST:PORT, ray://HOST:PORT or auto")
    return host, port


@asynccontextmanager
async def ray_session(address: str | None, *, cpus: int) -> AsyncIterator[None]:
    """As :func:`ray_cluster`, once ``address`` answers; other tasks go on meanwhile. Raises UserError or TrainerError.

    Within another session this is the same connection, whatever ``address`` and ``cpus`` are.
    """
    if find_spec("ray") is None:
        raise UserError(
            "Ray is not installed, which sandbox.placement=ray and the trainer need; `agent-rl install trainer` "
            "installs it"
        )
    if address is not None and not is_connected():
        await check_ray(address)
    stack = ExitStack()
    try:
        # Shielded: a cancelled start must not leave behind a thread that starts processes nobody owns.
        await shielded(asyncio.to_thread(stack.enter_context, ray_cluster(address, cpus=cpus)))
        yield
    finally:
        await shielded(asyncio.to_thread(stack.close))


def is_connected() -> bool:
    """Whether this process is within a session."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def object_store_bytes() -> int:
    """How much a local Ray's object store may hold; memory is taken as objects come, and more is spilled to disk."""
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    return max(LEAST_STORE_BYTES, free // _STORE_SHARE)


@contextmanager
def ray_cluster(address: str | None, *, cpus: int) -> Iterator[None]:
    """Connect to ``address``, or start a Ray of our own that ends with the block. Raises TrainerError.

    The local one has no dashboard, keeps its files in a directory of its own, and its processes die with this one.
    Where this process is connected already, that connection is used, and left as it is.
    """
    if is_connected():
        yield
        return
    leftovers.remove_stale()
    with ExitStack() as stack:
        # The thread that starts Ray puts objects under the driver's own ids, counted from 1 in each session, as long as
        # it lives: one that outlived a session would put into the next under ids that are given out there again. It
        # must not end sooner either, for Ray's processes die with the thread that started them.
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ray-session"))
        directory = None if address else stack.enter_context(_temp_dir())
        stack.callback(lambda: thread.submit(_shut_down, directory).result())
        thread.submit(_init, address, directory, cpus=cpus).result()
        yield


def _shut_down(directory: Path | None) -> None:
    import ray

    started = leftovers.processes(directory) if directory is not None else set()
    ray.shutdown()
    leftovers.end(started)


@contextmanager
def _temp_dir() -> Iterator[Path]:
    """A directory for a local Ray, held by this process and watched by a guard."""
    directory = leftovers.make_dir()
    lock = leftovers.hold(directory)
    guard = leftovers.start_guard(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
        guard.wait()


def _init(address: str | None, directory: Path | None, *, cpus: int) -> None:
    import ray

    # GNU OpenMP's threads spin while they wait; beside another busy process that made a rank 10 to 30 times slower.
    variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    local = {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": object_store_bytes(),
        "_temp_dir": str(directory),
    }
    try:
        # Ray's processes rename themselves; SPT_NOENV keeps that from overwriting the environment that tells them.
        marks = {leftovers.MARK: str(directory), "SPT_NOENV": "1"} if directory else {}
        # Ray's own is 15: beside anything else on the machine, the commands of sandboxes and the ranks would wait
        # for it.
        marks["RAY_worker_niceness"] = str(os.nice(0))
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
