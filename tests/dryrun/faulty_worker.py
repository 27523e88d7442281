"""Dry-runs ranks one after another, each in a fork of a process that has imported everything, some with a reintroduced
fault. Reads pickled (fault, job) pairs from standard input and writes one record per line."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

from agent_rl.dryrun.fake_device import load_device_guard
from agent_rl.dryrun.job import RankJob, RankRecord
from agent_rl.planner.hardware import GPUS


def main() -> None:
    pairs: list[tuple[str, RankJob]] = pickle.load(sys.stdin.buffer)
    load_device_guard(pairs[0][1].library)
    from agent_rl.dryrun.rank import RankEnvironment

    stage = RankEnvironment.install(GPUS["H100 SXM"])
    import agent_rl.train.megatron.model
    import agent_rl.train.worker  # noqa: F401

    for fault, job in pairs:
        sys.stdout.buffer.write(_run_in_fork(fault, job, stage).dump() + b"\n")


def _run_in_fork(fault: str, job: RankJob, stage: Any) -> RankRecord:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        from agent_rl.dryrun.rank import dry_run_rank

        try:
            FAULTS[fault]()
            with os.fdopen(write, "wb") as out:
                out.write(dry_run_rank(job, stage).dump())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as result:
        data = result.read()
    os.waitpid(child, 0)
    return RankRecord.load(data)


def _device_without_index() -> None:
    import torch

    from agent_rl.train import worker as rank

    rank.device_of = lambda kind: torch.device(kind)


def _gates_are_kept() -> None:
    """Megatron's dispatcher holds the gates of a pass, and by their graph what the pass kept."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from agent_rl.train.megatron.moe import ReleasingMoELayer

    ReleasingMoELayer.postprocess = MoELayer.postprocess


def _router_on_the_host() -> None:
    """Megatron makes a router's weights on the default device."""
    import torch
    from megatron.core.transformer.moe.router import Router

    plain = Router.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        with torch.device("cpu"):
            plain(self, *args, **options)

    Router.__init__ = made


def _pinned_in_powers_of_two() -> None:
    import torch

    from agent_rl.train.checkpoint import rank_state

    rank_state.host_tensor = lambda count, dtype, pinned: torch.empty(count, dtype=dtype, pin_memory=pinned)


def _chunks_of_a_cpu() -> None:
    from agent_rl.train.megatron import logprobs

    logprobs.CHUNK_LOGITS = {"cuda": 1 << 24}


def _engines_of_one_rank() -> None:
    from agent_rl.weight_sync import receivers

    receivers._ranks = lambda url, info: 1


def _group_destroyed_within_a_broadcast() -> None:
    import torch

    from agent_rl.weight_sync.publisher import WeightPublisher

    WeightPublisher._destroy = lambda self, group: torch.distributed.destroy_process_group(group)


def _table_on_the_host() -> None:
    """Rotary tables are not moved to the GPU."""
    import torch

    from agent_rl.train.megatron import attention

    plain = attention.rotary_tables
    attention.rotary_tables = lambda *given: tuple(torch.zeros(table.shape) for table in plain(*given))


def _experts_out_of_line() -> None:
    """Operands of the grouped product that don't begin every row at a multiple of 16 bytes."""
    import torch.nn.functional as functional

    plain = functional.grouped_mm

    def odd(left: Any, right: Any, **options: Any) -> Any:
        return plain(left.new_zeros(left.shape[0], left.shape[1] + 1)[:, :-1], right, **options)

    functional.grouped_mm = odd


def _a_wait_more() -> None:
    from agent_rl.train.megatron.moe import Experts

    plain = Experts.forward

    def forward(self: Any, tokens: Any, *rest: Any) -> Any:
        tokens.sum().item()
        return plain(self, tokens, *rest)

    Experts.forward = forward


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "a device without an index": _device_without_index,
    "gates are kept": _gates_are_kept,
    "a router on the host": _router_on_the_host,
    "memory pinned in powers of two": _pinned_in_powers_of_two,
    "chunks of a CPU": _chunks_of_a_cpu,
    "engines of one rank": _engines_of_one_rank,
    "a group destroyed within a broadcast": _group_destroyed_within_a_broadcast,
    "a table on the host": _table_on_the_host,
    "experts out of line": _experts_out_of_line,
    "a wait more": _a_wait_more,
}


if __name__ == "__main__":
    main()
