"""Bytes and seconds of weight updates by deltas over those of full ones, to three real SGLang servers on this CPU.

Run as root: ``python benchmarks/bench_weight_delta.py [--models quickstart paper-small large] [--lrs 1e-6 1e-5 3e-4]``

The trainer and each server are behind a link of 100 Mbit/s in both directions: the servers run in network namespaces of
their own, joined by a bridge. Each update is an AdamW step of float32 weights on the next-token loss of tokens that the
model gives itself; the servers hold bfloat16. Updates of the first learning rate are also published in full. Printed
are medians over the updates after the first two (the first one of full updates): the bytes over those of all weights,
and the seconds of the whole update and of the pause.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_weight_sync import ROOT, SIZES, make
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.config.loader import install_model
from agent_rl.engine.launch import EngineServer, ServerNode
from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import expected_shapes
from agent_rl.weight_sync.delta_sender import DeltaSender
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.requests import PublishReport, PublishRequest

NAME, SUBNET = "delta-bench", "10.213.77"
CONFIG = EngineConfig(
    device="cpu", max_total_tokens=4096, start_timeout=900, weight_sync="delta", weight_sync_timeout=900, threads=1
)
MODELS = {"quickstart": "tiny-moe", "paper-small": "paper-moe", "large": ""}
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


@contextmanager
def linked(count: int) -> Iterator[list[str]]:
    """``count`` network namespaces ``delta-bench1``, ..., each behind a link of 100 Mbit/s, as this process is. Their
    addresses."""
    shape = "root tbf rate 100mbit burst 64kb latency 1s"
    commands = [
        f"ip link add {NAME} type bridge", f"ip addr add {SUBNET}.1/24 dev {NAME}", f"ip link set {NAME} up",
        f"tc qdisc add dev {NAME} {shape}",
    ]  # fmt: skip
    for number in range(1, count + 1):
        host, port = f"{NAME}{number}", f"{NAME}-{number}"
        commands += [
            f"ip netns add {host}", f"ip link add {port} type veth peer name eth0 netns {host}",
            f"ip link set {port} master {NAME} up", f"tc qdisc add dev {port} {shape}",
            f"ip -n {host} addr add {SUBNET}.{number + 1}/24 dev eth0", f"ip -n {host} link set eth0 up",
            f"ip -n {host} link set lo up", f"tc -n {host} qdisc add dev eth0 {shape}",
        ]  # fmt: skip
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield [f"{SUBNET}.{number + 1}" for number in range(1, count + 1)]
    finally:
        for number in range(1, count + 1):
            subprocess.run(["ip", "netns", "del", f"{NAME}{number}"], check=False)
        subprocess.run(["ip", "link", "del", NAME], check=False)


class LinkedServer(EngineServer):
    """A server whose address is in a namespace, so that this process cannot ask for a free port."""

    def _select_port(self) -> int:
        return 30000


@asynccontextmanager
async def engines(directory: Path, addresses: list[str]) -> AsyncIterator[list[str]]:
    """The addresses of servers of the model in ``directory``, one in each namespace."""
    async with AsyncExitStack() as stack:
        servers = []
        for number, address in enumerate(addresses, 1):
            python = directory / f"python{number}"
            python.write_text(
                f"#!/bin/sh\nexec ip netns exec {NAME}{number} env GLOO_SOCKET_IFNAME=eth0 "
                f'{ROOT}/.venv-engine/bin/python "$@"\n'
            )
            python.chmod(0o755)
            config = CONFIG.model_copy(update={"python": str(python)})
            log = directory / f"engine{number}.log"
            servers.append(LinkedServer(config, directory, log, node=ServerNode(address)))
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers))
        yield [server.url for server in servers]


def published(way: str, versions: list[Any], urls: list[str], directory: Path) -> list[tuple[PublishReport, float]]:
    """The report and the seconds of every update but the first, by ``full`` ones or by ``delta``."""
    results, model_spec = [], read_model_spec(directory)
    publisher = WeightPublisher(urls, torch.device("cpu"), model_spec, CONFIG)
    sender = DeltaSender(model_spec, lambda request: publisher)
    for version, weights in enumerate(versions):
        request, began = PublishRequest(tuple(urls), str(version), CONFIG), time.perf_counter()
        if way == "delta":
            assert not sender.stage(request, weights)
            report = sender.publish(request)
        else:
            report = publisher.publish(weights, request.version)
        results.append((report, time.perf_counter() - began))
        assert not report.failures
        assert report.verified == 1
    publisher.close()
    return results[1:]


async def measure(name: str, lrs: list[float], updates: int, directory: Path, addresses: list[str]) -> None:
    write_model(name, directory)
    full: list[tuple[PublishReport, float]] = []
    async with engines(directory, addresses) as urls:
        for lr in lrs:
            versions, trained = [], Trained(directory, lr)
            for _ in range(updates + 2):
                trained.step()
                versions.append([(name, tensor.to(torch.bfloat16, copy=True)) for name, tensor in trained.weights()])
            delta = await asyncio.to_thread(published, "delta", versions, urls, directory)
            full = full or await asyncio.to_thread(published, "full", versions[1:], urls, directory)
            print_ratios(name, lr, delta[1:], full)


def print_ratios(
    name: str, lr: float, delta: list[tuple[PublishReport, float]], full: list[tuple[PublishReport, float]]
) -> None:
    def paused(report: PublishReport) -> float:
        return sum(report.seconds.get(stage, 0.0) for stage in PAUSED)

    sent, size = (statistics.median(report.bytes for report, _ in way) for way in (delta, full))
    whole = [statistics.median(seconds for _, seconds in way) for way in (delta, full)]
    stopped = [statistics.median(paused(report) for report, _ in way) for way in (delta, full)]
    print(
        f"{name} ({size / 1e6:.1f} MB), lr {lr:g}: bytes {sent / size:.4f} of a full update; seconds {whole[0]:.3f} of "
        f"{whole[1]:.3f}, in the pause {stopped[0]:.3f} of {stopped[1]:.3f}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)  # beside other work OpenMP's waiting threads would be what is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lrs", nargs="*", type=float, default=[1e-6, 1e-5, 3e-4])
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = NAME
    with linked(3) as addresses:
        for name in options.models:
            with tempfile.TemporaryDirectory() as directory:
                asyncio.run(measure(name, options.lrs, options.updates, Path(directory), addresses))


if __name__ == "__main__":
    main()
