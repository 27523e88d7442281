"""What carries an agent program's requests out of its sandbox."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from pathlib import Path

from sandbox.socket_proxy import _carry

ANSWERS = 20


def answer_in_two_parts(listening: socket.socket) -> None:
    asking, _ = listening.accept()
    with asking:
        for _ in range(ANSWERS):
            asking.recv(1)
            asking.sendall(b"head")
            time.sleep(0.002)  # so that the bridge reads the parts one by one
            asking.sendall(b"body")


def test_the_parts_of_an_answer_are_carried_at_once(tmp_path: Path) -> None:
    """The second part waited 40 ms for the program to acknowledge the first."""
    with closing(socket.socket(socket.AF_UNIX)) as upstream, socket.create_server(("127.0.0.1", 0)) as bridge:
        upstream.bind(str(tmp_path / "gateway"))
        upstream.listen()
        program = socket.create_connection(bridge.getsockname())
        threads = (
            threading.Thread(target=answer_in_two_parts, args=(upstream,)),
            threading.Thread(target=_carry, args=(bridge.accept()[0], str(tmp_path / "gateway"))),
        )
        for thread in threads:
            thread.start()
        with program:
            seconds = sorted(asked(program) for _ in range(ANSWERS))
        for thread in threads:
            thread.join(10)
    assert seconds[5] < 0.03  # a connection's first answers are acknowledged at once


def asked(program: socket.socket) -> float:
    began = time.perf_counter()
    program.sendall(b"?")
    answer = b""
    while len(answer) < len(b"headbody"):
        answer += program.recv(100)
    return time.perf_counter() - began
