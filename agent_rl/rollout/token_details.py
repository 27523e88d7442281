"""``<stem>.train.safetensors``: what the trainer saw of a step's tokens, and the loads of its experts.

J branches that the step trained on, one behind the other; ``numbers`` and ``branches`` say of which trajectory and
which of it, ``sampled`` and ``differs_at`` where each begins and ends. Gaps are the trainer's log-prob less the
engine's::

    a sampled token   gap f16, gap_without_replay f16, entropy f16, flags u8
    a token           differs, differs_without_replay: the layers whose experts are not the rollout's
    the step          loads [L, E] uint32: tokens that each expert got, in the routes of all trajectories

The layers of a trajectory are a zstandard frame of eight layers a byte, or of their number, a byte a token, where the
first would take more than 10 bytes a sampled token and 2 a token for all of the trajectory's detail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agent_rl.errors import AgentRlError
from agent_rl.types import Group, TokenDetail
from agent_rl.utils.run_files import replacing
from r3.routing import Routing

SUFFIX = ".train.safetensors"
BYTES_A_SAMPLED_TOKEN, BYTES_A_TOKEN = 10, 2
_SPENT = 7
"""Bytes a sampled token that gaps, entropy and flags take."""
_LEVEL = 1  # higher ones save nothing on bits (measured)
_ROWS = 4096
"""Rows of routes that are counted at once: the event loop waits 4 ms for as many of 48 layers of top-8."""


Details = Mapping[tuple[int, int], TokenDetail]
"""By the number of a trajectory, and of its branch."""


@dataclass(frozen=True, slots=True, eq=False)
class Differing:
    """Of a trajectory's ``S`` tokens, how many MoE layers had other experts, uint8 ``[S]``, and which, bool ``[S, L]``
    (None where only their number was kept)."""

    numbers: NDArray[np.uint8]
    layers: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredDetail:
    """A trajectory's detail as it is read: see :class:`agent_rl.types.TokenDetail`, all values of half precision."""

    gap: NDArray[np.float16]
    gap_without_replay: NDArray[np.float16] | None
    entropy: NDArray[np.float16] | None
    flags: NDArray[np.uint8]
    differs: Differing | None
    differs_without_replay: Differing | None


def details_path(stem: Path) -> Path:
    return stem.with_name(stem.name + SUFFIX)


def write_details(stem: Path, details: Details, groups: Sequence[Group]) -> None:
    """Write the detail of trajectories by their numbers in ``groups``, and the loads of all their routes."""
    parts = [details[which] for which in sorted(details)]
    arrays: dict[str, NDArray] = {
        "numbers": np.array([number for number, _ in sorted(details)], np.uint32),
        "branches": np.array([branch for _, branch in sorted(details)], np.uint32),
        "sampled": _bounds([len(part.gap) for part in parts]),
        "gap": _joined([part.gap for part in parts], np.float16),
        "flags": _joined([part.flags for part in parts], np.uint8),
    }
    for name in ("gap_without_replay", "entropy"):
        found = [values for part in parts if (values := getattr(part, name)) is not None]
        if parts and len(found) == len(parts):
            arrays[name] = _joined(found, np.float16)
    arrays |= _layers(parts)
    if (loads := expert_loads(groups)) is not None:
        arrays["loads"] = loads
    with replacing(details_path(stem)) as temporary:
        save_file(arrays, temporary)


def worst(values: NDArray[np.floating] | None) -> float | None:
    """The largest distance from 0; None of nothing, and where none is a number."""
    finite = np.zeros(0) if values is None else np.abs(values[np.isfinite(values)])
    return float(finite.max()) if len(finite) else None


def expert_loads(groups: Sequence[Group]) -> NDArray[np.uint32] | None:
    """``[L, E]``: how many tokens each expert got, in the routes of all trajectories; None without routes."""
    branches = [branch for group in groups for t in group.trajectories for branch in t.branches]
    routings = [branch.routing for branch in branches if branch.routing is not None]
    if not routings:
        return None
    return sum((_counted(routing) for routing in routings), np.zeros((1, 1), np.int64)).astype(np.uint32)


