"""Bytes and seconds of weight updates by deltas over those of full ones, to one real SGLang server on this CPU.

Run: ``python benchmarks/bench_weight_delta.py [--models quickstart paper-small large] [--lrs 1e-6 1e-5 3e-4]``

Each update is an AdamW step of float32 weights on the next-token loss of tokens that the model gives itself; the server
holds bfloat16. The same updates are published by deltas to one server and in full to another. Printed are medians over
the updates after the first two: the bytes over those of all weights; the seconds of the whole update and those within
the pause, of both ways; and the seconds that the bytes take over a link of 100 Mbit/s, which a sender on loopback
emulates by sleeping.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_weight_sync import ROOT, SIZES, make
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.config.loader import install_model
from agent_rl.engine.launch import EngineServer
from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import expected_shapes
from agent_rl.weight_sync.delta import DeltaSender
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.requests import PublishReport, PublishRequest

MODELS = {"quickstart": "tiny-moe", "paper-small": "paper-moe", "large": ""}
LINK_BYTES = 100e6 / 8
PAUSED = ("pause", "broadcast", "load", "check")


def write_model(name: str, directory: Path) -> None:
    if MODELS[name]:
        install_model(directory, MODELS[name])
    else:
        make(directory, SIZES["quarter GB"])


class Trained:
    """A model and its updates."""

    def __init__(self, directory: Path, lr: float) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(0)
        self._names = list(dict.fromkeys([*expected_shapes(read_model_spec(directory)), "lm_head.weight"]))

    def step(self) -> None:
        size = self._model.config.vocab_size
        start = torch.randint(0, size, (8, 1), generator=self._generator)
        tokens = self._model.generate(start, max_new_tokens=63, do_sample=True, pad_token_id=0, eos_token_id=None)
        self._model(tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> list[tuple[str, Tensor]]:
        held = split_experts(self._model.state_dict())
        return [(name, held[name]) for name in self._names]


def split_experts(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a checkpoint, where transformers stacks all experts."""
    return dict(_split(held))


def _split(held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in held.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, weight in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}.weight"), half
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), weight
        else:
            yield name, tensor


def over_link(size: int) -> float:
    """Seconds until ``size`` bytes have arrived that are sent at 100 Mbit/s."""
    sender, receiver = socket.socketpair()
    reading = threading.Thread(target=lambda: [None for _ in iter(lambda: receiver.recv(1 << 16), b"")])
    reading.start()
    began, sent, part = time.perf_counter(), 0, bytes(1 << 14)
    while sent < size:
        sender.sendall(part[: size - sent])
        sent = min(size, sent + len(part))
        time.sleep(max(0.0, began + sent / LINK_BYTES - time.perf_counter()))
    sender.close()
    reading.join()
    return time.perf_counter() - began


async def published(way: str, versions: list[Any], directory: Path) -> list[tuple[PublishReport, float]]:
    """The report and the seconds of every update of a new server, by ``full`` ones or by ``delta``."""
    config = EngineConfig(
        python=str(ROOT / ".venv-engine/bin/python"), device="cpu", max_total_tokens=4096, start_timeout=900,
        weight_sync=way, threads=1,
    )  # fmt: skip
    model_spec, results = read_model_spec(directory), []
    async with EngineServer(config, directory, directory / "engine.log") as server:
        publisher = WeightPublisher([server.url], torch.device("cpu"), model_spec, config)
        sender = DeltaSender(model_spec, lambda request: publisher)
        for version, weights in enumerate(versions):
            request, began = PublishRequest((server.url,), str(version), config), time.perf_counter()
            if way == "delta":
                sender.stage(request, weights)
                report = sender.publish(request)
            else:
                report = publisher.publish(weights, request.version)
            results.append((report, time.perf_counter() - began))
            assert not report.failures
            assert report.verified == 1
        publisher.close()
    return results[2:]


async def measure(name: str, lr: float, updates: int, directory: Path) -> None:
    write_model(name, directory)
    versions, trained = [], Trained(directory, lr)
    for _ in range(updates + 2):
        trained.step()
        versions.append([(name, tensor.to(torch.bfloat16, copy=True)) for name, tensor in trained.weights()])
    print_ratios(name, lr, *[await published(way, versions, directory) for way in ("delta", "full")])


def print_ratios(
    name: str, lr: float, delta: list[tuple[PublishReport, float]], full: list[tuple[PublishReport, float]]
) -> None:
    def paused(report: PublishReport) -> float:
        return sum(report.seconds.get(stage, 0.0) for stage in PAUSED)

    sent, size = (statistics.median(report.bytes for report, _ in way) for way in (delta, full))
    whole = [statistics.median(seconds for _, seconds in way) for way in (delta, full)]
    stopped = [statistics.median(paused(report) for report, _ in way) for way in (delta, full)]
    link = [over_link(round(each)) for each in (sent, size)]
    print(
        f"{name} ({size / 1e6:.1f} MB), lr {lr:g}: bytes {sent / size:.4f} of a full update; seconds {whole[0]:.3f} of "
        f"{whole[1]:.3f}, in the pause {stopped[0]:.3f} of {stopped[1]:.3f}; over 100 Mbit/s {link[0]:.3f} of "
        f"{link[1]:.3f}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)  # beside other work OpenMP's waiting threads would be what is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lrs", nargs="*", type=float, default=[1e-6, 1e-5, 3e-4])
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    for name in options.models:
        for lr in options.lrs:
            with tempfile.TemporaryDirectory() as directory:
                asyncio.run(measure(name, lr, options.updates, Path(directory)))


if __name__ == "__main__":
    main()
