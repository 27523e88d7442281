"""The TCP sockets on which processes listen, as /proc lists them."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket: the process, its command line, the address and the port."""

    pid: int
    command: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches it. An IPv6 socket may be bound to an IPv4 address."""
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def listeners_of(pids: set[int]) -> set[Listener]:
    """The listening sockets of the processes ``pids``, IPv4 and IPv6."""
    bound = _bound(Path("/proc/net/tcp")) | _bound(Path("/proc/net/tcp6"))
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            directory = Path(f"/proc/{pid}")
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            for descriptor in os.listdir(directory / "fd"):
                with suppress(OSError):
                    inode = os.readlink(directory / "fd" / descriptor).removeprefix("socket:[").rstrip("]")
                    if inode in bound:
                        found.add(Listener(pid, command, *bound[inode]))
    return found


def descendants(roots: set[int]) -> set[int]:
    """``roots`` and all processes that descend from them. A child of a dead parent is no descendant of its
    grandparent, so call it again with what it returned before."""
    parents: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid for pid in roots if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _bound(table: Path) -> dict[str, tuple[str, int]]:
    """The address and port of each listening socket, by its inode."""
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return {row[9]: _address(row[1]) for row in rows if row[3] == _LISTENING}


def _address(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` as an address and a port. The kernel prints words of four bytes, least significant first."""
    digits, _, port = text.partition(":")
    data = bytes.fromhex(digits)
    packed = b"".join(data[start : start + 4][::-1] for start in range(0, len(data), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)
