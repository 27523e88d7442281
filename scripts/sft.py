"""Supervised training of token sequences with a loss weight per token, on the same workers as GRPO."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_rl.errors import TrainerError
from agent_rl.train.batching.partition import check_lengths
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.train.reports import WeightedSequences
from agent_rl.train.requests import OptimizerSpec


@dataclass(frozen=True, slots=True)
class SftConfig:
    """``steps`` updates of ``batch`` sequences. ``seed`` shuffles the sequences in every epoch. With a checkpoint
    directory, one is written every ``checkpoint_every`` updates."""

    steps: int
    batch: int = 8
    lr: float = 3e-3
    warmup_steps: int = 30
    seed: int = 0
    checkpoint_every: int = 100

    def optimizer(self) -> OptimizerSpec:
        """AdamW with warm-up, then a cosine down to a tenth of ``lr``."""
        return OptimizerSpec(
            lr=self.lr,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            grad_clip=1.0,
            warmup_steps=self.warmup_steps,
            total_steps=self.steps,
            schedule="cosine",
            min_lr_ratio=0.1,
        )


@dataclass(frozen=True, slots=True)
class SftProgress:
    """After update ``step``: ``loss`` is the weighted mean over its tokens; ``seconds`` are those of all starts."""

    step: int = 0
    loss: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0


async def sft(
    trainer: RayTrainer,
    sequences: WeightedSequences,
    config: SftConfig,
    progress: Callable[[SftProgress], None] | None = None,
    checkpoints: Path | None = None,
) -> None:
    """Train a started trainer on ``(tokens, weights)`` pairs; ``weights`` ``[S]`` scale each token's cross entropy.

    The optimizer is new, unless the directory ``checkpoints`` has a checkpoint of the same sequences and config: then
    training continues from it and reaches the same weights. Raises TrainerError for tokens and weights of different
    lengths.
    """
    _check(sequences)
    check_lengths([len(tokens) for tokens, _ in sequences], trainer.config.train.microbatch_tokens)
    await trainer.set_optimizer(config.optimizer())
    done = await _resumed(trainer, checkpoints)
    started = time.perf_counter() - done.seconds
    for step, ids in enumerate(batches(len(sequences), config)[done.step :], start=done.step + 1):
        values = await trainer.supervise([sequences[i] for i in ids])
        if not values["train/updates"]:
            raise TrainerError(f"supervised update {step} was skipped: its loss or gradient is not finite")
        done = SftProgress(step, values["sft/loss"], values["train/lr"], time.perf_counter() - started)
        if progress is not None:
            progress(done)
        if checkpoints is not None and step % config.checkpoint_every == 0:
            await _save(trainer, checkpoints, done)


async def _resumed(trainer: RayTrainer, checkpoints: Path | None) -> SftProgress:
    """Load the newest checkpoint; the progress at that time."""
    if checkpoints is None:
        return SftProgress()
    checkpoint.remove_partial(checkpoints)
    if (latest := checkpoint.latest_checkpoint(checkpoints)) is None:
        return SftProgress()
    run: dict[str, Any] = dict((await trainer.load(latest)).run)
    return SftProgress(**run)


async def _save(trainer: RayTrainer, checkpoints: Path, done: SftProgress) -> None:
    """Write a checkpoint and remove older ones."""
    await trainer.save(checkpoints / f"step-{done.step:06d}", asdict(done))
    for older in checkpoint.complete_checkpoints(checkpoints)[:-1]:
        checkpoint.remove(older)


def batches(count: int, config: SftConfig) -> list[list[int]]:
    """The sequence indices of every update; each epoch visits all sequences in a new order."""
    generator = np.random.default_rng(config.seed)
    needed = config.steps * config.batch
    order = np.concatenate([generator.permutation(count) for _ in range(-(-needed // count))])[:needed]
    return [part.tolist() for part in order.reshape(config.steps, config.batch)]


def _check(sequences: WeightedSequences) -> None:
    if not sequences:
        raise TrainerError("no sequences to train on")
    for index, (tokens, weights) in enumerate(sequences):
        if len(tokens) != len(weights):
            raise TrainerError(f"sequence {index} has {len(tokens)} tokens and {len(weights)} loss weights")
