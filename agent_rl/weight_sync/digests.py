"""An engine's checksums of its weights, predicted from the tensors that are sent to it.

SGLang's ``/weights_checker`` hashes every parameter it holds. On a CPU the hash is the first 8 bytes of SHA-256 over
the parameter's bytes, or XXH3, eight times as fast, in a server that we launched (``engine/cpu/cpu_shims.py``), whose
checksums say so. Several Hugging Face tensors lie behind one another in one parameter::

    q_proj, k_proj, v_proj                    qkv_proj
    gate_proj, up_proj                        gate_up_proj
    experts.0.gate_proj, experts.0.up_proj,
    experts.1.gate_proj, ...                  experts.w13_weight
    experts.0.down_proj, ...                  experts.w2_weight

Tensors come in this very order, so each parameter's hash is fed as they come. A tensor that was lost, changed on its
way or loaded under another name gives another checksum.

An engine of several tensor ranks has one set of checksums a rank. Of a tensor in two axes a rank holds a block of rows
(q, k, v, gate, up, embedding, output) or of columns (o, down), of the others all. Where there are fewer key-value heads
than ranks, neighbours hold the same head.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_FUSED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\.weight$"), ".gate_up_proj.weight"),
)
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64  # SGLang fills the vocabulary up with rows of zeros
_INNER_MULTIPLE = 32  # ... and each rank's part of an MLP's inner dimension (on a CPU)
_BY_ROWS = re.compile(r"\.(q|k|v|gate|up)_proj\.")
_BY_COLUMNS = re.compile(r"\.(o|down)_proj\.")
_OF_HEADS = re.compile(r"\.[kv]_proj\.")

_HASHES: Mapping[str, Callable[[], Any]] = {"xxh3:": xxhash.xxh3_64, "": hashlib.sha256}
"""By what checksums begin with."""

RankDigests = tuple[Mapping[str, str], ...]
"""One an engine's tensor rank: the checksum of every parameter, by the engine's name."""


@dataclass(frozen=True, slots=True)
class DigestKind:
    """Engines of equal kind have equal checksums: they have so many tensor ``ranks``, and the same hash, by what its
    checksums begin with."""

    ranks: int
    prefix: str = ""

    @classmethod
    def of(cls, held: RankDigests) -> DigestKind:
        """The kind of an engine by the checksums that it holds."""
        some = next(iter(held[0].values()), "")
        return cls(len(held), next(prefix for prefix in _HASHES if some.startswith(prefix)))


def predictable(server: Mapping[str, Any]) -> bool:
    """Whether the checksums of a server that reports this about itself (``/server_info``) can be predicted.

    Not on a GPU (another hash), nor where experts are dealt out, or weights quantised or packed for the CPU's matrix
    unit.
    """
    plain = server.get("quantization") is None and server.get("attention_backend") != "intel_amx"
    return server.get("device") == "cpu" and server.get("ep_size", 1) == 1 and plain


class Digests:
    """Collects the checksums of one update, for engines of each of the ``kinds``."""

    def __init__(self, kv_heads: int, kinds: Collection[DigestKind]) -> None:
        self._kv_heads = kv_heads
        self._hashes: dict[DigestKind, list[dict[str, Any]]] = {kind: [{} for _ in range(kind.ranks)] for kind in kinds}

    def add(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], itemsize: int, data: NDArray[np.uint8]
    ) -> None:
        """A bucket: ``data`` ``[bytes]``, the tensors' bytes one after the other."""
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            stop = start + itemsize * math.prod(shape)
            rows = data[start:stop].reshape(shape[0], -1)
            for kind, ranks in self._hashes.items():
                for rank, hashes in enumerate(ranks):
                    digest = hashes.setdefault(engine_name(name), _HASHES[kind.prefix]())
                    digest.update(np.ascontiguousarray(self._share(name, rows, itemsize, rank, kind.ranks)).data)
            start = stop

    def _share(self, name: str, rows: NDArray[np.uint8], itemsize: int, rank: int, size: int) -> NDArray[np.uint8]:
        """Of a tensor, ``rows`` uint8 ``[first axis, bytes]``, what tensor rank ``rank`` of ``size`` holds."""
        if name in _VOCABULARY:
            return _block(rows, rank, size, _VOCABULARY_MULTIPLE // size)
        if _OF_HEADS.search(name):
            parts = min(size, self._kv_heads)
            return _block(rows, rank * parts // size, parts, 1)
        if _BY_ROWS.search(name):
            return _block(rows, rank, size, 1 if ".q_proj." in name else _INNER_MULTIPLE)
        if _BY_COLUMNS.search(name):
            multiple = 1 if ".o_proj." in name else _INNER_MULTIPLE
            return _block(rows.T, rank, size, multiple * itemsize).T
        return rows

    def found(self) -> dict[DigestKind, RankDigests]:
        """What each tensor rank should hold, by the kind of its engine."""
        return {
            kind: tuple(
                {name: kind.prefix + digest.digest()[:8].hex() for name, digest in hashes.items()} for hashes in ranks
            )
            for kind, ranks in self._hashes.items()
        }


def _block(rows: NDArray[np.uint8], at: int, parts: int, multiple: int) -> NDArray[np.uint8]:
    """The ``at``-th of equal ``parts`` of the first axis, each a ``multiple`` long, filled up with zeros."""
    height = -(-len(rows) // (parts * multiple)) * multiple
    held = rows[at * height : (at + 1) * height]
    return np.pad(held, ((0, height - len(held)), (0, 0))) if len(held) < height else held


def engine_name(name: str) -> str:
    """The engine's parameter that the Hugging Face tensor ``name`` is a part of."""
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name


def difference(expected: Mapping[str, str], held: Mapping[str, str]) -> str | None:
    """What of an engine's checksums is not as it should be, in one line; None where all is.

    An engine that ties its output to the embedding has no ``lm_head.weight`` of its own.
    """
    wrong = sorted(name for name, digest in held.items() if expected.get(name) != digest)
    lacking = sorted(name for name in expected if name not in held and name != "lm_head.weight")
    if not wrong and not lacking:
        return None
    parts = [_named("does not hold the bytes that were sent", wrong), _named("has no parameter", lacking)]
    return " and ".join(part for part in parts if part)


def differing(expected: RankDigests, held: RankDigests) -> str | None:
    """As :func:`difference`, of every tensor rank of an engine; the first that is wrong is named."""
    if len(held) != len(expected):
        return f"has {len(held)} ranks, not {len(expected)}"
    for rank, (wanted, found) in enumerate(zip(expected, held, strict=True)):
        if wrong := difference(wanted, found):
            return wrong if len(held) == 1 else f"{wrong} (its rank {rank} of {len(held)})"
    return None


def left_behind(before: RankDigests, after: RankDigests) -> str | None:
    """What is odd of an engine's ranks where checksums cannot be predicted: one that an update changed nothing of."""
    changed = [one != other for one, other in zip(before, after, strict=True)]
    if all(changed) or not any(changed):
        return None
    return f"was changed on {sum(changed)} of its {len(changed)} ranks alone (not on rank {changed.index(False)})"


def outvoted(checksums: Mapping[str, str]) -> list[str]:
    """The engines, by URL, that do not hold what most hold; all of them where no majority does.

    ``checksums``: one of all weights an engine. For engines whose checksums cannot be predicted.
    """
    values = list(checksums.values())
    most = max(set(values), key=values.count)
    if 2 * values.count(most) > len(values):
        return [url for url, value in checksums.items() if value != most]
    return list(checksums)


def _named(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{what}: {names[0]}{more}"
