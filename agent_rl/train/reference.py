"""The reference model of the KL penalty: its weights, log-probs and penalties. Needs torch.

::

    start    checkpoint ─ read into the model ─ swapped ─> host         (the training weights are back in the model)
    a step   host <─ swapped ─> model: one forward pass, then swapped back    ─> reference log-probs

The reference has no memory of its own on the device. This rank's part of its weights lies on the host in the trainer's
precision. For one forward pass per step it changes places with the training weights, tensor by tensor, in the model's
memory. This works under every parallel layout, needs one tensor of device memory and restores every bit. Gradients,
optimizer state and the float32 masters of a bfloat16 run are not touched. The reference is read from its checkpoint at
every start, so a resumed run has the same one.

*Routes.* The reference replays the update's routes: the rollout's under ``train.replay: r3``, those of the old-log-prob
pass under ``r2``, none under ``off``. With the same routes both log-probs are smooth functions of the weights along the
same experts, and equal weights give a difference of exactly 0. If the reference chose its own experts, a router flipped
by rounding would enter the KL as a jump: in the first step, where the true KL is 0, the penalty would equal the routing
mismatch of engine and trainer (docs/reference/objectives.md has numbers). The price: where training has changed a
router's choice, the reference is evaluated along experts that it would not choose, with its own gates over them (R3's
Eq. 8). The KL is that of the weights along the sampled path; a changed choice counts only through the chosen experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agent_rl.config import KlConfig, TrainConfig
from agent_rl.models.spec import check_same_architecture
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.host_memory import host_tensor
from agent_rl.train.loss.objectives import advantage_moments, kl_penalty, normalized_advantages, penalized_advantages
from agent_rl.train.megatron.packed_batch import PackedBatch, Routes

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.optimizer import StateShard


class Reference:
    """One rank's part of the reference's weights, on the host."""

    def __init__(self, model: PolicyModel, *, frozen: bool = False) -> None:
        """Copy the current weights of ``model``. Weights that are not trained are skipped, because they stay the same,
        unless ``frozen``: then the reference has other frozen weights."""
        weights = dict.fromkeys(p for module in model.modules for p in module.parameters())
        self._parameters = [weight for weight in weights if frozen or weight.requires_grad]
        self._weights = _to_host(self._parameters)

    @classmethod
    def load(cls, model: PolicyModel, directory: Path, progress: LoadProgress | None = None) -> Reference:
        """Read the checkpoint in ``directory``; ``model`` keeps its weights. ``progress`` counts the bytes. Raises
        ConfigError where the checkpoint does not fit."""
        check_same_architecture(model.model_spec, model.directory, directory, "train.kl.reference")
        reference = cls(model, frozen=directory != model.directory)
        try:
            model.load_hf(directory, progress)
        finally:
            reference._swap()  # self._weights were the training weights
        return reference

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(weight.nbytes for weight in self._weights)

    def shards(self, names: Mapping[int, str]) -> list[StateShard]:
        """Returns the weights, where they are stored, by the optimizer's ``names`` of the parameters' ids."""
        from agent_rl.train.optimizer import StateShard

        pairs = zip(self._parameters, self._weights, strict=True)
        return [StateShard(names[id(p)], tuple(p.shape), 0, {"master": weight.view(-1)}) for p, weight in pairs]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the model has the reference's weights. No gradient may be taken inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, stored in zip(self._parameters, self._weights, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(stored)
            stored.copy_(current)


def _to_host(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host, with one block of memory per dtype."""
    copies = dict[int, Tensor]()
    for dtype in {parameter.dtype for parameter in parameters}:
        same_dtype = [parameter for parameter in parameters if parameter.dtype == dtype]
        sizes = [parameter.numel() for parameter in same_dtype]
        block = host_tensor(sum(sizes), dtype, pinned=same_dtype[0].is_cuda)
        for parameter, view in zip(same_dtype, block.split(sizes), strict=True):
            copies[id(parameter)] = view.view(parameter.shape).copy_(parameter.detach())
    return [copies[id(parameter)] for parameter in parameters]


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceComparison:
    """The reference's results on a rank's micro-batches.

    ``extras``: per micro-batch the inputs of the loss function by name: ``reference`` ``[T]``, the reference log-probs,
    and for a penalty in the reward the new ``advantages`` ``[T]``. ``taken``: the sum over the rank's sampled tokens of
    the penalty taken from advantages. ``seconds``: duration of the pass.
    """

    extras: tuple[Mapping[str, Tensor], ...]
    taken: float
    seconds: float


def compare_with_reference(
    model: PolicyModel,
    reference: Reference,
    batches: Sequence[PackedBatch],
    routes: Sequence[Routes | None] | None,
    old_logprobs: Sequence[Tensor],
    train: TrainConfig,
    temperature: float,
) -> ReferenceComparison:
    """Run the reference over micro-batches with the extras ``mask``, ``sequence`` and ``advantages``, replaying
    ``routes``. ``old_logprobs``: the trainer's log-probs before the update, which a penalty in the reward compares.
    Collective."""
    started = time.perf_counter()
    with reference.swapped_in():
        outputs = model.forward_logprobs(batches, routes, temperature=temperature)
    extras: list[dict[str, Tensor]] = [{"reference": output.logprobs} for output in outputs]
    taken = 0.0
    if train.kl.apply_to == "reward":
        advantages = [
            _penalized(batch, old, output.logprobs, train.kl)
            for batch, old, output in zip(batches, old_logprobs, outputs, strict=True)
        ]
        taken = sum(_taken(batch, values) for batch, values in zip(batches, advantages, strict=True))
        if train.normalizes_on_ranks:
            advantages = normalized_over_step(model, batches, advantages)
        for item, values in zip(extras, advantages, strict=True):
            item["advantages"] = values
    return ReferenceComparison(tuple(extras), taken, time.perf_counter() - started)


def _penalized(batch: PackedBatch, old_T: Tensor, reference_T: Tensor, kl: KlConfig) -> Tensor:
    mask_T, sequence_T = batch.extras["mask"].to(old_T.device), batch.extras["sequence"].to(old_T.device)
    kl_T = kl_penalty(kl, old_T, reference_T)
    return penalized_advantages(batch.extras["advantages"].to(old_T), kl_T, mask_T, sequence_T, kl.coefficient)


def _taken(batch: PackedBatch, penalized_T: Tensor) -> float:
    taken_T = batch.extras["advantages"].to(penalized_T) - penalized_T
    return float(taken_T[batch.extras["mask"].to(penalized_T.device)].sum())


def normalized_over_step(
    model: PolicyModel, batches: Sequence[PackedBatch], advantages: Sequence[Tensor]
) -> list[Tensor]:
    """Normalize by mean and standard deviation over the sampled tokens of the step on all data ranks. Collective."""
    moments = [
        advantage_moments(values, batch.extras["mask"].to(values.device))
        for batch, values in zip(batches, advantages, strict=True)
    ]
    total = model.sum_over_data(torch.stack(moments).sum(0) if moments else torch.zeros(3, dtype=torch.float64))
    return [normalized_advantages(values, total.to(values.device)) for values in advantages]
