"""Tries the trainer on the GPUs of this machine and prints a table to paste: ``python tests/gpu/gpu_run.py``

With one GPU the checks for one, with more those for two or eight as well, within ``--minutes`` (10). What is tried in
which order, and what is expected: ``gpu_checks.py``. Each rank of a check is a process of its own, which sees one GPU;
two layers of Qwen3-30B-A3B's shape with random weights are written to a temporary directory (3.7 GB) for it. Where a
check breaks off or takes too long, that is its line, and the next begins. Exit code 1 where something was not as
expected, or there is no GPU. With ``--cpu`` the checks for one GPU run on a CPU, on a small model, which tests the
script. ``python -m scripts.gpu_wheelhouse`` collects what a machine without network lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks import CHECKS, Check, Outcome, ProbeResponses, Row

from agent_rl.config import RunConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.known_models import CONFIGS
from agent_rl.train.hf_index import expected_shapes

WIDE = CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2}
NARROW = WIDE | {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 64, "num_experts": 16,
    "moe_intermediate_size": 128, "vocab_size": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Where checks run: on ``gpus`` GPUs (or as many CPU ranks, where ``device`` is cpu), with models in
    ``directory`` and micro-batches of so many ``tokens``, until ``deadline`` (of time.monotonic); a check may take
    ``seconds``."""

    device: str
    gpus: int
    directory: Path
    tokens: int
    deadline: float
    seconds: float = 150.0

    def config(self, check: Check) -> RunConfig:
        train = {"dtype": "bfloat16", "recompute": "full", "microbatch_tokens": self.tokens, "replay": "r3"}
        model, tokens = self.directory / ("wide" if check.wide else "narrow"), self.tokens
        data = {"name": "gpu", "model": model, "train": train | check.changes, "rollout": {"max_tokens": tokens}}
        return RunConfig.model_validate(data)


def run(site: Site, checks: Sequence[Check]) -> Iterator[Row]:
    """The lines of all checks that the site has GPUs for, one check after the other."""
    before: dict[str, Mapping[str, Any]] = {}
    for check in checks:
        if check.gpus > site.gpus:
            continue
        left = site.deadline - time.monotonic()
        if left < 1:
            yield Row(check.name, "not begun", "no time was left", "", False)
            continue
        try:
            answers = {where: _ranks(site, check, where, min(left, site.seconds)) for where in check.devices}
            before[check.name] = answers["gpu"][0]
            yield from check.rows(Outcome(check, site.config(check), site.device, answers, site.directory, before))
        except BrokenOff as error:
            yield Row(check.name, "broke off", str(error), "", False)


class BrokenOff(Exception):
    """A rank failed or took too long; the message says which and why, in one line."""


def _ranks(site: Site, check: Check, where: str, seconds: float) -> ProbeResponses:
    """Run a check's ranks, each in a process; their answers by rank."""
    device = site.device if where == "gpu" else "cpu"
    job = {"work": check.work, "config": site.config(check).model_dump(mode="json"), "device": device}
    job |= {"port": _free_ports(), "directory": str(site.directory)}
    processes = [_start(rank, device, check.environment) for rank in range(check.gpus)]
    with ThreadPoolExecutor(check.gpus) as pool:
        try:
            answers = [
                pool.submit(_answer, rank, process, json.dumps(job | {"rank": rank}), seconds)
                for rank, process in enumerate(processes)
            ]
            for answer in as_completed(answers):  # the first that breaks off is named, not those that wait for it
                answer.result()
            return [answer.result() for answer in answers]
        finally:
            for process in processes:
                process.kill()


def _start(rank: int, device: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    hidden = {"CUDA_VISIBLE_DEVICES": str(rank) if device == "cuda" else "", **environment}
    command = [sys.executable, str(Path(__file__).with_name("gpu_rank.py"))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ | hidden)


def _answer(rank: int, process: subprocess.Popen[str], job: str, seconds: float) -> Mapping[str, Any]:
    """Give ``process`` its job and wait for it."""
    try:
        out, err = process.communicate(job, timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BrokenOff(f"rank {rank} took too long") from None
    if process.returncode or not out.strip():
        last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise BrokenOff(f"rank {rank}: {last[0][:200]}")
    answer: Mapping[str, Any] = json.loads(out.strip().splitlines()[-1])
    return answer


def _free_ports() -> int:
    """The first of two neighbouring free ports, which checks use. Both are below the range from which the kernel gives
    ports to other sockets, so none takes them before a rank listens. Raises OSError."""
    for _ in range(100):
        port = random.randrange(20_000, 32_000, 2)
        with contextlib.suppress(OSError), _listening(port), _listening(port + 1):
            return port
    raise OSError("no two neighbouring ports from 20000 to 32000 are free")


def _listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def write_model(directory: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint with random weights, a file a layer."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config}))
    files: dict[str, dict[str, torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    for name, shape in expected_shapes(ModelSpec.of(config)).items():
        weight = torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape, generator=generator)
        part = "-".join(name.split(".")[1:3]) if ".layers." in name else "rest"
        files.setdefault(part, {})[name] = weight.to(torch.bfloat16)
    for part, tensors in files.items():
        save_file(tensors, directory / f"{part}.safetensors")


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    verdicts = {None: "", True: "yes", False: "**NO**"}
    lines = ["| check | what | found | expected | as expected |", "|---|---|---|---|---|"]
    cells = [[row.check, row.what, row.found, row.expected, verdicts[row.good]] for row in rows]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="After so many no other check is begun.")
    parser.add_argument("--cpu", action="store_true", help="Run the checks for one GPU on a CPU, on a small model.")
    parser.add_argument("--out", type=Path, default=Path("gpu-run.md"), help="The table, written after every line.")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    import torch

    if not (options.cpu or torch.cuda.is_available()):
        raise SystemExit("no GPU here: torch sees none, so nothing was run")
    gpus = 1 if options.cpu else torch.cuda.device_count()
    name = f"{gpus} x {'CPU' if options.cpu else torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    print(name, flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="agent-rl-gpu-") as directory:
        write_model(Path(directory) / "wide", NARROW if options.cpu else WIDE)
        write_model(Path(directory) / "narrow", NARROW)
        device, tokens = ("cpu", 64) if options.cpu else ("cuda", 16384)
        for row in run(Site(device, gpus, Path(directory), tokens, deadline), CHECKS):
            print(f"{row.check}: {row.what}: {row.found}", file=sys.stderr, flush=True)
            rows.append(row)
            options.out.write_text(f"{name}\n\n{table(rows)}\n")
    print(table(rows))
    raise SystemExit(any(row.good is False for row in rows))


if __name__ == "__main__":
    main()
