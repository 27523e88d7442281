"""Predict an engine's checksums of its weights from the tensors that are sent to it.

SGLang's ``/weights_checker`` hashes every parameter. On a CPU the hash is the first 8 bytes of SHA-256 over the
parameter's bytes; servers that we launched use XXH3 (``engine/cpu/cpu_shims.py``), which is 8 times as fast, and mark
their checksums. Several Hugging Face tensors are concatenated in one parameter::

    q_proj, k_proj, v_proj                    qkv_proj
    gate_proj, up_proj                        gate_up_proj
    experts.0.gate_proj, experts.0.up_proj,
    experts.1.gate_proj, ...                  experts.w13_weight
    experts.0.down_proj, ...                  experts.w2_weight
    experts.gate_up_proj, of all experts      experts.w13_weight, each matrix transposed
    experts.down_proj, of all experts         experts.w2_weight, each matrix transposed

Tensors arrive in this order, so each hash is updated as they come. A tensor that is lost, changed or loaded under
another name gives another checksum.

An engine with several tensor ranks has checksums per rank. A rank has a block of rows (q, k, v, sinks, gate, up,
embedding, output) or columns (o, down) of a matrix, and all of other tensors. With fewer key-value heads than ranks,
neighbours have the same head.
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
    (re.compile(r"\.experts\.gate_up_proj(_bias)?$"), r".experts.w13_weight\1"),
    (re.compile(r"\.experts\.down_proj(_bias)?$"), r".experts.w2_weight\1"),
    (re.compile(r"\.(gate|up)_proj\.weight$"), ".gate_up_proj.weight"),
    (re.compile(r"\.moe_statics\.e_score_correction_bias$"), ".gate.e_score_correction_bias"),
)
_STACKED = re.compile(r"\.experts\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?$")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64  # SGLang pads the vocabulary with rows of zeros
_INNER_MULTIPLE = 32  # and each rank's part of an MLP's inner dimension (on a CPU)
_BY_ROWS = re.compile(r"\.(q|k|v|gate|up)_proj\.|\.w[13]\.|\.sinks$")
_BY_COLUMNS = re.compile(r"\.(o|down)_proj\.weight|\.w2\.")
_OF_QUERIES = re.compile(r"\.q_proj\.|\.sinks$")
_OF_HEADS = re.compile(r"\.[kv]_proj\.")

_HASHES: Mapping[str, Callable[[], Any]] = {"xxh3:": xxhash.xxh3_64, "": hashlib.sha256}
"""Hash functions by the prefix of their checksums."""

RankDigests = tuple[Mapping[str, str], ...]
"""For each tensor rank of an engine: the checksum of every parameter, by the engine's name."""


@dataclass(frozen=True, slots=True)
class DigestKind:
    """Engines of the same kind have equal checksums: the same number of tensor ``ranks``, and the same hash, by the
    prefix of its checksums."""

    ranks: int
    prefix: str = ""

    @classmethod
    def of(cls, digests: RankDigests) -> DigestKind:
        """The kind of an engine with these checksums."""
        first = next(iter(digests[0].values()), "")
        return cls(len(digests), next(prefix for prefix in _HASHES if first.startswith(prefix)))


def predictable(server: Mapping[str, Any]) -> bool:
    """Whether the checksums of a server with this ``/server_info`` can be predicted.

    Not on a GPU (another hash), nor with expert parallelism, quantized weights or weights packed for Intel AMX.
    """
    plain = server.get("quantization") is None and server.get("attention_backend") != "intel_amx"
    return server.get("device") == "cpu" and server.get("ep_size", 1) == 1 and plain


