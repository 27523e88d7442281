"""Seconds to publish weights to one real SGLang server over those of a plain broadcast of the same bytes, on this CPU.

Run: ``python benchmarks/bench_weight_sync.py [rounds] [bucket megabytes ...]`` (7 rounds, the default bucket size)

Float32 weights go to a bfloat16 server as the trainer's rank 0 sends them. Of each stage is printed what it adds to the
wall time: ``pause`` what is left of it when the first bucket is prepared, ``broadcast`` what is left when the next one
is, ``load`` what is left after the last broadcast, ``check`` checksums and resume; and of each HTTP call how long its
replies took in all (one that announces a bucket is answered once the engine has loaded it). The plain broadcast is one
gloo broadcast of as many bytes from this process to one other. The two take turns; ratios are of medians, with the
quartiles of the rounds' own ratios beside them. Then the same in memory that trainer and engine share. Two models: the
quickstart's size and one of a quarter gigabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timing import time_call
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, free_port
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.utils.http import BlockingHttp
from agent_rl.weight_sync.bucket_sender import join_group
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.requests import PublishReport
from agent_rl.weight_sync.shared_buckets import SharedBuckets

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("pause", "prepare", "broadcast", "load", "check")
SIZES: dict[str, dict[str, Any]] = {
    "quickstart's": {"vocab_size": 1024, "hidden_size": 128, "num_experts": 8, "moe_intermediate_size": 128},
    "quarter GB": {"vocab_size": 8192, "hidden_size": 1024, "num_experts": 16, "moe_intermediate_size": 512},
}

RECEIVER = """
import sys, torch
from agent_rl.weight_sync.bucket_sender import join_group
port, size = int(sys.argv[1]), int(sys.argv[2])
group = join_group("127.0.0.1", port, 1, 2, "plain", "gloo", 600.0)
data = torch.empty(size, dtype=torch.uint8)
for _ in range(int(sys.argv[3])):
    torch.distributed.broadcast(data, group=group, group_src=0)
"""


def make(directory: Path, sizes: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """A random checkpoint in ``directory``, and its float32 tensors in the order of an export."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3MoeConfig(
        **common, **sizes, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=4096, rope_theta=1e6
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    return [(name, weights[name].float()) for name in sorted(weights, key=_place)]


def _place(name: str) -> tuple[str, bool, int, int]:
    """Parts of one engine parameter stand in a row: q, k, v; each expert's gate and up; the experts' down."""
    parts = [index for index, part in enumerate(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) if part in name]
    expert = re.search(r"experts\.(\d+)", name)
    group = re.sub(r"(self_attn\.)[qkv]_proj|(mlp\.experts).*", r"\1\2", name)
    return group, "down_proj" in name, int(expert[1]) if expert else 0, parts[0] if parts else 0


def seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    return time_call(call)


def plain(size: int, rounds: int) -> Callable[[], None]:
    """One broadcast of ``size`` bytes to another process, on call."""
    port = free_port()
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, str(port), str(size), str(rounds)], cwd=ROOT)
    group = join_group("127.0.0.1", port, 0, 2, "plain", "gloo", 600.0)
    data = torch.zeros(size, dtype=torch.uint8)
    left = iter(range(rounds, 0, -1))

    def once() -> None:
        torch.distributed.broadcast(data, group=group, group_src=0)
        if next(left) == 1:
            torch.distributed.destroy_process_group(group)
            receiver.wait(60)

    return once


async def measure(name: str, rounds: int, buckets: list[float], directory: Path) -> None:
    weights = make(directory, SIZES[name])
    size = 2 * sum(tensor.numel() for _, tensor in weights)
    config = EngineConfig(
        python=str(ROOT / ".venv-engine/bin/python"), device="cpu", max_total_tokens=4096, start_timeout=900
    )
    async with EngineServer(config, directory, directory / "engine.log") as server:
        for megabytes in buckets:
            own = config.model_copy(update={"weight_bucket_mb": megabytes})
            for shares in (False, True):
                compare(name, server.url, read_model_spec(directory), weights, size, rounds, own, shares=shares)


class TimedHttp(BlockingHttp):
    """Keeps the ``seconds`` that the replies of each endpoint took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds: Counter[str] = Counter()

    def post(self, url: str, body: Mapping[str, Any]) -> bytes:
        began = time.perf_counter()
        try:
            return super().post(url, body)
        finally:
            self.seconds[url.rpartition("/")[2]] += time.perf_counter() - began


def update(link: WeightPublisher, weights: list[tuple[str, Tensor]], version: int, *, shares: bool) -> PublishReport:
    """Publish, in memory that the engine ``shares`` or by broadcast."""
    shared = SharedBuckets(lambda item: [item], "0") if shares else None
    report = link.publish(weights, str(version), shared=shared, gpus=[["0"]])
    if shared is not None:
        shared.close()
    return report


def compare(
    name: str,
    url: str,
    model_spec: ModelSpec,
    weights: list[tuple[str, Tensor]],
    size: int,
    rounds: int,
    config: EngineConfig,
    *,
    shares: bool,
) -> None:
    link = WeightPublisher([url], torch.device("cpu"), model_spec, config)
    link._receivers._http = http = TimedHttp(config.weight_sync_timeout)
    first = update(link, weights, 0, shares=shares)  # joins
    calls: list[Counter[str]] = []
    broadcast, reports, took, baseline = plain(size, rounds + 1), [], [], []
    broadcast()

    def publish(version: int) -> None:
        http.seconds = Counter()
        reports.append(update(link, weights, version, shares=shares))
        calls.append(http.seconds)

    for number in range(1, rounds + 1):
        took.append(seconds(lambda n=number: publish(n)))
        baseline.append(seconds(broadcast))
    link.close()
    assert not any(report.failures for report in (first, *reports))
    ratios = statistics.quantiles([a / b for a, b in zip(took, baseline, strict=True)], n=4)
    middle, floor = statistics.median(took), statistics.median(baseline)
    print(
        f"{name}: {size / 1e6:.1f} MB, {'shared ' if shares else ''}buckets of {config.bucket_mb(cuda=False):g} MiB: "
        f"publish {1e3 * middle:.0f} ms, "
        f"plain broadcast {1e3 * floor:.1f} ms, ratio {middle / floor:.2f} (quartiles {ratios[0]:.2f}, {ratios[2]:.2f})"
    )
    stages = {stage: statistics.median(report.seconds[stage] for report in reports) for stage in STAGES}
    split = ", ".join(f"{stage} {1e3 * value:.0f}" for stage, value in stages.items())
    print(f"  ms: {split}; joining once {1e3 * first.seconds['join']:.0f}")
    replies = {endpoint: statistics.median(each[endpoint] for each in calls) for endpoint in calls[0]}
    print("  replies, ms:", ", ".join(f"{endpoint} {1e3 * value:.1f}" for endpoint, value in replies.items()))


def main() -> None:
    torch.set_num_threads(1)  # beside other work OpenMP's waiting threads would be what is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=7)
    parser.add_argument("buckets", nargs="*", type=float, default=[EngineConfig().bucket_mb(cuda=False)], help="MiB")
    options = parser.parse_args()
    for name in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(measure(name, options.rounds, options.buckets, Path(directory)))


if __name__ == "__main__":
    main()
