"""torch's rendezvous stores have no key: what a process of the same machine can do to one, and what it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import pytest

from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.redteam, pytest.mark.megatron, pytest.mark.exhaustive]

SERVER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield int(server.stdout.readline())
    server.communicate("", timeout=20)


def send(port: int, *parts: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as client, suppress(OSError):
        for part in parts:
            client.sendall(part)
        client.recv(1)


def hold_connections(port: int) -> None:
    clients = [socket.create_connection(("127.0.0.1", port), timeout=2) for _ in range(300)]
    for client in clients:
        client.close()


ATTACKS: dict[str, Callable[[int], None]] = {
    "sends bytes of no protocol": lambda port: send(port, b"\xff" * (1 << 20)),
    "sends a request of HTTP": lambda port: send(port, b"GET / HTTP/1.1\r\n\r\n"),
    "names a key of an exabyte": lambda port: send(port, b"\x00", (1 << 60).to_bytes(8, "little")),
    "sends the beginning of a request": lambda port: send(port, b"\x00"),
    "holds hundreds of connections": hold_connections,
}
STANDING = ("sets keys of a rendezvous store",)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_store_serves_its_run_after_an_attack(port: int, name: str) -> None:
    ATTACKS[name](port)
    store = _client(port)
    store.set(name, "kept")
    assert store.get(name) == b"kept"
    report_stopped(f"a process of the machine that {name} (to a torch store)", "the connection ends, the store serves")


def test_a_process_of_the_machine_can_set_keys(port: int) -> None:
    """It stands: SECURITY.md and the security model say who can reach a store."""
    _client(port).set("rank", "first")
    _client(port).set("rank", "forged")
    assert _client(port).get("rank") == b"forged"


def _client(port: int):  # type: ignore[no-untyped-def]
    distributed = pytest.importorskip("torch.distributed")
    return distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
