"""Rank 0 of a weight update, a plain torch process: ``python weight_sender.py URL MODEL VERSION [MODEL VERSION ...]``.

Sends each checkpoint in turn over one gloo group in two buckets, the way a trainer's publishing rank does.
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from agent_rl.weight_sync.receivers import GROUP_NAME, WeightReceivers

LIMIT = timedelta(seconds=60)


def join(port: int, world_size: int) -> dist.ProcessGroup:
    """Rank 0's half of what the engine does to join, beside whatever default group there is."""
    store, rank, world = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=LIMIT))
    store.set_timeout(LIMIT)
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(GROUP_NAME, store),
        group_name=GROUP_NAME,
        timeout=LIMIT,
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world)}
    return group


def send(receivers: WeightReceivers, group: dist.ProcessGroup, model: Path, version: str) -> None:
    weights = list(load_file(model / "model.safetensors").items())
    receivers.begin()
    for part in (weights[: len(weights) // 2], weights[len(weights) // 2 :]):
        names, tensors = [name for name, _ in part], [tensor for _, tensor in part]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        bucket = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])
        shapes = [tuple(tensor.shape) for tensor in tensors]
        receiving = receivers.receive(names, dtypes, shapes, weight_version=version)
        work = dist.broadcast(bucket, src=0, group=group, async_op=True)
        deadline = time.monotonic() + LIMIT.total_seconds()
        while not work.is_completed():
            receiving.check()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        receiving.wait()
    receivers.end()


def main() -> None:
    url, *rounds = sys.argv[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with WeightReceivers([url], timeout=60) as receivers:
        with receivers.joining("127.0.0.1", port, backend="gloo"):
            group = join(port, receivers.world_size)
        for model, version in zip(rounds[::2], rounds[1::2], strict=True):
            send(receivers, group, Path(model), version)
        receivers.leave()


if __name__ == "__main__":
    main()
