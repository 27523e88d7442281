"""Which tensors of a quantized checkpoint form a weight, from the headers of its files. Imports no torch.

===================  ==============================================================  ==========================
published by         tensors of a weight                                             the weight
===================  ==============================================================  ==========================
DeepSeek, Kimi-K2,   ``X`` float8_e4m3fn [out, in], ``X_scale_inv``                  X * scale of the 128 x 128
MiniMax, GLM, Qwen   [ceil(out / 128), ceil(in / 128)]                               block
compressed-tensors   ``X`` float8_e4m3fn [out, in], ``X_scale`` [out, 1] or [1]      X * scale of the row
gpt-oss (mxfp4)      ``X_blocks`` uint8 [experts, out, in / 32, 16], two numbers of  X [experts, in, out]
                     4 bits a byte; ``X_scales`` uint8 [experts, out, in / 32]
===================  ==============================================================  ==========================

Sources: DeepSeek-V3's ``inference/fp8_cast_bf16.py``; ``naive_quantized.py`` of compressed-tensors; the integrations
``finegrained_fp8.py`` and ``mxfp4.py`` of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent_rl.errors import ConfigError
from agent_rl.models.families import check_quantization
from agent_rl.models.files import read_object

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a number by safetensors' name of its dtype, for the dtypes that are read."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_NUMBERS_PER_SCALE = 32
"""Numbers that share a scale in mxfp4, in 16 bytes."""

Kind = Literal["copy", "blocks", "rows", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a safetensors file, in row-major order from byte ``start``; ``dtype`` by safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint, in bfloat16 if it is quantized: its ``sources`` (the stored tensor, its scales), how
    they are converted, and its dtype and shape. ``block``: rows and columns that share a scale."""

    name: str
    kind: Kind
    sources: tuple[Entry, ...]
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def source_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * ITEM_BYTES[entry.dtype]


