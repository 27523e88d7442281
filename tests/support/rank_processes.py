"""Ranks of a test world, each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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
    seconds: float = 280.0,
) -> None:
    """Runs ``count`` processes of ``script RANK ARGUMENTS...``; fails if one fails or all take longer than ``seconds``.

    The first inherits the sockets ``held``, which are closed at the end. ``inside``: a command that runs each process.
    """
    command, rest = [*inside, sys.executable, "-W", "ignore", str(script)], [str(argument) for argument in arguments]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    passed = [holder.fileno() for holder in held]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *rest], stderr=subprocess.PIPE, env=path, pass_fds=() if rank else passed
        )
        for rank in range(count)
    ]
    try:
        errors = [rank.communicate(timeout=seconds)[1].decode()[-3000:] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), "\n".join(errors)
    finally:
        for rank in ranks:
            rank.kill()
        for holder in held:
            holder.close()
