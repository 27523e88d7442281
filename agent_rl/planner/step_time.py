"""How long a run takes, by the phases of its own metrics: ``agent-rl plan --time``.

The work is that of :mod:`agent_rl.planner.compute_model`, at the mean length of an episode; the speeds are those of
:mod:`agent_rl.planner.assumptions`. A phase takes as long as its slowest resource. Pure; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from agent_rl.config import EvalSettings, ParallelConfig, RunConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.assumptions import Assumptions
from agent_rl.planner.compute_model import forward_flops, planned_publish, planned_step
from agent_rl.planner.hardware import GPUS
from agent_rl.planner.memory_model import BYTES, parameters, rank_bytes, trained_parameters
from agent_rl.planner.plan import PhaseTime, TimePlan, gib
from agent_rl.planner.planner import engine_count, saved_bytes
from agent_rl.planner.rollout_time import RolloutModel
from agent_rl.train.hf_index import expected_shapes


def plan_time(config: RunConfig, model: ModelSpec, device: str, assume: Assumptions) -> TimePlan:
    """Predict the duration of a run of ``config``."""
    return _TimePlanner(config, model, device, assume).plan()


@dataclass(frozen=True, slots=True)
class _RankWork:
    """What one rank computes and sends: ``flops`` with those of ``attention``, ``copies`` of tokens to experts,
    ``exchanged`` bytes. ``idle``: the factor by which a pipeline that fills and drains takes longer."""

    flops: float
    attention: float
    copies: float
    exchanged: float
    idle: float

    def times(self, count: float) -> _RankWork:
        return _RankWork(
            self.flops * count, self.attention * count, self.copies * count, self.exchanged * count, self.idle
        )


@dataclass(frozen=True, slots=True)
class _TimePlanner:
    config: RunConfig
    model: ModelSpec
    device: str
    assume: Assumptions

    def plan(self) -> TimePlan:
        config = self.config
        train, engine = config.train, config.engine
        gpus = train.parallel.world_size + (0 if engine.colocate else engine_count(engine) * engine.gpus)
        return TimePlan(
            rollout=self._rollout(),
            training=tuple(self._training()),
            sync=self._weight_sync(),
            ahead=config.async_rollout.depth > 0,
            steps=train.steps,
            outside=tuple(self._outside()),
            gpus=gpus if self.device == "cuda" else 0,
            assumptions=tuple(self.assume),
        )

    def _rollout(self) -> PhaseTime:
        rollout, ahead = self.config.rollout, self.config.async_rollout.depth > 0
        model = RolloutModel(self.config, self.model, self.device, self.assume)
        episodes = rollout.tasks_per_step * rollout.group_size
        return model.rollout("rollout", episodes, group=rollout.group_size, waits=not ahead)

    def _training(self) -> Iterator[PhaseTime]:
        train = self.config.train
        every = 1 if train.needs_trainer_logprobs else train.old_logprob.measure_every
        if every:
            yield self._passes("old log-probs", update=False, share=1 / every)
        if every and train.measure_without_replay_every and self.config.captures_routes:
            share = 1 / math.lcm(every, train.measure_without_replay_every)
            yield self._passes("log-probs without replay", update=False, share=share)
        if train.kl.coefficient:
            yield self._passes("reference log-probs", update=False)
        yield self._passes("update", update=True)
        yield self._optimizer()

    def _passes(self, name: str, *, update: bool, share: float = 1.0) -> PhaseTime:
        """A pass over a ``share`` of the trained episodes, or with ``update`` the forward and backward passes of all
        updates."""
        work = self._work(update=update).times(share)
        if self.device == "cpu":
            thread = work.flops / self.assume["trainer_flops"] + work.copies * self.assume["trainer_copy"]
            return PhaseTime(name, thread * self._thread_share * work.idle, f"products; {work.flops / 1e9:,.0f} GFLOP")
        gpu, hardware, train = GPUS[self.config.hardware.gpu], self.config.hardware, self.config.train
        peak, across = gpu.flops[train.dtype], train.parallel.expert > hardware.gpus_per_node
        bounds = {
            "attention": work.attention / peak / self.assume["attention"],
            "products": (work.flops - work.attention) / peak / self.assume["products"],
            "experts' traffic": work.exchanged / (gpu.network if across else gpu.link) / self.assume["links"],
        }
        seconds = max(bounds["attention"] + bounds["products"], bounds["experts' traffic"]) * work.idle
        bound = max(bounds, key=lambda key: bounds[key])
        of_peak = work.flops / seconds / peak
        return PhaseTime(name, seconds, f"{bound}; {work.flops / 1e12:,.0f} TFLOP a rank, {of_peak:.0%} of the peak")

    def _work(self, *, update: bool) -> _RankWork:
        """The work of the busier of the first and the last rank, with every episode at its mean length."""
        train, length = self.config.train, max(1, round(self.assume["tokens"]))
        rollout = self.config.rollout.model_copy(update={"max_tokens": length})
        mean, parallel = self.config.model_copy(update={"rollout": rollout}), train.parallel
        stages, sharing = parallel.pipeline, parallel.tensor * parallel.context
        full = max(1, train.microbatch_tokens // length)  # episodes of a full micro-batch
        planned = max(
            (planned_step(self.model, mean, rank=rank, skew=1.0) for rank in (0, parallel.world_size - 1)),
            key=lambda each: each.update,
        )
        attention = forward_flops(self.model, mean, stage=stages - 1, skew=1.0).attention / full
        again, moe_again = (
            train.recompute == "full" or (train.recompute == "selective" and module in train.recompute_modules)
            for module in ("core_attn", "moe")
        )
        trained = self._trained * (train.epochs if update else 1) * sharing * stages / parallel.world_size
        exchanges = (2 + moe_again if update else 1) / (3 + moe_again + bool(train.kl.coefficient))
        copies = length / sharing * self.model.top_k * len(self.model.moe_layer_ids) / stages
        return _RankWork(
            flops=(planned.update if update else planned.logprobs) / stages / full,
            attention=attention * (3.5 + again if update else 1),
            copies=copies * (3 + moe_again if update else 1),
            exchanged=planned.exchanged / stages / full * exchanges,
            idle=1 + (stages - 1) / parallel.virtual_pipeline / max(1.0, trained / full),
        ).times(trained)

    def _optimizer(self) -> PhaseTime:
        """All optimizer steps of a global step: Adam, the gradients' sum over ranks, and what lies in host memory."""
        train, assume, hardware = self.config.train, self.assume, self.config.hardware
        rank = rank_bytes(self.model, train, microbatches=1, device=self.device)
        updates = train.mini_steps * train.epochs
        if self.device == "cpu":
            bounds = {
                "memory bandwidth": 2 * rank.optimizer / assume["adam"],
                "calls": len(expected_shapes(self.model)) * assume["adam_tensor"],
            }
            return PhaseTime("optimizer", updates * sum(bounds.values()), max(bounds, key=lambda key: bounds[key]))
        gpu = GPUS[hardware.gpu]
        link = gpu.network if train.parallel.world_size > hardware.gpus_per_node else gpu.link
        summed = (rank.gradients + rank.weights) * (train.parallel.world_size > 1)
        bounds = {
            "memory bandwidth": 2 * (rank.optimizer + rank.gradients) / gpu.memory / assume["memory"],
            "gradients between ranks": summed / link / assume["links"],
            "offloaded optimizer over PCIe": 2 * rank.offloaded / gpu.host / assume["links"],
        }
        return PhaseTime("optimizer", updates * sum(bounds.values()), max(bounds, key=lambda key: bounds[key]))

    def _weight_sync(self) -> PhaseTime:
        engine, assume, cuda = self.config.engine, self.assume, self.device == "cuda"
        size, tensors = planned_publish(self.model, self.config.train, engine).bytes, len(expected_shapes(self.model))
        buckets = math.ceil(size / (engine.bucket_mb(cuda=cuda) * 2**20))
        calls = tensors * assume["sync_tensor"] + buckets * assume["sync_bucket"]
        gpu = GPUS[self.config.hardware.gpu]
        # Colocated engines read the weights on their own GPU, where the trainer's ranks have gathered them.
        wire = size / (gpu.link if engine.colocate else gpu.network) / assume["links"] if cuda else 0.0
        bound = "calls" if calls > wire else "network"
        return PhaseTime(
            "weight sync", calls + wire, f"{bound}; {gib(size)}, {tensors:,} tensors in {buckets} bucket(s)"
        )

    def _outside(self) -> Iterator[PhaseTime]:
        """What is not part of a step, for the whole run: start, evaluations, checkpoints, the exported model."""
        config, assume = self.config, self.assume
        train = config.train
        yield PhaseTime("start", assume["run_start"], "processes and the model's weights")
        if due := [each for settings in config.evaluations.values() for each in _evaluations(settings, train.steps)]:
            model = RolloutModel(config, self.model, self.device, assume)
            each = [model.rollout("", episodes, group=1) for episodes in due]
            seconds = sum(one.seconds for one in each)
            yield PhaseTime("evaluations", seconds, f"{len(due)} x {seconds / len(due):,.1f} s; {each[0].bound}")
        nodes = -(-train.parallel.world_size // config.hardware.gpus_per_node) if self.device == "cuda" else 1
        state = sum(trained_parameters(self.model, train, ParallelConfig())) * saved_bytes(train)
        written = state / nodes / assume["disk"]
        saves = train.steps // train.checkpoint_every if train.checkpoint_every else 1
        blocked = saves * written * assume["checkpoint_blocks"]
        yield PhaseTime("checkpoints", blocked, f"{saves} x {written:,.1f} s of writing, most of it during steps")
        yield PhaseTime("export", parameters(self.model) * BYTES[train.dtype] / assume["disk"], "disk")

    @property
    def _trained(self) -> float:
        """Episodes that a step trains on."""
        rollout = self.config.rollout
        return rollout.tasks_per_step * rollout.group_size * self.assume["trained_share"]

    @property
    def _thread_share(self) -> float:
        """Time of a rank's threads relative to one thread (Amdahl's law)."""
        threads = max(1.0, min(self.assume["trainer_threads"], self.assume["cores"]))
        return self.assume["trainer_serial"] + (1 - self.assume["trainer_serial"]) / threads


def _evaluations(settings: EvalSettings, steps: int) -> list[int]:
    """The number of episodes of each evaluation of a run of ``steps``."""
    if not settings.tasks:
        return []
    between = range(settings.every, steps, settings.every) if settings.every else ()
    sampled = settings.tasks * settings.samples
    return [sampled] * len({0, steps, *between}) + [settings.tasks] * (settings.greedy * len({0, steps}))
