"""Which addresses a process listens on and connects from."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that keep the sockets of gloo and NCCL on loopback. Both read them when a group is created."""
NCCL_SETTINGS: Mapping[str, str] = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""NCCL settings of SGLang's processes. Trainer ranks have the same, because one weight-update group has both."""
_DISCARD_PORT = 9


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def on_loopback(urls: Iterable[str]) -> bool:
    """Whether only this machine reaches any of ``urls``."""
    return all(is_loopback(urlsplit(url).hostname or "") for url in urls)


def family_of(host: str) -> socket.AddressFamily:
    """The family of an IP address or of a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen_at(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``host`` only; port 0 is a free one. Raises OSError."""
    return socket.create_server((host, port), family=family_of(host))


def address_towards(host: str) -> str:
    """The address of this machine from which it reaches ``host``. Sends nothing. Raises OSError."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))
        return str(probe.getsockname()[0])
