"""Further Ray nodes on this machine, for tests and benchmarks of what runs on several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_SECONDS = 120.0
_STORE_BYTES = 100 << 20
_MARK = "AGENT_RL_TEST_NODE"
# A local Ray is on loopback; `ray start` would replace 127.0.0.1 by an address that other machines reach.
_START = (
    "from ray._private import services; services.resolve_ip_for_localhost = str; "
    "from ray.scripts.scripts import main; main()"
)


def driver_environment() -> dict[str, str]:
    """The variables with which another process may connect to the Ray of this process."""
    from ray._raylet import AuthenticationTokenLoader

    token = AuthenticationTokenLoader.instance().get_raw_token()
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextmanager
def ray_node(
    name: str, *, sandboxes: int = 0, cpus: int = 0, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """One more node of the Ray that this process is connected to; its process, which ends with the block.

    ``sandboxes``, ``cpus``: how many of the resources of these names it declares. ``environment`` is added to this
    process's.
    """
    import ray

    command = [sys.executable, "-c", _START, "start", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--node-name={name}", f"--num-cpus={cpus}"]
    command += [f"--address={ray.get_runtime_context().gcs_address}", f"--object-store-memory={_STORE_BYTES}"]
    command += [f'--resources={{"sandboxes": {sandboxes}}}'] if sandboxes else []
    whole = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", _MARK: f"{os.getpid()}-{name}", **driver_environment()}
    whole |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=whole)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not any(node["Alive"] and node["NodeName"] == name for node in ray.nodes()):
            assert process.poll() is None, f"the Ray node {name} did not start"
            assert time.monotonic() < deadline, f"the Ray node {name} did not join"
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait()


def kill_node(name: str) -> None:
    """End all processes of a node that this process started, as a machine that goes down would."""
    mark = f"{_MARK}={os.getpid()}-{name}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
