"""Convert a quantized checkpoint to bfloat16, shard by shard, with one tensor in memory. Every byte is read once.

The result is written to ``.NAME.partial`` beside its place, and gets its name when it is complete. Each of its files
holds the weights of the file of the same name, and is there as soon as all of it is on disk: a killed conversion goes
on with the next file. Products of numbers and scales are in float32 and rounded once.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agent_rl.errors import ConfigError, UserError
from agent_rl.train.hf_index import LoadProgress, read_weights
from agent_rl.train.hf_writer import copy_other_files
from agent_rl.train.megatron.safetensors_slices import SliceReader
from agent_rl.train.quantized.formats import Weight, quantization, source_bytes
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import nearest_existing
from r3.atomic_write import replacing, write_atomic

_SOURCE = ".source.json"
GIB = 1 << 30
REPORT_SECONDS = 10.0


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
        if quantization(source) is None:
            raise ConfigError(f"{source / 'config.json'} has no quantization_config: nothing to convert")
        shards: dict[str, list[Weight]] = {}
        for weight in read_weights(source, "convert").values():
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
        with lock_directory(self.partial), SliceReader(self.source) as reader:
            self._claim()
            missing = self.missing()
            progress.needed = sum(source_bytes(weight.sources[0]) for file in missing for weight in self.shards[file])
            for file in missing:
                _write_shard(self.partial / file, self.shards[file], reader, progress, report)
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
        copy_other_files(self.source, self.partial)
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


def _write_shard(
    path: Path, shard: Sequence[Weight], reader: SliceReader, progress: LoadProgress, report: Callable[[], None]
) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_header(shard))
        for weight in shard:
            for part in reader.parts(weight.name, progress):
                view: Any = part.view(-1).view(torch.uint8).numpy()
                file.write(view)
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
