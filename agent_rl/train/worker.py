"""One trainer rank: model, optimizer and what can be asked of them. Imports torch; making a rank imports Megatron."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent_rl.errors import TrainerError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.batching.mini_steps import MiniStepShare
from agent_rl.train.batching.packing import pack_weighted
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.train.checkpoint.saver import RankSaver, read_rng
from agent_rl.train.expert_balancing.report import BalanceReport
from agent_rl.train.expert_balancing.worker import Foreseen, RankBalance, borrowing, expert_grid, expert_group
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.loss.policy_loss import weighted_cross_entropy
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel
from agent_rl.train.reference import Reference
from agent_rl.train.reports import Differing, ForwardAnswer, RankReport, Update, WeightedSequences
from agent_rl.train.requests import OptimizerSpec, RankDevice, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import RankInfo
from agent_rl.train.route_trace import rank_trace
from agent_rl.train.step import grpo_step, packed, sample_logprobs, step_batches
from agent_rl.types import Sample
from agent_rl.weight_sync.adapters import BaseWeights
from agent_rl.weight_sync.order import PublishReport, PublishRequest
from agent_rl.weight_sync.publisher import WeightPublisher
from r3.routing import narrowest_dtype
from r3.shard import RouteShard

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel


class TrainerRank:
    """One process's part of the trainer. Methods marked collective must be called on all ranks at once."""

    def __init__(
        self,
        order: WorkerRequest,
        optimizer: OptimizerSpec,
        rank: int,
        *,
        master_addr: str,
        master_port: int,
        listener: int | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Collective. ``progress`` grows while weights are read; the rest as :func:`init_parallel` has it."""
        torch.set_num_threads(order.threads)
        self._order, train = order, order.config.train
        self._dtype = getattr(torch, train.dtype)
        device = device_of(order.device)
        self._ranks = init_parallel(
            train.parallel,
            rank,
            master_addr=master_addr,
            master_port=master_port,
            device=device,
            seed=order.config.seed,
            listener=listener,
        )
        self._model, self._balance = _build(order, device, self._dtype, progress)
        self._reference = None if order.reference is None else Reference.load(self._model, order.reference, progress)
        self.set_optimizer(optimizer)
        self._measure_homes = self._balance is not None and train.balance.expert_placement == "measured"
        self._resumed: tuple[Path, Manifest] | None = None
        self._publisher: WeightPublisher | None = None
        self._saver = RankSaver(rank)

    @property
    def model(self) -> PolicyModel:
        return self._model

    def info(self) -> RankInfo:
        """This rank's place and size."""
        ranks = self._ranks
        return RankInfo(
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
        """Start over with a new optimizer and schedule; the weights stay."""
        from agent_rl.train.checkpoint.state_pieces import StatePieces
        from agent_rl.train.optimizer import PolicyOptimizer

        self._spec = spec
        self._optimizer = PolicyOptimizer(self._model.chunks, spec, self._dtype)
        self._state = StatePieces(self._model, self._optimizer)
        self._updates = 0

    def grpo(
        self,
        samples: Mapping[int, Sample],
        shares: Sequence[MiniStepShare],
        order: StepRequest,
        routes: Sequence[RouteShard],
    ) -> tuple[RankReport | None, Differing | None, BalanceReport | None]:
        """This rank's share of a GRPO global step: its data rank's samples, and its own share of every micro-batch's
        routes, in order, or none. The lead of a data rank reports; of balancing, every rank. Collective."""
        if self._measure_homes and self._balance is not None:
            self._rehome(self._balance, self._balance.foresee(step_batches(samples, shares), routes))
        with rank_trace(order.trace, self._ranks.rank, self._ranks.data_rank, self._model.shard) as tracer:
            report, differs = grpo_step(
                self._model, self._optimizer, samples, shares, routes, order, tracer, self._reference, self._balance
            )
        self._updates += sum(done.update.taken for done in report.updates)
        self._yield_memory()
        balanced = None if self._balance is None else self._balance.report()
        return report if self._lead else None, differs, balanced

    def _rehome(self, balance: RankBalance, foreseen: Foreseen) -> None:
        """Choose homes by the loads of this step, the first, and load weights and state again, in their order."""
        self._measure_homes = False
        homes, updates = balance.measure_homes(foreseen, self._model.moe_layers, self._model.device), self._updates
        self._model.rehome(homes)
        self._model.load_hf(self._order.model)
        if self._order.reference is not None:
            self._reference = None  # its memory is freed before it is needed again
            self._reference = Reference.load(self._model, self._order.reference)
        self.set_optimizer(self._spec)
        if self._resumed is not None:
            self._load_state(*self._resumed)
        self._updates = updates
        self._weights_changed()

    def logprobs(
        self,
        samples: Mapping[int, Sample],
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        record: bool,
        routes: Sequence[RouteShard],
    ) -> ForwardAnswer:
        """Log-probs of this data rank's samples, by index, from its lead; with ``record`` the experts that this rank's
        routers used, ``[R, C, K]`` a micro-batch. ``routes`` as in :meth:`grpo`. Collective."""
        logprobs, used = sample_logprobs(
            self._model, samples, micro_batches, routes, temperature=temperature, record=record
        )  # fmt: skip
        dtype = narrowest_dtype(max(1, self._model.num_experts))
        return logprobs if self._lead else {}, [experts.astype(dtype, copy=False) for experts in used]

    def supervise(
        self,
        sequences: WeightedSequences,
        shares: Sequence[Sequence[Sequence[int]]],
        batch_weight: float,
    ) -> tuple[float, Update]:
        """One supervised update over this rank's share, ``shares[data_rank][micro_batch]``; its part of the loss.
        Collective."""
        self._measure_homes = False  # the weights are no longer those that were loaded
        batches = [pack_weighted(sequences, ids) for ids in shares[self._ranks.data_rank]]
        inputs = [packed(batch, weights=torch.from_numpy(batch.weights_T)) for batch in batches]
        parts = self._model.train_microbatches(inputs, None, _supervised_loss(batch_weight), entropy=False)
        loss = sum(float(values["loss"]) for values in parts)
        update = self._optimizer.step(finite_loss=math.isfinite(loss))
        if not update.taken:
            raise TrainerError(f"no update was made: loss {loss}, gradient norm {update.grad_norm}")
        self._updates += 1
        self._weights_changed()
        return loss, update

    def save(self, partial: Path) -> tuple[int, dict[str, int]]:
        """Copy this rank's state to host memory and start writing it into ``partial``; :meth:`written` tells the end.
        Returns the number of updates made and the optimizer's counts."""
        from agent_rl.train.megatron.rng import rng_state

        return self._updates, self._saver.begin(partial, self._state.snapshot, rng_state(self._order.device))

    def written(self) -> int:
        """Wait until what :meth:`save` began is on the disk; its checksum. May be called beside any other method.
        Raises UserError where the disk is full, TrainerError where it can't be written for another reason."""
        return self._saver.written()

    def load(self, directory: Path, manifest: Manifest) -> None:
        """Resume from a complete checkpoint. Collective. Of another layout's, the random state stays that of a start,
        for its ranks were others. Raises TrainerError where it is damaged or of another model."""
        from agent_rl.train.megatron.rng import set_rng_state

        checkpoint.verify(directory, manifest, share=self._ranks.rank, shares=self._ranks.world_size)
        self._load_state(directory, manifest)
        self._updates, self._resumed = manifest.updates, (directory, manifest)
        self._weights_changed()
        if manifest.written_by(self._order.config.train.parallel):
            set_rng_state(read_rng(directory, self._ranks.rank))

    def _load_state(self, directory: Path, manifest: Manifest) -> None:
        self._state.load(checkpoint.open_pieces(directory, manifest), manifest.counts)

    def _weights_changed(self) -> None:
        if self._balance is not None:
            self._balance.weights_changed()

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint and, where adapters are trained, those by themselves into its directory
        ``adapter``. Collective."""
        self._model.save_hf(directory)
        if self._model.lora is not None:
            self._model.save_adapter(directory / "adapter")

    def publish(self, order: PublishRequest) -> PublishReport | None:
        """Send the weights to the engines; rank 0 sends and reports. Collective."""
        base = self._base_of(order)
        weights, report = self._model.export_weights() if base is None else self._model.export_changes(), None
        try:
            if self._ranks.rank == 0:
                report = self._publisher_to(order).publish(weights, order.version, base)
                if report.failures:
                    self._drop_publisher()
        finally:
            # The other ranks take part in gathering every tensor, also of an update that an engine refused.
            for _ in weights:
                pass
            self._yield_memory()
        return report

    def _base_of(self, order: PublishRequest) -> BaseWeights | None:
        """The checkpoint of which adapters alone are sent; None where weights are."""
        return BaseWeights(self._order.model) if self._model.lora and order.config.merges_adapters else None

    def _yield_memory(self) -> None:
        """Give what torch keeps of freed memory to the engine that has the same GPU, where one has."""
        if self._order.config.engine.colocate:
            torch.cuda.empty_cache()

    def _publisher_to(self, order: PublishRequest) -> WeightPublisher:
        if self._publisher is None or not self._publisher.serves(order):
            self._drop_publisher()
            kv_heads, device = self._model.facts.kv_heads, self._model.device
            self._publisher = WeightPublisher(order.urls, device, kv_heads, order.config, headers=order.headers)
        return self._publisher

    def _drop_publisher(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def close(self) -> None:
        """Leave the process groups. Idempotent."""
        self._saver.close()
        self._drop_publisher()
        if self._balance is not None:
            self._balance.close()
        destroy_parallel()


def device_of(kind: RankDevice) -> torch.device:
    """Where a rank computes: Ray hides all GPUs from it but its own, and ``torch.cuda.set_device`` wants an index."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def _build(
    order: WorkerRequest, device: torch.device, dtype: torch.dtype, progress: LoadProgress | None
) -> tuple[PolicyModel, RankBalance | None]:
    """The model on this rank, and what plans its passes where experts are balanced. Collective."""
    # Only now: on a CPU, Megatron must be imported after what init_parallel installs.
    from agent_rl.train.megatron.activation_offload import keep_inputs_on_host
    from agent_rl.train.megatron.model import PolicyModel

    train = order.config.train
    build = partial(
        PolicyModel.build,
        order.model,
        train.parallel,
        dtype=dtype,
        device=device,
        recompute=train.recompute,
        recompute_modules=train.recompute_modules,
        lora=train.lora,
        seed=order.config.seed,
        progress=progress,
    )
    if train.balance.enabled:
        group = expert_group()
        grid = expert_grid(train.balance, group, read_model_spec(order.model).num_experts)
        model = build(balance=borrowing(train.balance, group, grid))
        balance = RankBalance.of(train.balance, group, grid, model)
    else:
        model, balance = build(), None
    if train.offload_activations:
        keep_inputs_on_host(model.modules)
    return model, balance


def _supervised_loss(batch_weight: float) -> LossFn:
    def loss_fn(logprobs_T: Tensor, entropy_T: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        loss = weighted_cross_entropy(logprobs_T, batch.extras["weights"], batch_weight=batch_weight)
        return loss, {"loss": loss.detach()}

    return loss_fn
