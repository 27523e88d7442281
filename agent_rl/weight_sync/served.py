"""Whether running engines hold the weights of a checkpoint, where none are published to them.

Their checksums are compared with those of the checkpoint's bytes (:mod:`.digests`). Where these can't be predicted (on
a GPU), only the layers are, and the engines with each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agent_rl.config import EngineConfig
from agent_rl.errors import UserError, WeightSyncError
from agent_rl.models.spec import ModelSpec
from agent_rl.weight_sync.digests import DigestKind, Digests, RankDigests, differing, engine_name, predictable
from agent_rl.weight_sync.receivers import Checksums, WeightReceivers

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", ".w1.", "up_proj", ".w3.")
"""Of one engine parameter, in the order in which they lie in it."""
_BYTES = {"BF16": 2, "F32": 4}
_AS_STORED = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor of a safetensors file. ``kind`` is its type there, ``raw`` its bytes as they lie on the disk."""

    kind: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    def bytes_as(self, kind: str) -> NDArray[np.uint8]:
        """Its bytes as type ``kind``, rounded as a checkpoint is when it is loaded. Both are BF16 or F32."""
        if kind == self.kind:
            return self.raw
        if kind == "F32":
            return (self.raw.view("<u2").astype("<u4") << 16).view(np.uint8)
        bits = self.raw.view("<u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def refuse_others(urls: Sequence[str], directory: Path, facts: ModelSpec, config: EngineConfig) -> str | None:
    """Compare the engines at ``urls`` with the checkpoint in ``directory``, whose facts are ``facts``. Blocking.

    Returns why the weights of some were not compared, in one line; None where all were. Raises UserError for an engine
    that holds other weights.
    """
    try:
        with WeightReceivers(urls, timeout=config.weight_sync_timeout, headers=config.headers) as receivers:
            engines = list(zip(urls, receivers.look(), receivers.checksums(), strict=True))
    except WeightSyncError as error:
        return f"the engines' weights were not compared with those of {directory}: {error}"
    tensors = stored(directory)
    expected: dict[tuple[DigestKind, str], RankDigests] = {}
    left: dict[str, Checksums] = {}
    for url, info, held in engines:
        if not tensors or not _comparable(info, tensors.values()):
            left[url] = held
            wrong = _layers(held.ranks[0]) != set(range(facts.num_layers))
        else:
            key = DigestKind.of(held.ranks), _AS_STORED[info["dtype"]]
            if key not in expected:
                expected[key] = _digests(tensors, facts.kv_heads, *key)
            wrong = differing(expected[key], held.ranks) is not None
        if wrong:
            raise UserError(
                f"the engine at {url} holds other weights than model: {directory} (it was started with "
                f"{info.get('model_path')}, and others may have been published to it since): start it with that "
                "directory, or name the model that it serves"
            )
    _refuse_different(left)
    return (
        f"{', '.join(left)}: the weights were not compared with those of {directory}, only the layers" if left else None
    )


def stored(directory: Path) -> dict[str, Stored]:
    """The tensors in the safetensors files of ``directory``, by name; none where it has no such files."""
    found: dict[str, Stored] = {}
    for file in sorted(directory.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, mode="r")
        start = 8 + int(data[:8].view("<u8")[0])
        header = orjson.loads(data[8:start].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = Stored(entry["dtype"], tuple(entry["shape"]), data[start + begin : start + end])
    return found


def _comparable(info: Mapping[str, Any], tensors: Iterable[Stored]) -> bool:
    """Whether the checksums of a server that reports ``info`` can be predicted from ``tensors``."""
    return predictable(info) and info.get("dtype") in _AS_STORED and all(tensor.kind in _BYTES for tensor in tensors)


def _digests(tensors: Mapping[str, Stored], kv_heads: int, kind: DigestKind, dtype: str) -> RankDigests:
    """What the ranks of an engine hold that loaded ``tensors`` in ``dtype``."""
    digests = Digests(kv_heads, [kind])
    for name in sorted(tensors, key=place):
        digests.add([name], [tensors[name].shape], _BYTES[dtype], tensors[name].bytes_as(dtype))
    return digests.found()[kind]


def place(name: str) -> tuple[str, int, int]:
    """Sorts the parts of each engine parameter into the order in which they lie in it."""
    expert = _EXPERT.search(name)
    part = next((index for index, part in enumerate(_PARTS) if part in name), 0)
    return engine_name(name), int(expert[1]) if expert else 0, part


def _layers(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _LAYER.search(name))}


def _refuse_different(engines: Mapping[str, Checksums]) -> None:
    """Raise UserError for engines of as many ranks that do not hold the same."""
    first: dict[int, str] = {}
    for url, held in engines.items():
        other = first.setdefault(len(held.ranks), url)
        if engines[other].whole != held.whole:
            raise UserError(f"the engines at {other} and {url} hold different weights: start them with the same model")