def quantization(directory: Path) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a checkpoint; None where there is none. Raises ConfigError for a method that is
    not supported."""
    path = directory / "config.json"
    try:
        return check_quantization(read_object(path), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def weights(present: Mapping[str, Entry], directory: Path) -> tuple[Weight, ...]:
    """The tensors of the checkpoint in ``directory``, in the order of ``present``. Raises ConfigError where a quantized
    weight lacks its scales, scales lack their weight, shapes do not fit, or a quantized checkpoint has no such
    weight."""
    for name, entry in present.items():
        if entry.dtype not in ITEM_BYTES:
            raise ConfigError(f"{directory}: {name} is {entry.dtype}, which is not supported")
    settings = quantization(directory)
    if settings is None:
        return tuple(Weight(name, "copy", (entry,), entry.dtype, entry.shape) for name, entry in present.items())
    parts = {name for name in present if _is_scale(name, present)}
    found = [_weight(name, present, settings, directory) for name in present if name not in parts]
    used = {id(source) for weight in found for source in weight.sources}
    if lost := next((name for name in parts if id(present[name]) not in used), None):
        raise ConfigError(f"{directory}: {lost} has no weight; expected {_weight_of(lost)} in float8_e4m3fn or mxfp4")
    if all(weight.kind == "copy" for weight in found):
        raise ConfigError(f"{directory} has no float8 or mxfp4 tensor: nothing to convert")
    return tuple(found)


def _is_scale(name: str, present: Mapping[str, Entry]) -> bool:
    return name.endswith(("_scale_inv", ".weight_scale")) or (name.endswith("_scales") and present[name].dtype == "U8")


def _weight_of(scale: str) -> str:
    if scale.endswith("_scales"):
        return scale.removesuffix("_scales") + "_blocks"
    return scale.removesuffix("_inv").removesuffix("_scale")


def _weight(name: str, present: Mapping[str, Entry], settings: Mapping[str, Any], directory: Path) -> Weight:
    entry = present[name]
    if entry.dtype == "F8_E4M3":
        return _float8(name, present, settings, directory)
    if name.endswith("_blocks") and entry.dtype == "U8":
        return _mxfp4(name, present, directory)
    if name.endswith(("_packed", "qweight")) or entry.dtype == "F8_E8M0":
        raise ConfigError(f"{directory}: {name}: this form of quantization is not supported")
    return Weight(name, "copy", (entry,), entry.dtype, entry.shape)


def _float8(name: str, present: Mapping[str, Entry], settings: Mapping[str, Any], directory: Path) -> Weight:
    entry = present[name]
    if (scale := present.get(f"{name}_scale_inv")) is not None:
        block = _block(settings, directory)
        expected = tuple(-(-size // each) for size, each in zip(entry.shape, block, strict=False))
        if len(entry.shape) != 2 or scale.shape != expected:
            raise _misfit(directory, f"{name}_scale_inv", scale, f"{list(expected)} for {list(entry.shape)}")
        weight = Weight(name, "blocks", (entry, scale), "BF16", entry.shape, block)
    elif (scale := present.get(f"{name}_scale")) is not None:
        if len(entry.shape) != 2 or scale.shape not in ((), (1,), (entry.shape[0],), (entry.shape[0], 1)):
            raise _misfit(directory, f"{name}_scale", scale, f"[{entry.shape[0]}, 1] or [1]")
        weight = Weight(name, "rows", (entry, scale), "BF16", entry.shape)
    else:
        raise ConfigError(f"{directory}: {name} is float8_e4m3fn and has no {name}_scale_inv or {name}_scale")
    if scale.dtype not in SCALE_DTYPES:
        raise ConfigError(f"{directory}: the scales of {name} are {scale.dtype}; supported: {', '.join(SCALE_DTYPES)}")
    return weight


def _mxfp4(name: str, present: Mapping[str, Entry], directory: Path) -> Weight:
    entry, target = present[name], name.removesuffix("_blocks")
    scale = present.get(f"{target}_scales")
    if scale is None:
        raise ConfigError(f"{directory}: {name} has no {target}_scales")
    if len(entry.shape) != 4 or entry.shape[3] * 2 != _NUMBERS_PER_SCALE or scale.shape != entry.shape[:3]:
        raise _misfit(directory, f"{target}_scales", scale, f"the first three sizes of {list(entry.shape)}")
    experts, rows, groups, _ = entry.shape
    return Weight(target, "mxfp4", (entry, scale), "BF16", (experts, groups * _NUMBERS_PER_SCALE, rows))


def _block(settings: Mapping[str, Any], directory: Path) -> tuple[int, int]:
    match settings.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise ConfigError(
                f"{directory / 'config.json'}: quantization_config.weight_block_size must be two positive integers, "
                f"got {other!r}"
            )


def _misfit(directory: Path, name: str, scale: Entry, expected: str) -> ConfigError:
    return ConfigError(f"{directory}: {name} has the shape {list(scale.shape)}, expected {expected}")


def without_quantization(text: str) -> str:
    """The text of a ``config.json`` without its member ``quantization_config``, if it has one; all other bytes stay."""
    members = list(_members(text))
    number = next((index for index, (key, _, _) in enumerate(members) if key == "quantization_config"), None)
    if number is None:
        return text
    _, start, end = members[number]
    if number + 1 < len(members):
        return text[:start] + text[members[number + 1][1] :]
    begin = members[number - 1][2] if number else start
    return text[:begin] + text[end:]


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Key, start and end of each member of the JSON object ``text``."""
    decoder, position = json.JSONDecoder(), text.index("{") + 1
    while True:
        position = _skip(text, position)
        if text[position] == "}":
            return
        start = position
        key, position = decoder.raw_decode(text, start)
        position = _skip(text, text.index(":", position) + 1)
        _, end = decoder.raw_decode(text, position)
        yield key, start, end
        position = _skip(text, end)
        if text[position] == ",":
            position += 1


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position
