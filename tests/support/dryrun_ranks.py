"""Dry-runs ranks of small and large models for tests, each in a fork of one process that has imported everything."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rl.config import RunConfig
from agent_rl.dryrun.fake_device import build_device_guard
from agent_rl.dryrun.job import RankJob, RankRecord
from agent_rl.planner.known_models import CONFIGS

WORKER = Path(__file__).parents[1] / "dryrun" / "faulty_worker.py"
TINY = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "max_position_embeddings": 4096, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}  # fmt: skip


def write_model(directory: Path, raw: Mapping[str, Any] = TINY, **changes: Any) -> Path:
    """Write a directory with a config.json and no weights."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**raw, **changes}))
    return directory


def write_30b(directory: Path, layers: int) -> Path:
    """Write the config of Qwen3-30B-A3B with ``layers`` layers."""
    return write_model(directory, CONFIGS["Qwen3-30B-A3B"], num_hidden_layers=layers)


def config_of(
    model: Path | str,
    tokens: int = 256,
    *,
    train: Mapping[str, Any] | None = None,
    colocate: bool = False,
    **parallel: Any,
) -> RunConfig:
    """Full micro-batches of one trajectory of ``tokens`` tokens in bfloat16, and two engines of two GPUs each."""
    train_section = {"dtype": "bfloat16", "recompute": "full", "microbatch_tokens": tokens, "parallel": parallel}
    train_section |= train or {}
    engine = {"count": 2, "gpus": 2, "colocate": colocate}
    data = {"name": "dry-run", "model": str(model), "train": train_section, "rollout": {"max_tokens": tokens}}
    return RunConfig.model_validate(data | {"engine": engine})


def dry_run_records(jobs: Sequence[tuple[str, RunConfig, int]]) -> list[RankRecord]:
    """Returns the record of each (fault, config, rank), run with the fault reintroduced."""
    library = build_device_guard()
    pairs = [(fault, RankJob(config, config.model, rank, 1.0, library)) for fault, config, rank in jobs]
    done = subprocess.run([sys.executable, str(WORKER)], input=pickle.dumps(pairs), capture_output=True, check=False)
    records = [RankRecord.load(line) for line in done.stdout.splitlines()]
    assert len(records) == len(jobs), done.stderr.decode()[-3000:]
    return records
