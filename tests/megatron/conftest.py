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
    """Installed before any import of Megatron."""


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """The ranks of a world of one."""
    from support.megatron_world import world_of_one

    with world_of_one() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a tiny Qwen3-MoE and the transformers model in it."""
    import megatron_tiny as tiny

    directory = tmp_path_factory.mktemp("tiny") / "model"
    return directory, tiny.make(directory)


@pytest.fixture
def build(world: Any, checkpoint: tuple[Path, Any]) -> Callable[..., Any]:
    """``build(directory, recompute=..., load=...)`` makes a policy on the CPU."""
    import torch

    from agent_rl.train.megatron.model import PolicyModel

    def make(directory: Path | None = None, **options: Any) -> Any:
        return PolicyModel.build(directory or checkpoint[0], ParallelConfig(), device=torch.device("cpu"), **options)

    return make
