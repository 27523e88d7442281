"""Megatron in one process, without other ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agent_rl.config import ParallelConfig


@contextmanager
def world_of_one() -> Iterator[Any]:
    """The ranks of a world of one, on one CPU thread."""
    from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

    listener, threads = socket.create_server(("127.0.0.1", 0)), torch.get_num_threads()
    torch.set_num_threads(1)
    place = {"master_addr": "127.0.0.1", "master_port": listener.getsockname()[1], "listener": listener.detach()}
    yield init_parallel(ParallelConfig(), 0, **place, device=torch.device("cpu"))
    destroy_parallel()
    torch.set_num_threads(threads)
