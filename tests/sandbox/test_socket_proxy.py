"""The socket proxy that forwards an agent program's requests out of its sandbox."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from pathlib import Path

from sandbox.socket_proxy import forward

RESPONSES = 20


def respond_in_two_parts(listening: socket.socket) -> None:
    asking, _ = listening.accept()
    with asking:
        for _ in range(RESPONSES):
            asking.recv(1)
            asking.sendall(b"head")
            time.sleep(0.002)  # so that the proxy reads the parts one by one
            asking.sendall(b"body")


def test_parts_of_a_response_are_forwarded_at_once(tmp_path: Path) -> None:
    """Without TCP_NODELAY, the second part waits 40 ms for an acknowledgement of the first."""
    with closing(socket.socket(socket.AF_UNIX)) as upstream, socket.create_server(("127.0.0.1", 0)) as bridge:
        upstream.bind(str(tmp_path / "endpoint"))
        upstream.listen()
        program = socket.create_connection(bridge.getsockname())
        threads = (
            threading.Thread(target=respond_in_two_parts, args=(upstream,)),
            threading.Thread(target=forward, args=(bridge.accept()[0], str(tmp_path / "endpoint"))),
        )
        for thread in threads:
            thread.start()
        with program:
            seconds = sorted(request_seconds(program) for _ in range(RESPONSES))
        for thread in threads:
            thread.join(10)
    assert seconds[5] < 0.03  # a connection's first answers are acknowledged at once


def request_seconds(program: socket.socket) -> float:
    began = time.perf_counter()
    program.sendall(b"?")
    response = b""
    while len(response) < len(b"headbody"):
        response += program.recv(100)
    return time.perf_counter() - began