class Digests:
    """Computes the checksums of one update for engines of each of the ``kinds``."""

    def __init__(self, kv_heads: int, kinds: Collection[DigestKind]) -> None:
        self._kv_heads = kv_heads
        self._hashes: dict[DigestKind, list[dict[str, Any]]] = {kind: [{} for _ in range(kind.ranks)] for kind in kinds}

    def add(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], size: int, data: NDArray[np.uint8]) -> None:
        """Add a bucket. ``data`` ``[bytes]``: the bytes of its tensors, concatenated."""
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            stop = start + size * math.prod(shape)
            rows = data[start:stop].reshape(shape[0], -1)
            for kind, ranks in self._hashes.items():
                for rank, hashes in enumerate(ranks):
                    digest = hashes.setdefault(engine_name(name), _HASHES[kind.prefix]())
                    if stacked := _STACKED.search(name):
                        share = _stacked_share(stacked, rows.reshape(*shape, size), rank, kind.ranks)
                    else:
                        share = self._share(name, rows, size, rank, kind.ranks)
                    digest.update(np.ascontiguousarray(share).data)
            start = stop

    def _share(self, name: str, rows: NDArray[np.uint8], itemsize: int, rank: int, size: int) -> NDArray[np.uint8]:
        """The part of a tensor (``rows`` uint8 ``[first axis, bytes]``) on tensor rank ``rank`` of ``size``."""
        if name in _VOCABULARY:
            return _block(rows, rank, size, _VOCABULARY_MULTIPLE // size)
        if _OF_HEADS.search(name):
            parts = min(size, self._kv_heads)
            return _block(rows, rank * parts // size, parts, 1)
        if _BY_ROWS.search(name):
            return _block(rows, rank, size, 1 if _OF_QUERIES.search(name) else _INNER_MULTIPLE)
        if _BY_COLUMNS.search(name):
            multiple = 1 if ".o_proj." in name else _INNER_MULTIPLE
            return _block(rows.T, rank, size, multiple * itemsize).T
        return rows

    def expected(self) -> dict[DigestKind, RankDigests]:
        """The expected checksums of each tensor rank, by engine kind."""
        return {
            kind: tuple({name: kind.prefix + d.digest()[:8].hex() for name, d in hashes.items()} for hashes in ranks)
            for kind, ranks in self._hashes.items()
        }


def _block(rows: NDArray[np.uint8], index: int, parts: int, multiple: int) -> NDArray[np.uint8]:
    """Part ``index`` of ``parts`` equal blocks of the first axis, each padded with zeros to a ``multiple``."""
    height = -(-len(rows) // (parts * multiple)) * multiple
    block = rows[index * height : (index + 1) * height]
    missing = ((0, height - len(block)), *((0, 0),) * (block.ndim - 1))
    return np.pad(block, missing) if len(block) < height else block


def _stacked_share(name: re.Match[str], whole: NDArray[np.uint8], rank: int, size: int) -> NDArray[np.uint8]:
    """As :meth:`Digests._share`, of all experts' weights ``whole`` uint8 ``[E, in, out, bytes]`` or biases ``[E, out,
    bytes]``, where gate and up alternate. Rank 0 alone adds the bias of down."""
    down = name["part"] == "down"
    if name["bias"] and down:
        return whole if rank == 0 else np.zeros_like(whole)
    whole = whole if name["bias"] else whole.swapaxes(1, 2)
    axis, multiple = (2, _INNER_MULTIPLE) if down else (1, 2 * _INNER_MULTIPLE)
    return np.moveaxis(_block(np.moveaxis(whole, axis, 0), rank, size, multiple), 0, axis)


def engine_name(name: str) -> str:
    """The engine's parameter that contains the Hugging Face tensor ``name``."""
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name


def rank_difference(expected: Mapping[str, str], actual: Mapping[str, str]) -> str | None:
    """The first difference between expected and actual checksums of a rank, in one line; None where they agree.

    An engine with a tied output has no ``lm_head.weight``.
    """
    wrong = sorted(name for name, digest in actual.items() if expected.get(name) != digest)
    missing = sorted(name for name in expected if name not in actual and name != "lm_head.weight")
    if not wrong and not missing:
        return None
    parts = [_named("does not hold the bytes that were sent", wrong), _named("has no parameter", missing)]
    return " and ".join(part for part in parts if part)


def engine_difference(expected: RankDigests, actual: RankDigests) -> str | None:
    """As :func:`rank_difference` over all tensor ranks of an engine; names the first rank that differs."""
    if len(actual) != len(expected):
        return f"has {len(actual)} ranks, not {len(expected)}"
    for rank, (expected_rank, actual_rank) in enumerate(zip(expected, actual, strict=True)):
        if wrong := rank_difference(expected_rank, actual_rank):
            return wrong if len(actual) == 1 else f"{wrong} (its rank {rank} of {len(actual)})"
    return None


def unchanged_ranks(before: RankDigests, after: RankDigests) -> str | None:
    """For engines without predictable checksums: reports if an update changed only some of the engine's ranks."""
    changed = [one != other for one, other in zip(before, after, strict=True)]
    if all(changed) or not any(changed):
        return None
    return f"changed on only {sum(changed)} of its {len(changed)} ranks (not on rank {changed.index(False)})"


def minority_engines(checksums: Mapping[str, str]) -> list[str]:
    """The URLs of engines that differ from the majority; all URLs without a majority.

    ``checksums``: one checksum of all weights per engine. For engines without predictable checksums.
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
