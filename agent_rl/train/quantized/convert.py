"""Convert a quantized checkpoint to bfloat16, shard by shard, with one tensor in memory. Every byte is read once.

The result is written to ``.NAME.partial`` beside its place, and gets its name when it is complete. Each of its files
holds the weights of the file of the same name, and is there as soon as all of it is on disk: a killed conversion goes
on with the next file. Products of numbers and scales are in float32 and rounded once.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.errors import ConfigError, UserError
from agent_rl.models.files import JSON_BYTES, read_text
from agent_rl.train.hf_index import Entry, LoadProgress, read_headers
from agent_rl.train.quantized.formats import Weight, quantization, source_bytes, weights, without_quantization
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import nearest_existing
from r3.atomic_write import replacing, write_atomic

_SOURCE = ".source.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip
GIB = 1 << 30
REPORT_SECONDS = 10.0
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The number of each byte; looking it up is seven times as fast as torch's cast on a CPU."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of e2m1, by their four bits (OCP Microscaling Formats 1.0)."""
_FP4_PAIRS = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)])
_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""The scale of each byte: two to the power of the byte minus 127."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checked conversion of ``source`` to ``target``: the weights of each file of the result."""

    source: Path
    target: Path
    shards: Mapping[str, Sequence[Weight]]

    @classmethod
    def plan(cls, source: Path, target: Path) -> Conversion:
        """Reads only headers and writes nothing. Raises ConfigError for a checkpoint that cannot be converted and
        UserError where ``target`` exists or its disk is too small."""
        if not source.is_dir():
            raise ConfigError(f"{source} is not a directory; expected a quantized Hugging Face checkpoint")
        settings = quantization(source)
        shards: dict[str, list[Weight]] = {}
        for weight in weights(read_headers(source, "convert"), settings, source):
            shards.setdefault(weight.sources[0].file.name, []).append(weight)
        conversion = cls(source, target, shards)
        conversion._check_target()
        return conversion

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    def missing(self) -> list[str]:
        """The files that are not written yet."""
        return [file for file in self.shards if not (self.partial / file).exists()]

    def run(self, progress: LoadProgress, report: Callable[[], None]) -> None:
        """Write what is missing. ``progress`` counts the bytes read; ``report`` is called after each tensor."""
        with lock_directory(self.partial):
            self._claim()
            missing = self.missing()
            sources = [part for file in missing for weight in self.shards[file] for part in weight.sources]
            progress.needed = sum(map(source_bytes, sources))
            for file in missing:
                _write_shard(self.partial / file, self.shards[file], progress, report)
            self._copy_other_files()
            self.partial.rename(self.target)
        for leftover in (".lock", _SOURCE):
            (self.target / leftover).unlink(missing_ok=True)

    def _check_target(self) -> None:
        if self.target.exists():
            raise UserError(f"{self.target} exists; name a new directory")
        if self.partial.exists() and _read_claim(self.partial) not in (None, self._claimed()):
            raise UserError(f"{self.partial} has an unfinished conversion of another checkpoint; remove it first")
        existing = nearest_existing(self.target.parent)
        needed = sum(weight.nbytes for file in self.missing() for weight in self.shards[file])
        if (free := shutil.disk_usage(existing).free) < needed:
            raise UserError(
                f"{self.target}: the converted weights take {needed / 2**30:,.2f} GiB and {existing} has "
                f"{free / 2**30:,.2f} GiB free"
            )

    def _claimed(self) -> list[list[Any]]:
        """The files that are converted, with their sizes and times: an unfinished conversion continues only these."""
        stats = {name: (self.source / name).stat() for name in sorted(self.shards)}
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()]

    def _claim(self) -> None:
        if _read_claim(self.partial) is None:
            write_atomic(self.partial / _SOURCE, json.dumps(self._claimed()).encode())

    def _copy_other_files(self) -> None:
        for file in self.source.iterdir():
            if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
                shutil.copy2(file, self.partial / file.name)
        config = read_text(self.source / "config.json", JSON_BYTES)
        write_atomic(self.partial / "config.json", without_quantization(config).encode())
        if (self.source / "model.safetensors.index.json").exists() or len(self.shards) > 1:
            every = [weight for shard in self.shards.values() for weight in shard]
            index = {
                "metadata": {"total_size": sum(weight.nbytes for weight in every)},
                "weight_map": {weight.name: weight.sources[0].file.name for weight in every},
            }
            write_atomic(self.partial / "model.safetensors.index.json", json.dumps(index, indent=2).encode())


def _read_claim(partial: Path) -> Any:
    try:
        return json.loads((partial / _SOURCE).read_bytes())
    except (OSError, ValueError):
        return None


def _write_shard(path: Path, shard: Sequence[Weight], progress: LoadProgress, report: Callable[[], None]) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_header(shard))
        for weight in shard:
            for part in _converted(weight, progress):
                file.write(part)
            report()


def _header(shard: Sequence[Weight]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in shard:
        end = position + weight.nbytes
        entries[weight.name] = {"dtype": weight.dtype, "shape": weight.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _converted(weight: Weight, progress: LoadProgress) -> Iterator[Any]:
    """The bytes of a converted tensor in order."""
    if weight.kind == "copy":
        yield _read(weight.sources[0], progress).numpy()
    elif weight.kind == "mxfp4":
        blocks, scales = (_read(source, progress).view(source.shape) for source in weight.sources)
        for one, its_scales in zip(blocks, scales, strict=True):
            yield _bytes(from_mxfp4(one, its_scales))
    else:
        stored, scales = (_read(source, progress).view(_DTYPES[source.dtype]) for source in weight.sources)
        stored, scales = stored.view(weight.shape), scales.view(weight.sources[1].shape)
        if weight.kind == "blocks":
            yield _bytes(from_blocks(stored, scales, weight.block))
        else:
            yield _bytes(from_rows(stored, scales))


def _read(entry: Entry, progress: LoadProgress) -> Tensor:
    """The bytes of a tensor."""
    data = torch.empty(source_bytes(entry), dtype=torch.uint8)
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        view: Any = data.numpy()
        if file.readinto(view) != len(data):
            raise UserError(f"{entry.file}: the file ends before the tensor")
    progress.read += len(data)
    return data


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


class Reporter:
    """Prints a line of progress every REPORT_SECONDS."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.progress = LoadProgress()
        self._print_line = print_line
        self._started = self._printed = time.monotonic()

    def report(self) -> None:
        if (now := time.monotonic()) - self._printed >= REPORT_SECONDS:
            self._printed = now
            self._print_line(self.line())

    def line(self) -> str:
        read, needed = self.progress.read, self.progress.needed
        rate = read / max(time.monotonic() - self._started, 1e-9)
        return f"converted {read / GIB:.2f} of {needed / GIB:.2f} GiB, {rate / GIB:.2f} GiB/s"


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
