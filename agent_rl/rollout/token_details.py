"""``<stem>.train.safetensors``: the trainer's per-token values of a step, and the load of its experts.

The J trained branches are concatenated. ``numbers`` and ``branches`` name each one's trajectory and branch; ``sampled``
and ``differs_at`` hold its start and end. A gap is the trainer's log-prob minus the engine's::

    per sampled token  gap f16, gap_without_replay f16, entropy f16, flags u8
    per token          differs, differs_without_replay: the layers whose experts differ from the rollout's
    per step           loads [L, E] uint32: tokens per expert, from the routes of all trajectories

The layers of a trajectory are a zstandard frame of one bit per layer. If that exceeds 10 bytes per sampled token and 2
bytes per token for all details together, only the number of layers is stored, one byte per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import decompress
from agent_rl.types import Group, TokenDetail
from agent_rl.utils.run_files import replacing
from r3.routing import Routing

SUFFIX = ".train.safetensors"
BYTES_A_SAMPLED_TOKEN, BYTES_A_TOKEN = 10, 2
_FIXED_BYTES = 7
"""Bytes per sampled token used by gaps, entropy and flags."""
_LEVEL = 1  # higher levels save nothing on these bits (measured)
_ROWS = 4096
"""Rows of routes counted per call: 4 ms for 48 layers of top-8."""


_MAX_TENSOR = 2 << 30
_MAX_LAYER_BYTES = 128 << 20

Details = Mapping[tuple[int, int], TokenDetail]
"""By number of trajectory and of branch."""


@dataclass(frozen=True, slots=True, eq=False)
class Differing:
    """For each of ``S`` tokens: the number of MoE layers with other experts, uint8 ``[S]``, and which, bool ``[S,
    L]`` (None if only the number was stored)."""

    numbers: NDArray[np.uint8]
    layers: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredDetail:
    """The stored detail of a branch in half precision; see :class:`agent_rl.types.TokenDetail`."""

    gap: NDArray[np.float16]
    gap_without_replay: NDArray[np.float16] | None
    entropy: NDArray[np.float16] | None
    flags: NDArray[np.uint8]
    differs: Differing | None
    differs_without_replay: Differing | None


def details_path(stem: Path) -> Path:
    return stem.with_name(stem.name + SUFFIX)


def write_details(stem: Path, details: Details, groups: Sequence[Group]) -> None:
    """Write the details of trajectories, numbered as in ``groups``, and the expert loads of all their routes."""
    parts = [details[which] for which in sorted(details)]
    arrays: dict[str, NDArray] = {
        "numbers": np.array([number for number, _ in sorted(details)], np.uint32),
        "branches": np.array([branch for _, branch in sorted(details)], np.uint32),
        "sampled": _offsets([len(part.gap) for part in parts]),
        "gap": _joined([part.gap for part in parts], np.float16),
        "flags": _joined([part.flags for part in parts], np.uint8),
    }
    for name in ("gap_without_replay", "entropy"):
        present = [values for part in parts if (values := getattr(part, name)) is not None]
        if parts and len(present) == len(parts):
            arrays[name] = _joined(present, np.float16)
    arrays |= _layers(parts)
    if (loads := expert_loads(groups)) is not None:
        arrays["loads"] = loads
    with replacing(details_path(stem)) as temporary:
        save_file(arrays, temporary)


def worst(values: NDArray[np.floating] | None) -> float | None:
    """The largest absolute value; None if there is no finite value."""
    finite = np.zeros(0) if values is None else np.abs(values[np.isfinite(values)])
    return float(finite.max()) if len(finite) else None


def expert_loads(groups: Sequence[Group]) -> NDArray[np.uint32] | None:
    """``[L, E]``: tokens per expert in the routes of all trajectories; None without routes."""
    branches = [branch for group in groups for t in group.trajectories for branch in t.branches]
    routings = [branch.routing for branch in branches if branch.routing is not None]
    if not routings:
        return None
    return sum((_count_loads(routing) for routing in routings), np.zeros((1, 1), np.int64)).astype(np.uint32)


def _count_loads(routing: Routing) -> NDArray[np.int64]:
    shape = (routing.moe_layers, routing.num_experts)
    offsets = (np.arange(shape[0]) * shape[1])[:, None]
    total = np.zeros(shape[0] * shape[1], np.int64)
    for start in range(0, routing.tokens, _ROWS):
        rows = routing.experts[start : start + _ROWS][routing.present[start : start + _ROWS]]
        total += np.bincount((rows + offsets).ravel(), minlength=len(total))
    return total.reshape(shape)


def _layers(parts: Sequence[TokenDetail]) -> dict[str, NDArray]:
    """The frames of both passes, concatenated, and which of the two forms each trajectory has."""
    if not parts or any(part.differs is None for part in parts):
        return {}
    names = [name for name in ("differs", "differs_without_replay") if all(getattr(p, name) is not None for p in parts)]
    frames: dict[str, list[bytes]] = {name: [] for name in names}
    keep_bits = []
    for part in parts:
        bits = [getattr(part, name) for name in names]
        packed = [_compressed(values) for values in bits]
        tokens, sampled = len(bits[0]), len(part.gap)
        budget = (BYTES_A_SAMPLED_TOKEN - _FIXED_BYTES) * sampled + BYTES_A_TOKEN * tokens
        keep_bits.append(sum(map(len, packed)) <= budget)
        for name, frame, values in zip(names, packed, bits, strict=True):
            frames[name].append(frame if keep_bits[-1] else _compressed(_numbers(values)))
    arrays: dict[str, NDArray] = {
        "layers": np.array([parts[0].layers], np.uint32),
        "whole_layers": np.array(keep_bits, np.uint8),
    }
    for name, pass_frames in frames.items():
        arrays[name] = np.frombuffer(b"".join(pass_frames), np.uint8)
        arrays[f"{name}_at"] = _offsets([len(frame) for frame in pass_frames])
    return arrays


def _numbers(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.minimum(np.unpackbits(bits, axis=1).sum(axis=1), 255).astype(np.uint8)


def _compressed(values: NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(np.ascontiguousarray(values).data)


def _offsets(lengths: Sequence[int]) -> NDArray[np.uint64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)


def _joined(parts: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *(part.astype(dtype) for part in parts)])


def read_detail(stem: Path, number: int, branch: int = 0) -> StoredDetail | None:
    """The detail of one branch of trajectory ``number``; None if it was not stored. Raises AgentRlError for a
    damaged file."""
    path = details_path(stem)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as tensors:
            numbers, branches = bounded_tensor(tensors, "numbers"), bounded_tensor(tensors, "branches")
            matches = (numbers == number) & (branches == branch)
            indices = np.flatnonzero(matches)
            return _read_stored(tensors, int(indices[0])) if len(indices) else None
    except (SafetensorError, OSError, ValueError, zstandard.ZstdError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def read_loads(stem: Path) -> NDArray[np.uint32] | None:
    """The expert loads of a step, ``[L, E]``; None if they were not stored. Raises AgentRlError for a damaged file."""
    path = details_path(stem)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as tensors:
            return bounded_tensor(tensors, "loads") if "loads" in tensors.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def bounded_tensor(tensors: safe_open, name: str) -> NDArray:
    """A tensor of a file. Raises ValueError if it is larger than a run's: a sparse file may claim any size."""
    if math.prod(tensors.get_slice(name).get_shape()) > _MAX_TENSOR:
        raise ValueError(f"{name} has more than {_MAX_TENSOR} elements")
    array: NDArray = tensors.get_tensor(name)
    return array


