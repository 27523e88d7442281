"""One rank of a check, in a process of its own: a JSON job on stdin, a JSON object as the last line of stdout.

A job has ``work`` (a function below), ``config`` (a run's), ``device`` (cpu or cuda), ``rank``, ``port`` and
``directory``, where files may be put.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import pickle
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.dryrun.batch import make_samples, mini_step_share
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import shard_routes
from agent_rl.train.worker import TrainerWorker, device_of
from agent_rl.weight_sync.bucket_sender import join_group
from agent_rl.weight_sync.buckets import Bucket
from agent_rl.weight_sync.shared_buckets import SharedBuckets

HANGING_SECONDS = 5.0
TIMED_TOKENS = {"cuda": (8192, 32768, 65536), "cpu": (64,)}


class Stepped:
    """A rank of the trainer, and the step that it makes again and again."""

    def __init__(self, job: dict[str, Any]) -> None:
        config, begun = RunConfig.model_validate(job["config"]), time.perf_counter()
        self.config, self.device = config, job["device"]
        order = WorkerRequest(config, read_model_spec(config.model), config.model, None, job["device"], threads=1)
        self.rank = TrainerWorker(
            order, OptimizerSpec.of(config.train), job["rank"], master_addr="127.0.0.1", master_port=job["port"]
        )
        self.started = time.perf_counter() - begun
        model = self.rank.model
        self.samples = make_samples(config, model.model_spec, 0, 1.0)  # the same on every rank, and even
        self.share = mini_step_share(self.samples, config)
        listed = [self.samples[index] for index in sorted(self.samples)]
        self.routes = [shard_routes(listed, ids, model.shard) for ids in self.share.micro_batches]

    def step(self) -> dict[str, float]:
        """Loss, gradient norm, routers that did not use the given experts, seconds."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        begun, order = time.perf_counter(), StepRequest(self.config, measure_without_replay=False)
        report, differing, _ = self.rank.grpo(self.samples, [self.share], order, self.routes)
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        differ = 0 if differing is None else sum(int(np.unpackbits(part).sum()) for part in differing.replayed)
        sums = report.updates[0] if report is not None else None
        loss, norm = (sums.loss, sums.update.grad_norm) if sums is not None else (0.0, 0.0)
        return {"loss": loss, "grad_norm": norm, "differ": differ, "seconds": seconds}


def step(job: dict[str, Any]) -> dict[str, Any]:
    """Two steps; the second is timed. On a GPU ``peak``: bytes of tensors at most, ``reserved``: what the allocator
    took for them, and ``waits``: how often the host waited in a third step."""
    stepped = Stepped(job)
    found = [stepped.step(), stepped.step()]
    on_gpu = stepped.device == "cuda"
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (0, 0)
    weights = sum(float(p.detach().double().abs().sum()) for m in stepped.rank.model.modules for p in m.parameters())
    waits = _host_waits(stepped) if on_gpu and job["config"]["train"]["replay"] == "r3" else None
    notes = list(stepped.rank.model.notes)
    stepped.rank.close()
    finite = all(math.isfinite(value) for one in found for value in one.values())
    memory = {"peak": peak, "reserved": reserved, "waits": waits}
    return found[1] | memory | {"finite": finite, "weights": weights, "started": stepped.started, "notes": notes}


def _host_waits(stepped: Stepped) -> int:
    """How often the host waits for the GPU in a step, which torch counts."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            stepped.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen)


def resume(job: dict[str, Any]) -> dict[str, Any]:
    """Two steps with a checkpoint between them, and the second again by a rank that loaded it."""
    directory = Path(job["directory"]) / "checkpoint"
    first = Stepped(job)
    first.step()
    begun = time.perf_counter()
    updates, counts = first.rank.save(checkpoint.begin(directory))
    train, checksum = first.config.train, first.rank.written()
    manifest = checkpoint.Manifest(
        checkpoint.FORMAT, updates, counts, train.parallel.model_dump(), train.dtype, (checksum,)
    )
    checkpoint.commit(directory, manifest)
    saved, wanted = time.perf_counter() - begun, first.step()
    first.rank.close()
    del first
    gc.collect()  # the second rank wants the first one's memory
    torch.cuda.empty_cache()
    second = Stepped(job | {"port": job["port"] + 1})
    second.rank.load(directory, manifest)
    found = second.step()
    second.rank.close()
    shutil.rmtree(directory)
    return {"wanted": wanted["grad_norm"], "found": found["grad_norm"], "saved": saved}


def logprobs(job: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of all samples, to ``logprobs-DEVICE.npy``."""
    stepped = Stepped(job)
    answer, _ = stepped.rank.logprobs(stepped.samples, stepped.share.micro_batches, 1.0, False, stepped.routes)
    stepped.rank.close()
    np.save(
        Path(job["directory"]) / f"logprobs-{job['device']}.npy", np.concatenate([answer[i] for i in sorted(answer)])
    )
    return {"tokens": sum(len(one) for one in answer.values())}


