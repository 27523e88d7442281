"""Low-rank adapters (LoRA, arXiv 2106.09685) on attention's projections and the experts, beside frozen weights.

A weight ``W [out, in]`` is used as ``W + scale B A`` with ``A [r, in]``, ``B [out, r]`` and ``scale = alpha / r``;
adapters of experts are stacked, ``[E, r, in]`` and ``[E, out, r]``. Weights that Megatron fuses into one tensor (query,
key and value; gate and up) share one A. Everything else is frozen, including routers. Import only in rank processes.
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
from agent_rl.train.megatron.hf_weights import ParamMapping, own_experts
from agent_rl.train.megatron.moe import ExpertMatmul, Experts
from agent_rl.train.megatron.parallel import ParallelState


class LoraPair(torch.nn.Module):
    """The adapter of one weight. ``b`` starts as zeros, so a new adapter changes no bit."""

    def __init__(self, a: torch.nn.Parameter, b: torch.nn.Parameter, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale
        torch.nn.init.zeros_(b)

    def forward(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
        return product(product(x, self.a), self.b) * self.scale


def adapter_of(weight: torch.nn.Parameter, lora: LoraConfig) -> torch.nn.ModuleDict:
    """The adapter of a matrix, under the parameter name from which :mod:`.hf_weights` derives the weight."""
    outer, inner = weight.shape
    a, b = (torch.nn.Parameter(weight.new_empty(shape)) for shape in ((lora.rank, inner), (outer, lora.rank)))
    return torch.nn.ModuleDict({"weight": LoraPair(a, b, lora.scale)})


class LoraColumnParallelLinear(ColumnParallelLinear):
    """Megatron's layer with an adapter, for tensor parallel size 1."""

    def __init__(self, *args: Any, lora: LoraConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lora = adapter_of(self.weight, lora)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """See the base class."""
        output, bias = super().forward(input_, *args, **options)
        return output + self.lora["weight"](input_), bias


class LoraRowParallelLinear(RowParallelLinear):
    """Megatron's layer with an adapter, for tensor parallel size 1."""

    def __init__(self, *args: Any, lora: LoraConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lora = adapter_of(self.weight, lora)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """See the base class."""
        output, bias = super().forward(input_)
        return output + self.lora["weight"](input_), bias


class LoraExperts(Experts):
    """This rank's experts with adapters on gate and up, and on down."""

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any = None, *, product: ExpertMatmul, lora: LoraConfig
    ) -> None:
        super().__init__(num_local_experts, config, pg_collection, product=product)
        pairs = {}
        for name, weight in (("weight1", self.weight1), ("weight2", self.weight2)):
            experts, outer, inner = weight.shape
            a, b = self._weight(config, experts, lora.rank, inner), self._weight(config, experts, outer, lora.rank)
            pairs[name] = LoraPair(a, b, lora.scale)
        self.lora = torch.nn.ModuleDict(pairs)

    def _times(self, tokens: Tensor, name: str, ends: Tensor) -> Tensor:
        def product(x: Tensor, weight: Tensor) -> Tensor:
            return self._product(x, weight, ends)

        change: Tensor = self.lora[name](tokens, product)
        return super()._times(tokens, name, ends) + change


def train_only(modules: Sequence[Any], trained: Callable[[str], bool]) -> None:
    """Freeze the parameters for whose names ``trained`` is False."""
    for module in modules:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained(name))
        if module.pre_process:
            # Recomputed layers (train.recompute) get gradients only if their input requires one, also where nothing
            # before the first layer is trained.
            module.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


@torch.no_grad()
def init_adapters(slots: Iterable[ParamMapping], ranks: ParallelState, seed: int) -> None:
    """Initialize every A as PEFT does, uniform within ``1 / sqrt(in)``, seeded by its name so that every parallel
    layout starts with the same values."""
    for slot in slots:
        if not slot.described.name.endswith(".a"):
            continue
        stacked = slot.parameter.ndim == 3
        matrices = slot.parameter if stacked else slot.parameter[None]
        for number, matrix in zip(own_experts(slot, ranks) if stacked else (0,), matrices, strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {slot.names[number]}".encode()))
            bound = matrix.shape[1] ** -0.5
            matrix.copy_(torch.empty(matrix.shape).uniform_(-bound, bound, generator=generator))
