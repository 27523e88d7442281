"""Ray, local or a cluster's: asked before it is trusted, started quietly with modest resources, and stopped with
nothing left."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agent_rl.errors import TrainerError, UserError
from agent_rl.train import ray_leftovers as leftovers

OBJECT_STORE_BYTES = 256 << 20
ANSWER_SECONDS = 10.0
_CLIENT_PORT = 10001


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


@contextmanager
def ray_cluster(address: str | None, *, cpus: int) -> Iterator[None]:
    """Connect to ``address``, or start a Ray of our own that ends with the block. Raises TrainerError.

    The local one has no dashboard, keeps its files in a folder of its own, and its processes die with this one.
    """
    import ray

    if ray.is_initialized():
        raise TrainerError("this process is already connected to Ray: close the other trainer first")
    leftovers.remove_stale()
    with ExitStack() as stack:
        folder = None if address else stack.enter_context(_own_folder())
        stack.callback(_shut_down, folder)
        _init(address, folder, cpus=cpus)
        yield


def _shut_down(folder: Path | None) -> None:
    import ray

    started = leftovers.processes(folder) if folder is not None else set()
    ray.shutdown()
    leftovers.end(started)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for a local Ray, held by this process and watched by a guard."""
    folder = leftovers.make_folder()
    lock = leftovers.hold(folder)
    guard = leftovers.start_guard(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
        guard.wait()


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
        marks = {leftovers.MARK: str(folder), "SPT_NOENV": "1"} if folder else {}
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
