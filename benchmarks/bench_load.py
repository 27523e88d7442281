"""What a rank reads of a checkpoint over what it needs, and the host memory that takes, for layouts of 32 ranks.

Run: ``python benchmarks/bench_load.py [--ranks 0,9,31]``

A checkpoint of 2.7 GB (Qwen3-MoE, bfloat16, random, shards of about 0.5 GB) is written to a temporary directory,
which is removed. Each rank is a process of its own: Megatron's groups are fake (loading meets nobody), the model is
built in bfloat16 on the CPU, then it loads. For each:

- needed: bytes of the rank's parameters in the checkpoint;
- asked for: the growth of ``rchar`` in /proc/self/io, what read calls returned. Page faults of mapped files are not in
  it, and nothing is mapped;
- from the disk: the growth of ``read_bytes``, what the kernel fetched for this process, page faults included; the files
  are dropped from the page cache before. The kernel reads ahead, and whole pages;
- peak: the highest resident memory while loading (VmHWM, reset before), less what was resident before, plus the rank's
  parameters, which the CPU holds; over those parameters. On a GPU host memory would hold the growth alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from resident_memory import resident
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from agent_rl.config import ParallelConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.hf_index import expected_shapes

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
LAYOUTS = {
    "TP4 EP8": ParallelConfig(world_size=32, tensor=4, expert=8),
    "TP2 PP2 EP4": ParallelConfig(world_size=32, tensor=2, pipeline=2, expert=4),
    "TP4 CP2 EP32": ParallelConfig(world_size=32, tensor=4, context=2, expert=32),
}
SHARD_BYTES = 500 << 20
READ_LIMIT, MEMORY_LIMIT = 1.1, 1.2


@dataclass(frozen=True)
class Measured:
    """One rank's, in bytes and seconds."""

    needed: int
    asked: int
    disk: int
    share: int
    grown: int
    seconds: float

    @property
    def read_ratio(self) -> float:
        return self.asked / self.needed

    @property
    def memory_ratio(self) -> float:
        return (self.share + self.grown) / self.share


def write_checkpoint(directory: Path) -> int:
    """Its size in bytes."""
    held: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    total = number = 0
    shapes = list(expected_shapes(ModelSpec.of(MODEL)).items())
    for at, (name, shape) in enumerate(shapes):
        held[name] = torch.randint(0x3C00, 0x3F80, shape, dtype=torch.int16).view(torch.bfloat16)  # 0.008 to 1
        if sum(tensor.nbytes for tensor in held.values()) >= SHARD_BYTES or at == len(shapes) - 1:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(held, directory / file)
            files |= dict.fromkeys(held, file)
            total += sum(tensor.nbytes for tensor in held.values())
            held = {}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (directory / "config.json").write_text(json.dumps(MODEL))
    os.sync()
    return total


def forget(directory: Path) -> None:
    """Drop the files from the page cache."""
    for file in directory.iterdir():
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def counted(name: str) -> int:
    """A number of /proc/self/io."""
    lines = (line.split() for line in Path("/proc/self/io").read_text().splitlines())
    return next(int(fields[1]) for fields in lines if fields[0] == f"{name}:")


def measure(directory: Path, layout: ParallelConfig, rank: int, answer: Any) -> None:
    """In a forked process: build a rank's part of the model, and load it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from agent_rl.train.hf_index import LoadProgress
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.megatron.parallel import _init_megatron

    new_group: Any = torch.distributed.new_group
    torch.distributed.new_group = lambda *args, **options: new_group(*args, **{**options, "backend": "fake"})
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    _init_megatron(layout, 0, 600.0)
    model = PolicyModel.build(directory, layout, device=torch.device("cpu"), dtype=torch.bfloat16, load=False)
    share = sum(parameter.nbytes for module in model.modules for parameter in module.parameters())
    forget(directory)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # blocks that were freed would hide what loading takes
    Path("/proc/self/clear_refs").write_text("5")
    progress, before = LoadProgress(), resident("VmRSS")
    asked, disk = counted("rchar"), counted("read_bytes")
    begun = time.perf_counter()
    model.load_hf(directory, progress)
    seconds = time.perf_counter() - begun
    asked, disk = counted("rchar") - asked, counted("read_bytes") - disk
    grown = max(0, resident("VmHWM") - before)
    answer.send(Measured(progress.needed, asked, disk, share, grown, seconds))


def measured(directory: Path, ranks: list[int]) -> Iterator[tuple[str, int, Measured]]:
    """Layout, rank and what was measured, one after the other."""
    from agent_rl.train.megatron.cpu import install_cpu_shim

    torch.set_num_threads(1)
    install_cpu_shim()
    context = multiprocessing.get_context("fork")  # Megatron is imported once
    for name, layout in LAYOUTS.items():
        for rank in ranks:
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(directory, layout, rank, send))
            process.start()
            send.close()
            yield name, rank, receive.recv()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=",".join(map(str, range(32))), help="Which of the 32 ranks are measured.")
    parser.add_argument("--directory", type=Path, help="Where the temporary directory is made.")
    wanted = parser.parse_args()
    ranks = [int(part) for part in wanted.ranks.split(",")]
    found: dict[str, list[Measured]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=wanted.directory) as name:
        size = write_checkpoint(Path(name))
        for layout, rank, one in measured(Path(name), ranks):
            found[layout].append(one)
            print(f"{layout} rank {rank}: {one.read_ratio:.3f} {one.memory_ratio:.3f} {one.seconds:.1f} s", flush=True)
    table = Table("layout", "ranks", "needed MB", "asked/needed", "disk/needed", "peak/share", "host MiB", "s a rank")
    for layout, ones in found.items():
        table.add_row(
            layout,
            str(len(ones)),
            f"{min(one.needed for one in ones) / 1e6:.0f} to {max(one.needed for one in ones) / 1e6:.0f}",
            f"{max(one.read_ratio for one in ones):.3f}",
            f"{max(one.disk / one.needed for one in ones):.2f}",
            f"{max(one.memory_ratio for one in ones):.3f}",
            f"{max(one.grown for one in ones) / 2**20:.0f}",
            f"{sum(one.seconds for one in ones) / len(ones):.1f}",
        )
    Console(width=120).print(table)
    print(f"checkpoint {size / 1e9:.2f} GB; the highest of each layout's ranks; seconds: the mean")
    print(f"goals: at most {READ_LIMIT} times the bytes needed, and {MEMORY_LIMIT} times a rank's share of memory")
    every = [one for ones in found.values() for one in ones]
    if any(one.read_ratio > READ_LIMIT or one.memory_ratio > MEMORY_LIMIT for one in every):
        raise SystemExit("a goal is missed")


if __name__ == "__main__":
    main()
