"""An engine's checksums of its weights, predicted from the tensors that are sent to it.

SGLang's ``/weights_checker`` hashes every parameter it holds. On a CPU the hash is the first 8 bytes of SHA-256 over
the parameter's bytes; several Hugging Face tensors lie behind one another in one parameter::

    q_proj, k_proj, v_proj                    qkv_proj
    gate_proj, up_proj                        gate_up_proj
    experts.0.gate_proj, experts.0.up_proj,
    experts.1.gate_proj, ...                  experts.w13_weight
    experts.0.down_proj, ...                  experts.w2_weight

Tensors come in this very order, so each parameter's hash is fed as they come. A tensor that was lost, changed on its
way or loaded under another name gives another checksum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\.weight$"), ".gate_up_proj.weight"),
)
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64  # SGLang fills the vocabulary up with rows of zeros


def predictable(server: Mapping[str, Any]) -> bool:
    """Whether the checksums of a server that reports this about itself (``/server_info``) can be predicted.

    Not on a GPU (another hash), nor where weights are cut, quantised or packed for the CPU's matrix unit.
    """
    whole = all(server.get(key, 1) == 1 for key in ("tp_size", "pp_size", "ep_size"))
    plain = server.get("quantization") is None and server.get("attention_backend") != "intel_amx"
    return server.get("device") == "cpu" and whole and plain


class Digests:
    """Collects the checksums of one update."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def add(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], itemsize: int, data: Tensor) -> None:
        """A bucket: ``data`` uint8, the tensors' bytes one after the other."""
        # hashlib lets other threads run, so a thread of its own costs an update next to nothing.
        whole, start = data.cpu().numpy().data, 0
        for name, shape in zip(names, shapes, strict=True):
            stop = start + itemsize * _product(shape)
            digest = self._hashes.setdefault(engine_name(name), hashlib.sha256())
            digest.update(whole[start:stop])
            if name in _VOCABULARY:
                digest.update(bytes(itemsize * shape[1] * (-shape[0] % _VOCABULARY_MULTIPLE)))
            start = stop

    def found(self) -> dict[str, str]:
        """The checksum of every parameter, by the engine's name."""
        return {name: digest.digest()[:8].hex() for name, digest in self._hashes.items()}


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


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
