"""Ranks of a test world, each a process of its own. They are forks of one process that has imported their modules."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_rl.utils.imports import quick_imports


def reserved_port() -> socket.socket:
    """A socket on a free port of the loopback, which stays reserved while the socket is open."""
    return socket.create_server(("127.0.0.1", 0))


def place_of(holder: socket.socket) -> tuple[int, int]:
    """The port and the file descriptor of a reserved port, as a worker expects them."""
    return holder.getsockname()[1], holder.fileno()


def run_ranks(
    script: str | Path,
    count: int,
    arguments: Sequence[object],
    *,
    held: Sequence[socket.socket] = (),
    inside: Sequence[str] = (),
    megatron: bool = False,
    seconds: float = 280.0,
) -> None:
    """Runs ``count`` processes of ``script RANK ARGUMENTS...``; fails if one fails or all take longer than ``seconds``.

    The first inherits the sockets ``held``, which are closed at the end. ``inside``: a command that runs each process.
    ``megatron``: the ranks use the Megatron model on a CPU.
    """
    groups = [[rank] for rank in range(count)] if inside else [list(range(count))]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    passed = [holder.fileno() for holder in held]
    processes = []
    for ranks in groups:
        options = [str(script), ",".join(map(str, ranks)), ",".join(map(str, passed)), str(int(megatron))]
        command = [*inside, sys.executable, "-W", "ignore", __file__, *options, *map(str, arguments)]
        processes.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, env=path, pass_fds=passed, start_new_session=True)
        )
    try:
        errors = [process.communicate(timeout=seconds)[1].decode()[-3000 * count :] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(errors)
    finally:
        for process in processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        for holder in held:
            holder.close()


def main() -> None:
    """Arguments: script, ranks, held file descriptors, whether to import Megatron, arguments of the script."""
    script, ranks, held, megatron, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    with quick_imports():
        runpy.run_path(script, run_name="imports_only")
        if megatron == "1":
            from agent_rl.train.megatron.cpu import install_cpu_shim

            install_cpu_shim()
            importlib.import_module("agent_rl.train.megatron.model")
    children = []
    for rank in ranks.split(","):
        if (child := os.fork()) == 0:
            if rank != "0":
                _close(held)
            sys.argv = [script, rank, *arguments]
            runpy.run_path(script, run_name="__main__")
            return
        children.append(child)
    _close(held)
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))


def _close(held: str) -> None:
    for descriptor in filter(None, held.split(",")):
        os.close(int(descriptor))


if __name__ == "__main__":
    main()