def kernels(job: dict[str, Any]) -> dict[str, Any]:
    """Every kernel that is installed on its small case (its error, and what is allowed), and attention's rates."""
    config = RunConfig.model_validate(job["config"])
    device, model_spec = device_of(job["device"]), read_model_spec(config.model)
    init_parallel(ParallelConfig(), 0, master_addr="127.0.0.1", master_port=job["port"], device=device)
    from agent_rl.train.megatron import kernel_choice as choice

    rows: list[list[Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        exams = (
            (choice.attentions(dtype, device), choice.attention_check(model_spec, ParallelConfig(), dtype)),
            (choice.EXPERT_MATMULS, choice.expert_matmul_check(model_spec, dtype)),
            ([way() for way in choice.PERMUTATIONS], choice.permutation_check(model_spec, dtype)),
        )
        for candidates, check in exams:
            for one in candidates:
                if one.installed:
                    fault = choice.check_kernel(one, check, device)
                    rows.append([one.name, str(dtype).removeprefix("torch."), fault])
    rates = [
        [one.name, tokens, _rate(one.kernel, model_spec, device, tokens)]
        for one in choice.attentions(torch.bfloat16, device)
        for tokens in TIMED_TOKENS[device.type]
        if one.installed
    ]
    destroy_parallel()
    return {"rows": rows, "rates": rates}


def _rate(attend: Any, model_spec: ModelSpec, device: torch.device, tokens: int) -> float | None:
    """TFLOP/s in bfloat16; None where the kernel raises."""
    from agent_rl.train.megatron.kernel_choice import attention_rate

    try:
        sizes = (model_spec.heads, model_spec.kv_heads, model_spec.head_dim)
        return attention_rate(attend, sizes, torch.bfloat16, device, tokens)
    except Exception:  # which one, its small case says
        return None


def copies(job: dict[str, Any]) -> dict[str, Any]:
    """GiB/s of copies between host and device, pinned and not, and of a grouped matmul TFLOP/s by the skew of its
    tokens: all experts alike, and half of the tokens for one."""
    from agent_rl.train.megatron.moe import grouped_matmul

    device, model_spec = device_of(job["device"]), read_model_spec(RunConfig.model_validate(job["config"]).model)
    on_gpu = device.type == "cuda"
    size, tokens = (1 << 30, 65536) if on_gpu else (1 << 20, 64)
    there, rates = torch.empty(size, dtype=torch.uint8, device=device), dict[str, float]()
    for pinned in (True, False) if on_gpu else (False,):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for name, target, source in (("to", there, host), ("from", host, there)):
            key = f"{name} the device, {'pinned' if pinned else 'pageable'}"
            rates[key] = size / _seconds(lambda target=target, source=source: target.copy_(source), device) / 2**30
    experts, inner, hidden = model_spec.num_experts, model_spec.expert_inner, model_spec.hidden
    weight = torch.randn(experts, inner, hidden, dtype=torch.bfloat16, device=device)
    rows, flops = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device), 2 * tokens * hidden * inner
    products = dict[str, float]()
    for name, first in (("even", tokens // experts), ("half of the tokens for one expert", tokens // 2)):
        rest = torch.full((experts - 1,), (tokens - first) // (experts - 1))
        ends = torch.cat((torch.tensor([first]), rest)).cumsum(0)
        ends[-1] = tokens
        given = ends.to(device, torch.int32)
        seconds = _seconds(lambda given=given: grouped_matmul(rows, weight, given), device)
        products[name] = flops / seconds / 1e12
    return {"copies": rates, "products": products}


def group(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds to make the group of a weight sync, to broadcast in it, and to leave it. With two ranks the second hangs:
    it joins and takes part in no broadcast, so the first aborts after :data:`HANGING_SECONDS`."""
    device, parallel = device_of(job["device"]), ParallelConfig.model_validate(job["config"]["train"]["parallel"])
    init_parallel(parallel, job["rank"], master_addr="127.0.0.1", master_port=job["port"], device=device)
    backend, seconds, begun = "nccl" if device.type == "cuda" else "gloo", dict[str, float](), time.perf_counter()
    limit = HANGING_SECONDS if backend == "gloo" else 60.0  # gloo has no abort, and ends its broadcast itself
    made = join_group("127.0.0.1", job["port"] + 1, job["rank"], parallel.world_size, "sync", backend, limit)
    seconds["making the group"] = time.perf_counter() - begun
    if job["rank"]:
        torch.distributed.barrier()  # until the first rank has left
        return {}
    data, begun = torch.ones(1 << 20, dtype=torch.uint8, device=device), time.perf_counter()
    sending = threading.Thread(target=_broadcast, args=(data, made), daemon=True)  # NCCL connects within it
    sending.start()
    sending.join(HANGING_SECONDS)
    seconds["a broadcast, or giving it up"], begun = time.perf_counter() - begun, time.perf_counter()
    end = dist.distributed_c10d._abort_process_group if backend == "nccl" else dist.destroy_process_group
    end(made)
    seconds["leaving the group"] = time.perf_counter() - begun
    torch.distributed.barrier()  # the trainer's own group works
    return {"seconds": seconds}


def _broadcast(data: torch.Tensor, made: Any) -> None:
    with contextlib.suppress(RuntimeError):
        dist.broadcast(data, group=made, group_src=0)
        if data.is_cuda:
            torch.cuda.synchronize()


def shared(job: dict[str, Any]) -> dict[str, Any]:
    """By way: GiB/s of buckets to another process on this device, and whether it has the same bytes."""
    device, size = device_of(job["device"]), (512 if job["device"] == "cuda" else 1) << 20
    context, port = multiprocessing.get_context("spawn"), job["port"]
    here, there = context.Pipe()
    process = context.Process(target=_receiver, args=(there, device, size, port), daemon=True)
    process.start()
    made = join_group("127.0.0.1", port, 0, 2, "gloo", "gloo", 60.0)
    buckets = SharedBuckets(lambda item: [item], "0")
    data = buckets.allocate(size, device)
    data.copy_(torch.arange(size, device=device) % 251)
    bucket = Bucket(("weights",), ((size,),), (torch.uint8,), data, last=True)

    def send(by_handle: bool) -> None:
        here.send(buckets.handles(bucket)[0] if by_handle else None)
        if not by_handle:
            dist.broadcast(data, group=made, group_src=0)
        here.recv()

    ways, total = dict[str, tuple[float, bool]](), int(data.sum(dtype=torch.int64))
    for way, by_handle in (("CUDA IPC" if device.type == "cuda" else "shared memory", True), ("gloo", False)):
        seconds = _seconds(lambda by_handle=by_handle: send(by_handle), device)
        here.send("sum")
        ways[way] = (size / seconds / 2**30, here.recv() == total)
    here.send("end")
    process.join(20)
    buckets.close()
    return {"ways": ways}


def _receiver(pipe: Any, device: torch.device, size: int, port: int) -> None:
    """The other process of :func:`shared`: copies what it receives, as an engine does."""
    rebuild = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = lambda *given: rebuild(*given[:6], device.index, *given[7:])
    made = join_group("127.0.0.1", port, 1, 2, "gloo", "gloo", 60.0)
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    while (message := pipe.recv()) != "end":
        if message == "sum":
            pipe.send(int(own.sum(dtype=torch.int64)))
            own.zero_()
            continue
        if message is None:
            dist.broadcast(own, group=made, group_src=0)
        else:
            own.copy_(pickle.loads(message)["flattened_tensor"])
        if device.type == "cuda":
            torch.cuda.synchronize()
        pipe.send("loaded")


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The best of three runs after a first one."""
    best = math.inf
    for run in range(4):
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun) if run else best
    return best


WORK: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "step": step, "resume": resume, "logprobs": logprobs, "kernels": kernels, "copies": copies,
    "group": group, "shared": shared,
}  # fmt: skip

if __name__ == "__main__":
    given = json.load(sys.stdin)
    print("\n" + json.dumps(WORK[given["work"]](given)), flush=True)
