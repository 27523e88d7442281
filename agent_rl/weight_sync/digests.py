"""Predict an engine's checksums of its weights from the tensors that are sent to it.

SGLang's ``/weights_checker`` hashes every parameter. On a CPU the hash is the first 8 bytes of SHA-256 over the
parameter's bytes; servers that we launched use XXH3 (``engine/cpu/cpu_shims.py``), which is 8 times as fast, and mark
their checksums. Several Hugging Face tensors are concatenated in one parameter::

    q_proj, k_proj, v_proj                    qkv_proj
    q_a_proj, kv_a_proj_with_mqa              fused_qkv_a_proj_with_mqa
    gate_proj, up_proj                        gate_up_proj
    experts.0.gate_proj, experts.0.up_proj,
    experts.1.gate_proj, ...                  experts.w13_weight
    experts.0.down_proj, ...                  experts.w2_weight
    experts.gate_up_proj, experts.down_proj   experts.w13_weight, experts.w2_weight (of clamped experts transposed)
    in_proj_qkv, in_proj_z                    in_proj_qkvz
    in_proj_b, in_proj_a                      in_proj_ba
    mixer.A_log                               mixer.A, which is -exp(A_log)

Tensors arrive in this order, so each hash is updated as they come. A tensor that is lost, changed or loaded under
another name gives another checksum.

An engine with several tensor ranks has checksums per rank. A rank has a block of rows (q, k, v, sinks, gate, up,
embedding, output, projections of the delta rule and of Mamba-2) or columns (o, out, down) of a matrix, and all of other
tensors. With fewer key-value heads than ranks, neighbours have the same head.
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

from agent_rl.engine.admission_checks import attention_ranks
from agent_rl.models.parts import ExpertForm
from agent_rl.models.spec import ModelSpec

_FUSED = (
    (re.compile(r"\.(self_attn|mixer)\.[qkv]_proj\."), r".\1.qkv_proj."),
    (re.compile(r"\.self_attn\.q_a_proj\."), ".self_attn.fused_qkv_a_proj_with_mqa."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.experts\.gate_up_proj(_bias)?$"), r".experts.w13_weight\1"),
    (re.compile(r"\.experts\.down_proj(_bias)?$"), r".experts.w2_weight\1"),
    (re.compile(r"(\.mixer\.(shared_experts\.)?up_proj\.weight)$"), r"\1"),  # without a gate
    (re.compile(r"\.(gate|up)_proj\.weight$"), ".gate_up_proj.weight"),
    (re.compile(r"\.moe_statics\.e_score_correction_bias$"), ".gate.e_score_correction_bias"),
    (re.compile(r"\.in_proj_(qkv|z)\."), ".in_proj_qkvz."),
    (re.compile(r"\.in_proj_(b|a)\."), ".in_proj_ba."),
    (re.compile(r"\.mixer\.A_log$"), ".mixer.A"),
)
_STACKED = re.compile(r"\.experts\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?$")
_OTHER_PREFIX = re.compile(r"^(model\.language_model|backbone)\.")
"""Of a text model beside a vision tower, and of Nemotron-H; engines do without it."""
_ZERO_CENTERED = "gemma_weight"
"""The last part of the name of a norm's 1 + weight, which engines keep beside a weight that is near zero."""
_OPTIONAL = ("lm_head.weight", _ZERO_CENTERED)
_CONSTANT = ".axis_map"
"""The last part of the name of a rotary embedding's table of axes."""
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64  # SGLang pads the vocabulary with rows of zeros
_INNER_MULTIPLE = 32  # and each rank's part of an MLP's inner dimension (on a CPU)
_BY_ROWS = re.compile(
    r"\.(q|k|v|q_b|kv_b|gate|up)_proj\.|\.w[13]\.|\.sinks$|\.in_proj_|\.(A_log|dt_bias|D)$|\.mixer\.norm\."
)
_NOT_PADDED = re.compile(
    r"\.(q|q_b|kv_b|o|out)_proj\.|\.sinks$|\.linear_attn\.|\.mixer\.(A_log|dt_bias|D$|norm|shared_experts)"
)
_BY_COLUMNS = re.compile(r"\.(o|out|down)_proj\.weight|\.w2\.")
_CONVOLVED = re.compile(r"\.(in_proj_qkv|conv1d)\.")
_MAMBA_INPUTS = ".mixer.in_proj."
_MAMBA_DECAY = ".mixer.A_log"
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

    Not on a GPU (another hash), nor with expert parallelism, data-parallel attention, quantized weights or weights
    packed for Intel AMX.
    """
    plain = server.get("quantization") is None and server.get("attention_backend") != "intel_amx"
    one_cut = server.get("ep_size", 1) == 1 and attention_ranks(server) == 1
    return server.get("device") == "cpu" and one_cut and plain


class Digests:
    """Computes the checksums of one update for engines of each of the ``kinds``."""

    def __init__(self, model_spec: ModelSpec, kinds: Collection[DigestKind]) -> None:
        self._kv_heads, self._form = model_spec.kv_heads, model_spec.expert_form
        self._zero_centered = model_spec.zero_centered_norms
        self._delta, self._mamba = model_spec.delta, model_spec.mamba
        self._in_float32 = model_spec.family.served_in_float32
        self._hashes: dict[DigestKind, list[dict[str, Any]]] = {kind: [{} for _ in range(kind.ranks)] for kind in kinds}

    @property
    def kinds(self) -> frozenset[DigestKind]:
        return frozenset(self._hashes)

    def add(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], size: int, data: NDArray[np.uint8]) -> None:
        """Add a bucket. ``data`` ``[bytes]``: the bytes of its tensors, concatenated."""
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            stop = start + size * math.prod(shape)
            rows, width = data[start:stop].reshape(shape[0], -1), size
            if size == 2 and self._in_float32(name):
                rows, width = _widened(rows).view(np.uint8), 4
            name = _engine_path(name)
            if name.endswith(_MAMBA_DECAY):
                rows = (-np.exp(rows.view("<f4").astype(float))).astype("<f4").view(np.uint8)
            for kind, ranks in self._hashes.items():
                for rank, hashes in enumerate(ranks):
                    digest = hashes.setdefault(_parameter(name, hashes), _HASHES[kind.prefix]())
                    if stacked := _STACKED.search(name):
                        share = _stacked_share(stacked, rows.reshape(*shape, width), rank, kind.ranks, self._form)
                    else:
                        share = self._share(name, rows, width, rank, kind.ranks)
                    digest.update(np.ascontiguousarray(share).data)
                    if self._zero_centered and name.endswith("norm.weight"):
                        derived = _HASHES[kind.prefix]()
                        derived.update(_plus_one(rows, width))
                        hashes[name.removesuffix("weight") + _ZERO_CENTERED] = derived
            start = stop

    def _share(self, name: str, rows: NDArray[np.uint8], itemsize: int, rank: int, size: int) -> NDArray[np.uint8]:
        """The part of a tensor (``rows`` uint8 ``[first axis, bytes]``) on tensor rank ``rank`` of ``size``."""
        if name in _VOCABULARY:
            return _block(rows, rank, size, _VOCABULARY_MULTIPLE // size)
        if sizes := self._parts(name):
            return np.concatenate([_block(part, rank, size, 1) for part in np.split(rows, np.cumsum(sizes)[:-1])])
        if _OF_HEADS.search(name):
            parts = min(size, self._kv_heads)
            return _block(rows, rank * parts // size, parts, 1)
        if _BY_ROWS.search(name):
            return _block(rows, rank, size, 1 if _NOT_PADDED.search(name) else _INNER_MULTIPLE)
        if _BY_COLUMNS.search(name):
            multiple = 1 if _NOT_PADDED.search(name) else _INNER_MULTIPLE
            return _block(rows.T, rank, size, multiple * itemsize).T
        return rows

    def _parts(self, name: str) -> tuple[int, ...]:
        """The numbers of rows of a tensor's parts, each of which is divided among the ranks; empty for other
        tensors."""
        if self._delta is not None and _CONVOLVED.search(name):
            return self._delta.key_width, self._delta.key_width, self._delta.value_width
        if self._mamba is not None and _CONVOLVED.search(name):
            return self._mamba.convolved
        if self._mamba is not None and _MAMBA_INPUTS in name:
            return self._mamba.width, *self._mamba.convolved, self._mamba.heads
        return ()

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


def _stacked_share(
    name: re.Match[str], whole: NDArray[np.uint8], rank: int, size: int, form: ExpertForm
) -> NDArray[np.uint8]:
    """As :meth:`Digests._share`, of all experts' weights ``whole`` uint8 ``[E, out, in, bytes]`` or biases ``[E, out,
    bytes]``. Clamped experts have ``[E, in, out, bytes]``, and gate and up alternate. Rank 0 alone adds the bias of
    down."""
    down, clamped = name["part"] == "down", form == "clamped"
    if name["bias"] and down:
        return whole if rank == 0 else np.zeros_like(whole)
    if clamped and not name["bias"]:
        whole = whole.swapaxes(1, 2)
    axis, multiple = (2 if down else 1), _INNER_MULTIPLE * (2 if clamped and not down else 1)
    parts = [whole] if down or clamped else np.split(whole, 2, axis=1)
    blocks = [np.moveaxis(_block(np.moveaxis(part, axis, 0), rank, size, multiple), 0, axis) for part in parts]
    return np.concatenate(blocks, axis=axis) if len(blocks) > 1 else blocks[0]


def _parameter(name: str, present: Collection[str]) -> str:
    """As :func:`engine_name`, with what depends on the parameters before it: ``kv_a_proj_with_mqa`` joins ``q_a_proj``
    if there is one, and ``q_proj`` stays alone if keys and values come from ``kv_a_proj_with_mqa``."""
    fused = name.replace(".kv_a_proj_with_mqa.", ".fused_qkv_a_proj_with_mqa.")
    alone = ".q_proj." in name and name.replace(".q_proj.", ".kv_a_proj_with_mqa.") in present
    return fused if fused in present else name if alone else engine_name(name)


def _plus_one(rows: NDArray[np.uint8], size: int) -> bytes:
    """1 plus a tensor of float32 (``size`` 4) or bfloat16 (``size`` 2), rounded to its dtype."""
    if size == 4:
        return (rows.view("<f4") + np.float32(1)).tobytes()
    return round_to_bfloat16((_widened(rows) + np.float32(1)).view("<u4")).tobytes()


def _widened(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of bfloat16 ``rows``."""
    return (rows.view("<u2").astype("<u4") << 16).view("<f4")


