"""What the trainer's benchmarks share: a world of one Megatron rank, random Qwen3-MoE models."""

from __future__ import annotations

import argparse
import contextlib
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the checkout's scripts on the path)
import torch

from agent_rl.config import ParallelConfig
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from scripts import tiny_moe

SHAPES: dict[str, dict[str, Any]] = {name: asdict(sizes) for name, sizes in tiny_moe.SHAPES.items()}
"""Sizes of the starting models by name, as transformers' configs have them."""
QUICKSTART = SHAPES["tiny"]
"""The quickstart's model, 2.1 M parameters."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--device``; the rest is the caller's."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def world(parallel: ParallelConfig, rank: int, port: int, device: str) -> Iterator[torch.device]:
    """A Megatron world, as its ``rank``; every rank's process must enter."""
    place = torch.device(device)
    init_parallel(parallel, rank, master_addr="127.0.0.1", master_port=port, device=place)
    try:
        yield place
    finally:
        destroy_parallel()


def one_rank(device: str) -> contextlib.AbstractContextManager[torch.device]:
    """A Megatron world of this process alone."""
    return world(ParallelConfig(), 0, free_port(), device)


def policy(
    device: torch.device, shape: Mapping[str, Any], parallel: ParallelConfig | None = None, **options: Any
) -> tuple[Any, Any]:
    """A random Qwen3-MoE of ``shape`` as transformers makes it, and the trainer's own model with the same weights.

    ``options`` are those of ``PolicyModel.build``.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from agent_rl.train.megatron.model import PolicyModel

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"norm_topk_prob": True, "tie_word_embeddings": True, "max_position_embeddings": 1 << 17, **shape}
    )
    reference = Qwen3MoeForCausalLM(config)
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        model = PolicyModel.build(Path(directory), parallel or ParallelConfig(), device=device, **options)
    return reference.to(device=device, dtype=options.get("dtype", torch.float32)), model
