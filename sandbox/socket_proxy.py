"""Runs a command with a loopback port that forwards to a unix socket, in a sandbox without network.

Usage: ``python3 socket_proxy.py SOCKET PORT COMMAND [ARGUMENT...]``. It exits with the exit code of the command. The
file is copied into sandboxes, so it uses only the standard library and supports Python 3.7 and newer.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

_CHUNK = 1 << 16


def _copy_stream(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes from ``source`` to ``target`` until the end of the stream."""
    with contextlib.suppress(OSError):
        while True:
            data = source.recv(_CHUNK)
            if not data:
                break
            target.sendall(data)
    for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def forward(client: socket.socket, path: str) -> None:
    """Connect ``client`` to the unix socket at ``path`` until both directions have ended."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the second part of a response waits 40 ms
    with client, socket.socket(socket.AF_UNIX) as upstream:
        try:
            upstream.connect(path)
        except OSError as error:
            sys.stderr.write(f"socket_proxy: {path}: {error}\n")
            return
        up = threading.Thread(target=_copy_stream, args=(client, upstream), daemon=True)
        up.start()
        _copy_stream(upstream, client)
        up.join()


def _serve(listening: socket.socket, path: str) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=forward, args=(client, path), daemon=True).start()


def main(path: str, port: int, command: list[str]) -> int:
    """Forward ``port`` to the unix socket ``path`` while ``command`` runs; return its exit code."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(64)
    threading.Thread(target=_serve, args=(listening, path), daemon=True).start()
    code = subprocess.call(command)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
