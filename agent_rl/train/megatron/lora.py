"""Low-rank adapters (LoRA, arXiv 2106.09685) on attention's projections and the experts, beside frozen weights.

A weight ``W [out, in]`` is used as ``W + scale B A`` with ``A [r, in]``, ``B [out, r]`` and ``scale = alpha / r``;
those of experts are stacked, ``[E, r, in]`` and ``[E, out, r]``. What Megatron holds in one tensor (query, key and
value; gate and up) shares one A. Everything else is frozen, the routers among it. Import only in rank processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.train.megatron.hf_weights import Slot, own_experts
from agent_rl.train.megatron.moe import Experts, Product
from agent_rl.train.megatron.parallel import Ranks


class Pair(torch.nn.Module):
    """The change of one weight. ``b`` begins as zeros: a new adapter changes nothing, to the bit."""

    def __init__(self, a: torch.nn.Parameter, b: torch.nn.Parameter, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale
        torch.nn.init.zeros_(b)

    def forward(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
        return product(product(x, self.a), self.b) * self.scale


def _beside(weight: torch.nn.Parameter, lora: LoraConfig) -> torch.nn.ModuleDict:
    """The pair of a matrix, under the name by which :mod:`.hf` finds the weight."""
    outer, inner = weight.shape
    a, b = (torch.nn.Parameter(weight.new_empty(shape)) for shape in ((lora.rank, inner), (outer, lora.rank)))
    return torch.nn.ModuleDict({"weight": Pair(a, b, lora.scale)})


class AdaptedColumn(ColumnParallelLinear):
    """Megatron's, with an adapter; for one tensor rank."""

    def __init__(self, *args: Any, lora: LoraConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lora = _beside(self.weight, lora)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """See Megatron's."""
        output, bias = super().forward(input_, *args, **options)
        return output + self.lora["weight"](input_), bias


class AdaptedRow(RowParallelLinear):
    """Megatron's, with an adapter; for one tensor rank."""

    def __init__(self, *args: Any, lora: LoraConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lora = _beside(self.weight, lora)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Megatron's."""
        output, bias = super().forward(input_)
        return output + self.lora["weight"](input_), bias


class AdaptedExperts(Experts):
    """This rank's experts, with an adapter each on gate and up, and on down."""

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any = None, *, product: Product, lora: LoraConfig
    ) -> None:
        super().__init__(num_local_experts, config, pg_collection, product=product)
        pairs = {}
        for name, weight in (("weight1", self.weight1), ("weight2", self.weight2)):
            experts, outer, inner = weight.shape
            a, b = self._weight(config, experts, lora.rank, inner), self._weight(config, experts, outer, lora.rank)
            pairs[name] = Pair(a, b, lora.scale)
        self.lora = torch.nn.ModuleDict(pairs)

    def _times(self, tokens: Tensor, name: str, ends: Tensor) -> Tensor:
        def product(x: Tensor, weight: Tensor) -> Tensor:
            return self._product(x, weight, ends)

        change: Tensor = self.lora[name](tokens, product)
        return super()._times(tokens, name, ends) + change


def freeze_base(modules: Sequence[Any]) -> None:
    """Leave only adapters to be trained."""
    for module in modules:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".lora." in name)
        if module.pre_process:
            # Layers that are run again under the backward pass (train.recompute) get a gradient only by an input that
            # has one, and nothing before the first layer is trained.
            module.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


@torch.no_grad()
def draw(slots: Iterable[Slot], ranks: Ranks, seed: int) -> None:
    """Draw every A as PEFT does, uniform within ``1 / sqrt(in)``; by its name, so that each layout begins alike."""
    for slot in slots:
        if not slot.names[0].endswith(".lora_A"):
            continue
        stacked = slot.parameter.ndim == 3
        matrices = slot.parameter if stacked else slot.parameter[None]
        for number, matrix in zip(own_experts(slot, ranks) if stacked else (0,), matrices, strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {slot.names[number]}".encode()))
            bound = matrix.shape[1] ** -0.5
            matrix.copy_(torch.empty(matrix.shape).uniform_(-bound, bound, generator=generator))
