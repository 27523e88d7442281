"""Adapters that a trainer sends are merged into the weights here, in the engine's process.

SGLang 0.5.23 multiplies experts' adapters by Triton kernels, of which a CPU has none, and serving adapters costs every
token products that merged weights don't. So :func:`install` teaches ``/update_weights_from_distributed`` one more kind
of tensor: under a weight's name with ``.lora`` behind it comes its change, A beside the transpose of the scaled B
(:func:`pack`). What is loaded is the weight of the checkpoint that the server was started with, read from its
directory, plus that change. So no base is kept in memory, no update builds on the one before, and whoever has
directory and change can tell every bit.

Run in the engine's environment, which has nothing of this project; the trainer uses it too.
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
    """The change ``scale * b @ a`` as it travels: float32 ``[r, in + out]``, of ``a [r, in]`` and ``b [out, r]``."""
    return torch.cat((a.float(), (b.float() * scale).T), dim=1)


def merge(weight: Tensor, change: Tensor) -> Tensor:
    """``weight [out, in]`` with a packed ``change``, float32, on the device of ``change``.

    Added up rank by rank, a product and a sum at a time, so that no library's choice of kernel decides a bit.
    """
    merged, width = weight.to(change.device, torch.float32, copy=True), weight.shape[1]
    for row in change:
        merged += torch.outer(row[width:], row[:width])
    return merged


class BaseWeights:
    """The tensors of the checkpoint in ``directory``, by name, mapped and not held."""

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
        """``tensors`` with weights in place of changes."""
        for name, tensor in tensors:
            weight = name.removesuffix(SUFFIX)
            yield weight, tensor if weight == name else merge(self[weight], tensor)


def install(directory: Path) -> None:
    """Let this process's SGLang take changes of the checkpoint in ``directory``."""
    module: Any = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    load = module.WeightUpdater.load_weights_from_distributed
    opened: list[BaseWeights] = []

    def load_merged(updater: Any, tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
        if not any(name.endswith(SUFFIX) for name, _ in tensors):
            found: tuple[bool, str] = load(updater, tensors)
            return found
        if not opened:
            opened.append(BaseWeights(directory))
        found = load(updater, opened[0].merged(tensors))  # SGLang answers for what raises while it loads
        return found

    module.WeightUpdater.load_weights_from_distributed = load_merged
