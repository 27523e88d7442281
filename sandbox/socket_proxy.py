"""Runs a command in a sandbox that has no network, with a port on its loopback that leads to a unix socket.

``python3 bridge.py SOCKET PORT COMMAND [ARGUMENT...]``. It ends as the command does. The file is copied into sandboxes:
the standard library alone, and any Python from 3.7 on.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

_CHUNK = 1 << 16


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Hand on what ``source`` sends until it sends no more."""
    with contextlib.suppress(OSError):
        while True:
            data = source.recv(_CHUNK)
            if not data:
                break
            target.sendall(data)
    for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def _carry(client: socket.socket, path: str) -> None:
    """Join ``client`` to the socket at ``path`` until both sides have ended."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the second part of an answer waits 40 ms
    with client, socket.socket(socket.AF_UNIX) as upstream:
        try:
            upstream.connect(path)
        except OSError as error:
            sys.stderr.write(f"bridge: {path}: {error}\n")
            return
        up = threading.Thread(target=_pump, args=(client, upstream), daemon=True)
        up.start()
        _pump(upstream, client)
        up.join()


def _serve(listening: socket.socket, path: str) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=_carry, args=(client, path), daemon=True).start()


def main(path: str, port: int, command: list[str]) -> int:
    """Run ``command`` beside the forwarder and return its exit code."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(64)
    threading.Thread(target=_serve, args=(listening, path), daemon=True).start()
    code = subprocess.call(command)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
