"""Quantized tensors to bfloat16. Products are in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The number of each byte; looking it up is seven times as fast as torch's cast on a CPU."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of e2m1, by their four bits (OCP Microscaling Formats 1.0)."""
_FP4_PAIRS = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)])
_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""The scale of each byte: two to the power of the byte minus 127."""


def from_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float8 ``[out, in]`` times the scale of each ``block``; the last blocks may be smaller."""
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    rows, columns = block
    for number, start in enumerate(range(0, len(weight), rows)):
        row = scales[number].float().repeat_interleave(columns)[: weight.shape[1]]
        result[start : start + rows] = _float32(weight[start : start + rows]).mul_(row)
    return result


def from_rows(weight: Tensor, scales: Tensor) -> Tensor:
    """float8 ``[out, in]`` times a scale for each row, or for all."""
    return _float32(weight).mul_(scales.float().view(-1, 1)).bfloat16()


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """mxfp4 ``[out, groups, 16]`` with scales ``[out, groups]`` as ``[in, out]``."""
    pairs = _FP4_PAIRS.index_select(0, blocks.int().flatten()).view(*scales.shape, -1)
    return pairs.mul_(_POWERS[scales.int()][:, :, None]).bfloat16().flatten(1).T.contiguous()


def _float32(weight: Tensor) -> Tensor:
    return _FLOAT8.index_select(0, weight.view(torch.uint8).int().flatten()).view(weight.shape)
