"""One Megatron world of a single rank for a test module, and the tiny checkpoint it loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_rl.config import ParallelConfig

sys.path.insert(0, str(Path(__file__).parent))  # the worker processes import the modules beside this one too


@pytest.fixture(scope="session", autouse=True)
def shim(megatron_shim: None) -> None:
    """Before anything of Megatron is imported, whichever module of this directory a process begins with."""


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """The ranks of a world of one."""
    import torch
    from megatron_tiny import free_port

    from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    yield init_parallel(ParallelConfig(), 0, master_addr="127.0.0.1", master_port=free_port(), device=device)
    destroy_parallel()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a tiny Qwen3-MoE and the transformers model in it."""
    import megatron_tiny as tiny

    directory = tmp_path_factory.mktemp("tiny") / "model"
    return directory, tiny.make(directory)


@pytest.fixture
def build(world: Any, checkpoint: tuple[Path, Any]) -> Callable[..., Any]:
    """``build(folder=..., recompute=..., load=...)`` makes a policy on the CPU."""
    import torch

    from agent_rl.train.megatron.model import PolicyModel

    def make(directory: Path | None = None, **options: Any) -> Any:
        return PolicyModel.build(directory or checkpoint[0], ParallelConfig(), device=torch.device("cpu"), **options)

    return make