def round_to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The upper halves of float32 ``bits``, rounded to the nearest even."""
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def engine_name(name: str) -> str:
    """The engine's parameter that contains the Hugging Face tensor ``name``."""
    name = _engine_path(name)
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name


def _engine_path(name: str) -> str:
    return _OTHER_PREFIX.sub("model.", name).replace("model.embeddings.", "model.embed_tokens.")


def rank_difference(expected: Mapping[str, str], actual: Mapping[str, str]) -> str | None:
    """The first difference between expected and actual checksums of a rank, in one line; None where they agree.

    An engine with a tied output has no ``lm_head.weight``. Engines name a module of the Hugging Face model
    ``self_attn`` or leave its name out.
    """
    expected, actual = (
        {_without_attention(name): digest for name, digest in each.items()} for each in (expected, actual)
    )
    actual = {name: digest for name, digest in actual.items() if not name.endswith(_CONSTANT)}
    wrong = sorted(name for name, digest in actual.items() if expected.get(name) != digest)
    missing = sorted(name for name in expected if name not in actual and not name.endswith(_OPTIONAL))
    if not wrong and not missing:
        return None
    parts = [_named("does not hold the bytes that were sent", wrong), _named("has no parameter", missing)]
    return " and ".join(part for part in parts if part)


def _without_attention(name: str) -> str:
    return name.replace(".self_attn.", ".")


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
