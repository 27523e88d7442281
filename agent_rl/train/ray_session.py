"""Connections to Ray, local or on a cluster: check the address, start quietly with few resources, stop completely.

A process has one connection to Ray. :func:`ray_session` opens and closes it; sessions inside another one share it.

A local Ray listens on loopback only and refuses every call without its random token. Ray's token mode is off by
default, and a server of Ray runs any code for any caller. A cluster has the mode and the token of its own environment
(``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN`` or ``RAY_AUTH_TOKEN_PATH``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from agent_rl.errors import TrainerError, UserError
from agent_rl.train import ray_leftovers as leftovers
from agent_rl.utils.concurrency import restore_sigterm, shielded

MIN_STORE_BYTES = 256 << 20
RESPONSE_SECONDS = 10.0
_CLIENT_PORT = 10001
_SHARED_MEMORY = Path("/dev/shm")
_UNUSED_SERVERS = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's node that start the job API, log streaming and the autoscaler, each in a process of its own: about
half of the CPU time of a local Ray's start."""
_STORE_SHARE = 4
"""The share of free shared memory that a local Ray's object store may use: 1 / 4."""


async def check_ray(address: str, *, seconds: float = RESPONSE_SECONDS) -> None:
    """Check that ``train.ray_address`` accepts a TCP connection. Raises UserError where it does not within ``seconds``.

    Ray itself would retry for ten minutes and ignore Ctrl-C and SIGTERM. "local" starts a Ray, so nothing is checked;
    "auto" is the Ray on this node or in ``RAY_ADDRESS``; "ray://HOST:PORT" is a Ray client server.
    """
    if address == "local":
        return
    target = await asyncio.to_thread(_auto_address) if address == "auto" else address
    host, port = _host_and_port(address, target)
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError) as error:  # a timeout is an OSError too
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else f"no response within {seconds:g} s"
        )
        where = address if target == address else f"{address}, {target}"
        raise UserError(
            f"train.ray_address: {where}: {reason}; start a cluster there (`ray start --head`), correct the address, "
            "or omit the key for a local Ray"
        ) from None
    writer.close()


def _auto_address() -> str:
    """The address that ray.init finds for "auto"."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        address = None
    if address is None:
        raise UserError(
            "train.ray_address: auto: no Ray runs on this machine and RAY_ADDRESS is not set; start one with "
            "`ray start --head`, or omit the key for a local Ray"
        )
    return str(address)


def _host_and_port(address: str, target: str) -> tuple[str, int]:
    parts = urlsplit(target if "://" in target else f"//{target}")
    try:
        host, port = parts.hostname, parts.port or (_CLIENT_PORT if parts.scheme == "ray" else None)
    except ValueError:  # not a port number
        host, port = None, None
    if not host or not port or parts.scheme not in ("", "ray"):
        raise UserError(f"train.ray_address: {address}: write it as HOST:PORT, ray://HOST:PORT or auto")
    return host, port


@asynccontextmanager
async def ray_session(address: str | None, *, cpus: int) -> AsyncIterator[None]:
    """Connect as :func:`ray_cluster` after checking ``address``, without blocking the event loop. Raises UserError or
    TrainerError. Inside another session it uses that connection and ignores both arguments.
    """
    if find_spec("ray") is None:
        raise UserError(
            "Ray is not installed, and the trainer and sandbox.placement=ray need it: run `agent-rl install trainer`"
        )
    if address is not None and not is_connected():
        await check_ray(address)
    stack = ExitStack()
    try:
        # Shielded: after a cancelled start a thread would go on to start processes without an owner.
        await shielded(asyncio.to_thread(stack.enter_context, ray_cluster(address, cpus=cpus)))
        restore_sigterm()
        yield
    finally:
        await shielded(asyncio.to_thread(stack.close))


def is_connected() -> bool:
    """Whether this process has a connection to Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def object_store_bytes() -> int:
    """Bytes that a local Ray's object store may use. Memory is taken as objects arrive; more objects spill to disk."""
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    return max(MIN_STORE_BYTES, free // _STORE_SHARE)


@contextmanager
def ray_cluster(address: str | None, *, cpus: int) -> Iterator[None]:
    """Connect to ``address``, or start a local Ray that ends with the block. Raises TrainerError.

    The local Ray has no dashboard, job API or autoscaler. It has its own directory, and its processes die with this
    one. It is closed to other machines and users (:mod:`agent_rl.train.ray_session`). An existing connection is used
    and left open.
    """
    if is_connected():
        yield
        return
    leftovers.remove_stale()
    with ExitStack() as stack:
        # One thread per session: Ray's processes die with the thread that started them, so it must live as long as the
        # session. A thread that outlived it would reuse object ids in the next session, which count from 1.
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
    """A directory for a local Ray, locked by this process and watched by a guard."""
    directory = leftovers.make_dir()
    lock = leftovers.lock_dir(directory)
    guard = leftovers.start_guard(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
        guard.wait()


def _init(address: str | None, directory: Path | None, *, cpus: int) -> None:
    import ray

    # Waiting threads of GNU OpenMP spin, which made a worker 10 to 30 times slower beside another busy process.
    variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    local = {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": object_store_bytes(),
        # Ray makes its directory writable for everyone; the one around it is this user's.
        "_temp_dir": f"{directory}/r",
    }
    try:
        # Ray's processes rename themselves; SPT_NOENV keeps the renaming from overwriting their environment.
        marks = {leftovers.MARK: str(directory), "SPT_NOENV": "1", **new_token()} if directory else {}
        # Ray's default niceness of 15 would slow sandbox commands and workers beside any other process.
        marks["RAY_worker_niceness"] = str(os.nice(0))
        marks |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        with _environment(**variables, **marks), _small_and_on_loopback() if directory else nullcontext():
            read_token()
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({"runtime_env": {"env_vars": variables}} if address else local),
            )
    except Exception as error:  # Ray raises Exception itself if the start takes over 30 s
        where = f"the Ray cluster at {address}" if address else "a local Ray"
        hint = "" if address is None or requires_token() else "; does it require a token (RAY_AUTH_MODE=token)?"
        raise TrainerError(f"{where} could not be reached: {str(error).splitlines()[0]}{hint}") from error


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables while Ray's processes start."""
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


def new_token() -> dict[str, str]:
    """The environment variables of a local Ray with a new token. Its processes inherit them; no command line has
    them."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def requires_token() -> bool:
    """Whether this process's environment has Ray's token mode. A cluster without it accepts every client."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def read_token() -> None:
    """Read mode and token from the environment. Ray reads them once in a process, and keeps those of a session before.
    The connection that is opened next keeps them."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # missing in Ray's types

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _small_and_on_loopback() -> Iterator[None]:
    """A Ray that starts within the block has no server that a local one does not use. It has the node address
    127.0.0.1, and all of its servers listen only there. (Ray replaces the argument ``_node_ip_address="127.0.0.1"`` by
    an address that other machines reach.)"""
    from ray._private import ray_constants
    from ray._private.node import Node

    def start_nothing(node: Node, **options: object) -> None: ...

    changes: list[tuple[object, str, object]] = [(Node, name, start_nothing) for name in _UNUSED_SERVERS]
    changes.append((ray_constants, "ENABLE_RAY_CLUSTER", False))
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
