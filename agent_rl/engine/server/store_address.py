"""Lets torch's rendezvous stores listen on the address that they are given.

``TCPStore`` listens on all interfaces, without a password, whatever its ``host_name`` says. Runs in the engine's
environment, which has no other module of this project.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

from torch.distributed import TCPStore


def install() -> None:
    """Replace the store of ``tcp://`` rendezvous in this process."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    module.TCPStore = bound_store


def bound_store(host_name: str, port: int, *, is_master: bool = False, **options: Any) -> TCPStore:
    """A store whose server listens on ``host_name`` only."""
    if is_master:
        family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
        options["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
    return TCPStore(host_name, port, is_master=is_master, **options)
