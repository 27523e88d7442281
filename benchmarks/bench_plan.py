"""What `agent-rl plan` predicts over what is measured, on this machine's CPU: memory of a trainer rank's step, and the
engine's caches as SGLang reports them.

Run: ``python benchmarks/bench_plan.py [--no-engine]``

A rank is a process of its own with one Megatron rank and a random model. Measured is the growth of its resident memory
from before the model is built to the highest point of an update (old log-probs, forward, backward, optimizer), as the
kernel counts it (VmHWM, reset before the update); `in use` with glibc told to give every freed block back
(MALLOC_MMAP_THRESHOLD_), `resident` as ranks really run. The engine is SGLang with random weights; its log says what
its caches take.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resident_memory import resident
from rich.console import Console
from rich.table import Table

from agent_rl.config import EngineConfig, ParallelConfig, TrainConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.planner.memory_model import kv_bytes_per_token, rank_bytes, route_slot_bytes
from agent_rl.planner.planner import glibc_slack

FIXED = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True, "hidden_act": "silu",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "2.1 M (quickstart)": {
        "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "intermediate_size": 128,
    },
    "65 M": {
        "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64,
        "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384,
        "intermediate_size": 512,
    },
}  # fmt: skip
CASES = (
    ("2.1 M (quickstart)", 8192, "none", "float32"),
    ("2.1 M (quickstart)", 8192, "full", "float32"),
    ("65 M", 4096, "none", "float32"),
    ("65 M", 4096, "full", "float32"),
    ("65 M", 4096, "full", "bfloat16"),
)
SLOTS = 131072


def write_config(directory: Path, model: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(FIXED | MODELS[model]))
    return directory


def measure_rank(directory: Path, tokens: int, recompute: str, dtype: str, answer: Any) -> None:
    """In a process of its own: bytes that a rank's memory grew by at its highest."""
    import socket

    import torch

    from agent_rl.train.megatron.parallel import init_parallel

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_parallel(ParallelConfig(), 0, master_addr="127.0.0.1", master_port=port, device=torch.device("cpu"))
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.megatron.packed_batch import PackedBatch
    from agent_rl.train.optimizer import PolicyOptimizer
    from agent_rl.train.requests import OptimizerSpec

    def update(model: PolicyModel, batch: PackedBatch) -> None:
        model.forward_logprobs([batch], [None])
        model.train_microbatches([batch], [None], lambda logprobs, _entropy, _batch: (-logprobs.mean(), {}))
        optimizer.step()

    before = resident("VmRSS")
    width = getattr(torch, dtype)
    model = PolicyModel.build(
        directory, ParallelConfig(), device=torch.device("cpu"), dtype=width, recompute=recompute, load=False
    )  # type: ignore[arg-type]
    optimizer = PolicyOptimizer(model.chunks, OptimizerSpec(lr=1e-6), width)
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    update(model, PackedBatch.from_sequences([[1, 2, 3, 4]]))  # the moments are made
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, vocabulary, (tokens // 4,), generator=generator).tolist() for _ in range(4)]
    update(model, PackedBatch.from_sequences(sequences))
    answer.send(resident("VmHWM") - before)


def measured_rank(*arguments: Any, in_use: bool) -> int:
    context = multiprocessing.get_context("spawn")
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    if in_use:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure_rank, args=(*arguments, send))
    process.start()
    send.close()
    measured: int = receive.recv()
    process.join()
    return measured


def rank_rows(directory: Path) -> Iterator[tuple[str, int, int]]:
    """``(what, predicted, measured)`` in bytes."""
    for model, tokens, recompute, dtype in CASES:
        where = write_config(directory / model.replace(" ", "_"), model)
        train = TrainConfig(microbatch_tokens=tokens, recompute=recompute, dtype=dtype)  # type: ignore[arg-type]
        predicted = rank_bytes(read_model_spec(where), train, microbatches=1, device="cpu")
        case = f"{model}, {tokens} tokens, {dtype}, recompute {recompute}"
        for kind, more in (("in use", 0), ("resident", glibc_slack(predicted, recompute))):
            measured = measured_rank(where, tokens, recompute, dtype, in_use=kind == "in use")
            yield f"{case}: {kind}", predicted.total + more, measured


async def engine_rows(directory: Path) -> list[tuple[str, float, float]]:
    """``(what, predicted, reported)`` in bytes."""
    from agent_rl.engine.launch import EngineServer

    name = "65 M"
    where, log = write_config(directory / "engine", name), directory / "engine.log"
    config = EngineConfig(
        device="cpu", dtype="bfloat16", max_total_tokens=SLOTS, extra_args=("--load-format", "dummy"), threads=1
    )
    async with EngineServer(config, where, log):
        pass
    text, size = log.read_text(), read_model_spec(where)
    kv = re.search(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", text)
    routes = re.search(r"HostCache\[routed_experts\] allocated: shape=\((\d+), (\d+), (\d+)\)", text)
    assert kv is not None, text[-2000:]
    assert routes is not None, text[-2000:]
    slots, layers, top_k = (int(part) for part in routes.groups())
    reported = (float(kv[2]) + float(kv[3])) * 2**30
    return [
        ("KV cache (reported to 10 MiB)", kv_bytes_per_token(size, "bfloat16") * int(kv[1]), reported),
        ("routes", SLOTS * route_slot_bytes(size), slots * layers * top_k * 4),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-engine", action="store_true", help="Leave SGLang out.")
    with tempfile.TemporaryDirectory() as name:
        directory, wanted = Path(name), parser.parse_args()
        table = Table("memory of", "predicted MiB", "measured MiB", "predicted / measured")
        for what, predicted, measured in rank_rows(directory):
            _row(table, what, predicted, measured)
        if not wanted.no_engine:
            for what, predicted, reported in asyncio.run(engine_rows(directory)):
                _row(table, f"engine, 65 M: {what}", predicted, reported)
        Console(width=130).print(table)


def _row(table: Table, what: str, predicted: float, measured: float) -> None:
    print(f"{what}: {predicted / measured:.2f}", file=sys.stderr, flush=True)
    table.add_row(what, f"{predicted / 2**20:.1f}", f"{measured / 2**20:.1f}", f"{predicted / measured:.2f}")


if __name__ == "__main__":
    main()
