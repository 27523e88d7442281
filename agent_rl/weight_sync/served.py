"""Check that running engines have the weights of a checkpoint, for runs that publish none.

Compares their checksums with those of the checkpoint (:mod:`.digests`). Where these cannot be predicted (on a GPU), it
compares the layers, and the engines with each other.
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
from agent_rl.models.tensors import model_parameters
from agent_rl.weight_sync.digests import (
    DigestKind,
    Digests,
    RankDigests,
    engine_difference,
    engine_name,
    predictable,
    round_to_bfloat16,
)
from agent_rl.weight_sync.receivers import Checksums, WeightReceivers

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PARTS = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", ".w1.", "up_proj", ".w3."),
    *("in_proj_qkv.", "in_proj_z.", "in_proj_b.", "in_proj_a."),
)
"""Parts of one engine parameter, in their order."""
_BYTES = {"BF16": 2, "F32": 4}
_AS_STORED = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a safetensors file: its dtype there (``kind``) and its bytes (``raw``)."""

    kind: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    def bytes_as(self, kind: str) -> NDArray[np.uint8]:
        """The bytes as dtype ``kind``, rounded as in loading. Both dtypes are BF16 or F32."""
        if kind == self.kind:
            return self.raw
        if kind == "F32":
            return (self.raw.view("<u2").astype("<u4") << 16).view(np.uint8)
        return round_to_bfloat16(self.raw.view("<u4")).view(np.uint8)


def check_served_weights(urls: Sequence[str], model: Path, model_spec: ModelSpec, config: EngineConfig) -> str | None:
    """Compare the engines at ``urls`` with the checkpoint in ``model`` (architecture ``model_spec``). Blocks.

    Returns a line about engines whose weights were not compared, or None. Raises UserError for an engine with other
    weights.
    """
    try:
        with WeightReceivers(urls, timeout=config.weight_sync_timeout, headers=config.headers) as receivers:
            engines = list(zip(urls, receivers.query_info(), receivers.checksums(), strict=True))
    except WeightSyncError as error:
        return f"the engines' weights were not compared with those of {model}: {error}"
    described = {tensor.name for _, parameter in model_parameters(model_spec) for tensor in parameter.tensors}
    tensors = {name: tensor for name, tensor in stored_tensors(model).items() if name in described | {"lm_head.weight"}}
    expected: dict[tuple[DigestKind, str], RankDigests] = {}
    uncompared: dict[str, Checksums] = {}
    for url, info, checksums in engines:
        if not tensors or model_spec.quantized or not _comparable(info, tensors.values()):
            uncompared[url] = checksums
            wrong = _layers(checksums.ranks[0]) != set(range(model_spec.num_layers))
        else:
            key = DigestKind.of(checksums.ranks), _AS_STORED[info["dtype"]]
            if key not in expected:
                expected[key] = _digests(tensors, model_spec, *key)
            wrong = engine_difference(expected[key], checksums.ranks) is not None
        if wrong:
            raise UserError(
                f"the engine at {url} has other weights than model: {model} (it was started with "
                f"{info.get('model_path')}, and may have received others since): start it with that directory, or set "
                "model to the one that it serves"
            )
    _check_equal(uncompared)
    return (
        f"{', '.join(uncompared)}: the weights were not compared with those of {model}, only the layers"
        if uncompared
        else None
    )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of ``directory`` by name; empty without such files."""
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, mode="r")
        start = 8 + int(data[:8].view("<u8")[0])
        header = orjson.loads(data[8:start].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), data[start + begin : start + end])
    return tensors


def _comparable(info: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> bool:
    """Whether the checksums of a server with this ``/server_info`` can be predicted from ``tensors``."""
    return predictable(info) and info.get("dtype") in _AS_STORED and all(tensor.kind in _BYTES for tensor in tensors)


def _digests(tensors: Mapping[str, StoredTensor], model_spec: ModelSpec, kind: DigestKind, dtype: str) -> RankDigests:
    """The checksums of an engine of ``kind`` that has loaded ``tensors`` in ``dtype``."""
    digests = Digests(model_spec, [kind])
    for name in sorted(tensors, key=engine_order):
        loaded = "F32" if model_spec.family.served_in_float32(name) else dtype
        digests.add([name], [tensors[name].shape], _BYTES[loaded], tensors[name].bytes_as(loaded))
    return digests.expected()[kind]


def engine_order(name: str) -> tuple[str, int, int]:
    """The sort key that puts the parts of each engine parameter into their order in it."""
    expert = _EXPERT.search(name)
    part = next((index for index, part in enumerate(_PARTS) if part in name), 0)
    return engine_name(name), int(expert[1]) if expert else 0, part


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.search(name))}


def _check_equal(engines: Mapping[str, Checksums]) -> None:
    """Raises UserError for engines with the same number of ranks and different weights."""
    first: dict[int, str] = {}
    for url, checksums in engines.items():
        other = first.setdefault(len(checksums.ranks), url)
        if engines[other].combined != checksums.combined:
            raise UserError(f"the engines at {other} and {url} have different weights: start them with the same model")
