"""One trainer worker: the model, the optimizer and the requests they serve. Imports torch; starting a worker imports
Megatron."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent_rl.train.batching.packing import MicroBatch, pack_weighted
from agent_rl.train.batching.partition import MiniStepShare
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.train.checkpoint.saver import CheckpointWriter, read_rng, rng_state, set_rng_state
from agent_rl.train.critic import Critic
from agent_rl.train.expert_balancing.report import BalanceReport
from agent_rl.train.expert_balancing.worker import (
    PassBalancer,
    RankBalancer,
    balancing_spec,
    expert_group,
    expert_layout,
)
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.loss.policy_loss import weighted_cross_entropy
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from agent_rl.train.reference import Reference
from agent_rl.train.reports import ForwardResult, RankReport, RouteDifferences, Update, WeightedSequences
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerDevice, WorkerRequest
from agent_rl.train.route_sharding import WorkerInfo
from agent_rl.train.route_trace import rank_trace
from agent_rl.train.step import grpo_step, packed, sample_logprobs, step_batches
from agent_rl.train.weight_senders import WeightSenders
from agent_rl.types import Sample
from agent_rl.utils.imports import quick_imports
from agent_rl.weight_sync.requests import PublishReport, PublishRequest
from r3.routing import narrowest_dtype
from r3.shard import RouteShard

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel


class TrainerWorker:
    """One process of the trainer. Methods marked collective must be called on all ranks at once."""

    def __init__(
        self,
        request: WorkerRequest,
        optimizer: OptimizerSpec,
        rank: int,
        *,
        master_addr: str,
        master_port: int,
        listener: int | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Join the process group and build the model. Collective.

        ``progress`` counts the bytes of weights read. The other arguments are those of :func:`init_parallel`.
        """
        torch.set_num_threads(request.threads)
        self._request, train = request, request.config.train
        self._dtype = getattr(torch, train.dtype)
        device = device_of(request.device)
        self._ranks = init_parallel(
            train.parallel,
            rank,
            master_addr=master_addr,
            master_port=master_port,
            device=device,
            seed=request.config.seed,
            listener=listener,
        )
        self._model, self._balancer = _build(request, device, self._dtype, progress)
        self._reference = (
            None if request.reference is None else Reference.load(self._model, request.reference, progress)
        )
        self._critic = Critic(self._model, train) if train.uses_critic else None
        self.set_optimizer(optimizer)
        self._senders = WeightSenders(self._model, request)
        self._writer = CheckpointWriter(rank)

    @property
    def model(self) -> PolicyModel:
        return self._model

    def info(self) -> WorkerInfo:
        """The position of this rank in the parallel layout, and the shard of routes that it replays."""
        ranks = self._ranks
        return WorkerInfo(
            rank=ranks.rank,
            data_rank=ranks.data_rank,
            data_size=ranks.data_size,
            lead=self._lead,
            shard=self._model.shard,
            moe_layers=self._model.moe_layers,
            layer_numbers=self._model.layer_numbers,
            notes=self._model.notes,
        )

    @property
    def _lead(self) -> bool:
        return self._ranks.tensor_rank == self._ranks.context_rank == self._ranks.pipeline_rank == 0

    def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Replace optimizer and schedule by new ones; the weights stay."""
        from agent_rl.train.checkpoint.rank_state import StatePieces
        from agent_rl.train.optimizer import PolicyOptimizer

        self._optimizer = PolicyOptimizer(self._model.chunks, spec, self._dtype)
        self._state = StatePieces(self._model, self._optimizer, self._critic)
        self._updates = 0

    def grpo(
        self,
        samples: Mapping[int, Sample],
        shares: Sequence[MiniStepShare],
        request: StepRequest,
        routes: Sequence[RouteShard],
    ) -> tuple[RankReport | None, RouteDifferences | None, BalanceReport | None]:
        """Run this rank's share of a GRPO global step. Collective.

        ``samples``: those of its data rank, by index. ``routes``: its own shard for every micro-batch, in order, or
        none. Returns the report (only on the lead of a data rank), the route differences and the balancing report.
        """
        if self._request.config.train.replay == "r3":
            self._renew_placement(step_batches(samples, shares), routes)
        with rank_trace(request.trace, self._ranks.rank, self._ranks.data_rank, self._model.shard) as tracer:
            report, differences = grpo_step(
                self._model, self._optimizer, samples, shares, routes, request, tracer, self._reference, self._balancer,
                self._critic,
            )  # fmt: skip
        self._updates += sum(item.update.taken for item in report.updates)
        self._senders.release_gpu_cache()
        return report if self._lead else None, differences, self._balancer.report()

    def _renew_placement(self, batches: Sequence[MicroBatch], routes: Sequence[RouteShard]) -> None:
        """Move experts to other owner ranks if the routes of this step say so."""
        if (placement := self._balancer.renewed_placement(batches, routes)) is None:
            return
        from agent_rl.train.checkpoint.rank_state import StatePieces
        from agent_rl.train.expert_balancing.renewal import move_experts

        moved = move_experts(self._model, self._optimizer, placement, self._reference)
        self._balancer.use_placement(placement, moved)
        self._state = StatePieces(self._model, self._optimizer)

    def logprobs(
        self,
        samples: Mapping[int, Sample],
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        record: bool,
        routes: Sequence[RouteShard],
    ) -> ForwardResult:
        """Log-probs of this data rank's samples by index (empty except on its lead), and with ``record`` the experts
        that this rank's routers used, ``[R, C, K]`` for each micro-batch. ``routes`` as in :meth:`grpo`. Collective."""
        logprobs, used = sample_logprobs(
            self._model, samples, micro_batches, routes, temperature=temperature, record=record
        )  # fmt: skip
        dtype = narrowest_dtype(max(1, self._model.model_spec.num_experts))
        return logprobs if self._lead else {}, [experts.astype(dtype, copy=False) for experts in used]

    def supervise(
        self,
        sequences: WeightedSequences,
        shares: Sequence[Sequence[Sequence[int]]],
        batch_weight: float,
        spike_norm: float | None = None,
    ) -> tuple[float, Update]:
        """Run one supervised update over ``shares[data_rank][micro_batch]``. Returns this rank's part of the loss and
        the update. ``spike_norm`` as in a step of GRPO. Collective."""
        batches = [pack_weighted(sequences, ids) for ids in shares[self._ranks.data_rank]]
        inputs = [packed(batch, weights=torch.from_numpy(batch.weights_T)) for batch in batches]
        parts = self._model.train_microbatches(inputs, None, _supervised_loss(batch_weight), entropy=False)
        loss = sum(float(values["loss"]) for values in parts)
        update = self._optimizer.step(
            finite_loss=math.isfinite(loss), spike_norm=spike_norm, on_spike=self._request.config.guard.on_spike
        )
        self._updates += update.taken
        self._balancer.weights_changed()
        return loss, update

    def save(self, partial: Path) -> tuple[int, dict[str, int]]:
        """Copy this rank's state to host memory and start to write it into ``partial``; :meth:`written` waits for it.
        Returns the number of updates made and the optimizer's counts."""
        return self._updates, self._writer.begin(partial, self._state.snapshot, rng_state(self._request.device))

    def written(self) -> int:
        """Wait until the files of :meth:`save` are on the disk; their checksum. May run beside any other method.
        Raises UserError where the disk is full, TrainerError for another failure."""
        return self._writer.written()

    def load(self, directory: Path, manifest: Manifest) -> None:
        """Resume from a complete checkpoint. Collective. A checkpoint of another parallel layout restores no random
        state. Raises TrainerError where it is damaged or belongs to another model."""
        checkpoint.verify(directory, manifest, share=self._ranks.rank, shares=self._ranks.world_size)
        self._load_state(directory, manifest)
        self._updates = manifest.updates
        self._balancer.weights_changed()
        if manifest.written_by(self._request.config.train.parallel):
            set_rng_state(read_rng(directory, self._ranks.rank))

    def _load_state(self, directory: Path, manifest: Manifest) -> None:
        self._state.load(checkpoint.open_pieces(directory, manifest), manifest.counts)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint, and with ``train.lora`` the adapters alone into ``directory/adapter``.
        Collective."""
        self._model.save_hf(directory)
        if self._model.lora is not None:
            self._model.save_adapter(directory / "adapter")

    def stage(self, request: PublishRequest) -> Mapping[str, str] | None:
        """As :meth:`.weight_senders.WeightSenders.stage`."""
        return self._senders.stage(request)

    def publish(self, request: PublishRequest) -> PublishReport | None:
        """As :meth:`.weight_senders.WeightSenders.publish`."""
        return self._senders.publish(request)

    def close(self) -> None:
        """Leave the process groups. Idempotent."""
        self._writer.close()
        self._senders.close()
        self._balancer.close()
        destroy_parallel()


def device_of(kind: WorkerDevice) -> torch.device:
    """The device of a worker. Ray shows each worker its own GPU as number 0."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def _build(
    request: WorkerRequest, device: torch.device, dtype: torch.dtype, progress: LoadProgress | None
) -> tuple[PolicyModel, PassBalancer]:
    """Build this rank's model and its expert balancing. Collective."""
    # Imported here because on a CPU init_parallel must install its shim before Megatron is imported.
    with quick_imports():
        from agent_rl.train.megatron.activation_offload import offload_layer_inputs
        from agent_rl.train.megatron.model import PolicyModel

    train = request.config.train
    build = partial(
        PolicyModel.build,
        request.model,
        train.parallel,
        dtype=dtype,
        device=device,
        recompute=train.recompute,
        recompute_modules=train.recompute_modules,
        lora=train.lora,
        freeze=train.freeze or (),
        model_spec=request.model_spec,
        seed=request.config.seed,
        progress=progress,
    )
    if train.balance.enabled:
        group = expert_group()
        grid = expert_layout(train.balance, group, request.model_spec.num_experts)
        model = build(balance=balancing_spec(train.balance, group, grid))
        balancer = PassBalancer(RankBalancer.for_model(train.balance, group, grid, model))
    else:
        model, balancer = build(), PassBalancer()
    if train.offload_activations:
        offload_layer_inputs(model.modules)
    return model, balancer


def _supervised_loss(batch_weight: float) -> LossFn:
    def loss_fn(logprobs_T: Tensor, entropy_T: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        loss = weighted_cross_entropy(logprobs_T, batch.extras["weights"], batch_weight=batch_weight)
        return loss, {"loss": loss.detach()}

    return loss_fn