def _read_stored(tensors: safe_open, index: int) -> StoredDetail:
    names = set(tensors.keys())
    start, stop = map(int, tensors.get_slice("sampled")[index : index + 2])

    def values(name: str) -> NDArray | None:
        return tensors.get_slice(name)[start:stop] if name in names else None

    def differing(name: str) -> Differing | None:
        return _read_differing(tensors, name, index) if name in names else None

    gap, flags = values("gap"), values("flags")
    assert gap is not None
    assert flags is not None
    layers = differing("differs"), differing("differs_without_replay")
    return StoredDetail(gap, values("gap_without_replay"), values("entropy"), flags, *layers)


def _read_differing(tensors: safe_open, name: str, index: int) -> Differing:
    start, stop = map(int, tensors.get_slice(f"{name}_at")[index : index + 2])
    frame = tensors.get_slice(name)[start:stop].tobytes()
    values = np.frombuffer(decompress(frame, _MAX_LAYER_BYTES), np.uint8)
    if not tensors.get_slice("whole_layers")[index : index + 1][0]:
        return Differing(values, None)
    layers = int(tensors.get_tensor("layers")[0])
    bits = values.reshape(-1, -(-layers // 8))
    return Differing(_numbers(bits), np.unpackbits(bits, axis=1, count=layers).view(np.bool_))
