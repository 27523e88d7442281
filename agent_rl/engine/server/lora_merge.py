"""Merges the adapters sent by a trainer into the weights, in the engine's process.

SGLang 0.5.23 multiplies experts' adapters with Triton kernels, which need a GPU, and unmerged adapters cost additional
matrix products per token. So :func:`install` extends ``/update_weights_from_distributed``: a tensor named like a weight
with suffix ``.lora`` holds the weight's change, A beside the transpose of the scaled B (:func:`pack`). The loaded
weight is the start checkpoint's weight, read from its directory, plus that change. So no base weights are kept in
memory, updates do not accumulate, and every bit can be reproduced from directory and change.

Runs in the engine's environment, which has no other module of this project; the trainer uses it too.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

SUFFIX = ".lora"


def pack(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The change ``scale * b @ a`` as it is sent: float32 ``[r, in + out]``, from ``a [r, in]`` and ``b [out, r]``."""
    return torch.cat((a.float(), (b.float() * scale).T), dim=1)


def merge(weight: Tensor, change: Tensor) -> Tensor:
    """``weight [out, in]`` plus a packed ``change``, float32, on the device of ``change``.

    Summed rank by rank, one product and one addition at a time, so that no library's kernel choice affects the bits.
    """
    merged, width = weight.to(change.device, torch.float32, copy=True), weight.shape[1]
    for row in change:
        merged += torch.outer(row[width:], row[:width])
    return merged


class BaseWeights:
    """The tensors of the checkpoint in ``directory``, by name, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
        files = [file for file in sorted(directory.glob("*.safetensors")) if names is None or file.name in names]
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (no mapping)

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``tensors`` with every change replaced by the merged weight."""
        for name, tensor in tensors:
            weight = name.removesuffix(SUFFIX)
            yield weight, tensor if weight == name else merge(self[weight], tensor)


def install(directory: Path) -> None:
    """Make this process's SGLang accept changes to the checkpoint in ``directory``."""
    module: Any = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    load = module.WeightUpdater.load_weights_from_distributed
    opened: list[BaseWeights] = []

    def load_merged(updater: Any, received: Iterable[tuple[str, Tensor]]) -> tuple[bool, str]:
        tensors = list(received)
        if not any(name.endswith(SUFFIX) for name, _ in tensors):
            result: tuple[bool, str] = load(updater, tensors)
            return result
        if not opened:
            opened.append(BaseWeights(directory))
        result = load(updater, opened[0].merged(tensors))  # SGLang reports exceptions raised while it loads
        return result

    module.WeightUpdater.load_weights_from_distributed = load_merged