def _counted(routing: Routing) -> NDArray[np.int64]:
    shape = (routing.moe_layers, routing.num_experts)
    offsets = (np.arange(shape[0]) * shape[1])[:, None]
    total = np.zeros(shape[0] * shape[1], np.int64)
    for start in range(0, routing.tokens, _ROWS):
        rows = routing.experts[start : start + _ROWS][routing.present[start : start + _ROWS]]
        total += np.bincount((rows + offsets).ravel(), minlength=len(total))
    return total.reshape(shape)


def _layers(parts: Sequence[TokenDetail]) -> dict[str, NDArray]:
    """The frames of both passes, one behind the other, and which of the two forms each trajectory has."""
    if not parts or any(part.differs is None for part in parts):
        return {}
    passes = [
        name for name in ("differs", "differs_without_replay") if all(getattr(p, name) is not None for p in parts)
    ]
    frames: dict[str, list[bytes]] = {name: [] for name in passes}
    whole = []
    for part in parts:
        bits = [getattr(part, name) for name in passes]
        packed = [_compressed(values) for values in bits]
        tokens, sampled = len(bits[0]), len(part.gap)
        room = (BYTES_A_SAMPLED_TOKEN - _SPENT) * sampled + BYTES_A_TOKEN * tokens
        whole.append(sum(map(len, packed)) <= room)
        for name, frame, values in zip(passes, packed, bits, strict=True):
            frames[name].append(frame if whole[-1] else _compressed(_numbers(values)))
    arrays: dict[str, NDArray] = {
        "layers": np.array([parts[0].layers], np.uint32),
        "whole_layers": np.array(whole, np.uint8),
    }
    for name, found in frames.items():
        arrays[name] = np.frombuffer(b"".join(found), np.uint8)
        arrays[f"{name}_at"] = _bounds([len(frame) for frame in found])
    return arrays


def _numbers(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.minimum(np.unpackbits(bits, axis=1).sum(axis=1), 255).astype(np.uint8)


def _compressed(values: NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(np.ascontiguousarray(values).data)


def _bounds(lengths: Sequence[int]) -> NDArray[np.uint64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)


def _joined(parts: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *(part.astype(dtype) for part in parts)])


def read_detail(stem: Path, number: int, branch: int = 0) -> StoredDetail | None:
    """The detail of a branch of trajectory ``number``; None where none was kept. Raises AgentRlError for a damaged
    file."""
    path = details_path(stem)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as tensors:
            own = (tensors.get_tensor("numbers") == number) & (tensors.get_tensor("branches") == branch)
            found = np.flatnonzero(own)
            return _stored(tensors, int(found[0])) if len(found) else None
    except (SafetensorError, OSError, ValueError, zstandard.ZstdError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def read_loads(stem: Path) -> NDArray[np.uint32] | None:
    """The loads of a step, ``[L, E]``; None where none were kept. Raises AgentRlError for a damaged file."""
    path = details_path(stem)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as tensors:
            return tensors.get_tensor("loads") if "loads" in tensors.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def read_gaps(stem: Path) -> NDArray[np.float16] | None:
    """The gaps of all tokens that a step's branches sampled; None where none were kept. Raises AgentRlError for a
    damaged file."""
    path = details_path(stem)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as tensors:
            return tensors.get_tensor("gap")
    except (SafetensorError, OSError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def _stored(tensors: safe_open, at: int) -> StoredDetail:
    names = set(tensors.keys())
    start, stop = map(int, tensors.get_slice("sampled")[at : at + 2])

    def values(name: str) -> NDArray | None:
        return tensors.get_slice(name)[start:stop] if name in names else None

    def differing(name: str) -> Differing | None:
        return _differing(tensors, name, at) if name in names else None

    gap, flags = values("gap"), values("flags")
    assert gap is not None
    assert flags is not None
    layers = differing("differs"), differing("differs_without_replay")
    return StoredDetail(gap, values("gap_without_replay"), values("entropy"), flags, *layers)


def _differing(tensors: safe_open, name: str, at: int) -> Differing:
    start, stop = map(int, tensors.get_slice(f"{name}_at")[at : at + 2])
    frame = tensors.get_slice(name)[start:stop].tobytes()
    values = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    if not tensors.get_slice("whole_layers")[at : at + 1][0]:
        return Differing(values, None)
    layers = int(tensors.get_tensor("layers")[0])
    bits = values.reshape(-1, -(-layers // 8))
    return Differing(_numbers(bits), np.unpackbits(bits, axis=1, count=layers).view(np.bool_))
