"""The reference model of the KL penalty: its weights, and what a step needs of it. Needs torch.

::

    start    checkpoint ─ read into the model ─ exchanged ─> the host         (the training's weights are back)
    a step   host <─ exchanged ─> model: one forward pass, then exchanged back    ─> reference log-probs

The reference never has a place of its own on the device. Its weights (this rank's part of them, in the trainer's
precision) lie on the host. For one forward pass of a step they and the training's change places, tensor by tensor, in
the model's own memory. So it works under every parallel layout without knowing of any, costs the device one tensor, and
brings back every bit. Gradients and optimizer state are not touched; nor are the float32 masters of a bfloat16 run,
which go into the weights only by an update. It is read from its checkpoint at every start, so a resumed run has the
same reference.

*Which routes.* The reference is given the routes that the update is given: the rollout's under ``train.replay: r3``,
those of the old-log-prob pass under ``r2``, none under ``off``. With pinned routes both log-probs are smooth functions
of the weights along the same experts, and with equal weights their difference is exactly 0. If the reference chose its
own, a router that rounding has flipped would enter the KL as a jump: at the first step, where the true KL is 0, the
penalty would be the native mismatch of engine and trainer (docs/trainer.md has figures). The price: where training has
taught a router to choose other experts, the reference is asked along experts that it would not have chosen, with its
own gates over them (R3's Eq. 8). So the KL is that of the weights along the sampled path; a change of choice counts
only by what the chosen experts say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from agent_rl.config import KlConfig, TrainConfig
from agent_rl.models.spec import check_alike
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.loss.objectives import advantage_moments, kl_penalty, normalized_advantages, penalized_advantages
from agent_rl.train.megatron.packed_batch import PackedBatch, PassOutput, Routes
from agent_rl.train.pinned_memory import host_tensor

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel


class Reference:
    """One rank's part of the reference's weights, on the host."""

    def __init__(self, model: PolicyModel, *, frozen: bool = False) -> None:
        """With the weights that ``model`` has now. Those that are not trained stay where they are, for they stay as
        they are, unless ``frozen`` ones will differ, too."""
        weights = dict.fromkeys(p for module in model.modules for p in module.parameters())
        self._parameters = [weight for weight in weights if frozen or weight.requires_grad]
        self._held = _to_host(self._parameters)

    @classmethod
    def load(cls, model: PolicyModel, directory: Path, progress: LoadProgress | None = None) -> Reference:
        """The checkpoint in ``directory``; ``model`` keeps its weights, and ``progress`` grows while it is read. Raises
        ConfigError where it does not fit."""
        check_alike(model.facts, model.directory, directory, "train.kl.reference")
        reference = cls(model, frozen=directory != model.directory)
        try:
            model.load_hf(directory, progress)
        finally:
            reference._exchange()  # what was held are the training's weights
        return reference

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(held.nbytes for held in self._held)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference's weights, and no gradient must be taken; after it, its own again."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=True):
            own = parameter.detach().clone()
            parameter.copy_(held)
            held.copy_(own)


def _to_host(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host, of each dtype in one stretch of memory."""
    held = dict[int, Tensor]()
    for dtype in {parameter.dtype for parameter in parameters}:
        alike = [parameter for parameter in parameters if parameter.dtype == dtype]
        sizes = [parameter.numel() for parameter in alike]
        block = host_tensor(sum(sizes), dtype, pinned=alike[0].is_cuda)
        for parameter, place in zip(alike, block.split(sizes), strict=True):
            held[id(parameter)] = place.view(parameter.shape).copy_(parameter.detach())
    return [held[id(parameter)] for parameter in parameters]


class ForwardModel(Protocol):
    """What the penalty needs of :class:`agent_rl.train.megatron.model.PolicyModel`."""

    def forward_logprobs(
        self, batches: Sequence[PackedBatch], routes: Sequence[Routes | None] | None, *, temperature: float = 1.0
    ) -> list[PassOutput]: ...

    def sum_over_data(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """The reference's word on a rank's micro-batches.

    ``extras``: what the loss function needs of each, by name: ``reference`` ``[T]``, its log-probs, and where the
    penalty is taken from the reward ``advantages`` ``[T]`` instead of the samples'. ``taken``: the sum over the rank's
    sampled tokens of what was taken from an advantage. ``seconds``: the pass.
    """

    extras: tuple[Mapping[str, Tensor], ...]
    taken: float
    seconds: float


def compare_with_reference(
    model: ForwardModel,
    reference: Reference,
    batches: Sequence[PackedBatch],
    routes: Sequence[Routes | None] | None,
    old_logprobs: Sequence[Tensor],
    train: TrainConfig,
    temperature: float,
) -> Compared:
    """Run the reference over micro-batches that have the extras ``mask``, ``sequence`` and ``advantages``, replaying
    ``routes``. ``old_logprobs``: the trainer's own before the update, whose KL a penalty in the reward is of.
    Collective."""
    started = time.perf_counter()
    with reference.in_place():
        outputs = model.forward_logprobs(batches, routes, temperature=temperature)
    extras: list[dict[str, Tensor]] = [{"reference": output.logprobs} for output in outputs]
    taken = 0.0
    if train.kl.apply_to == "reward":
        advantages = [
            _penalized(batch, old, output.logprobs, train.kl)
            for batch, old, output in zip(batches, old_logprobs, outputs, strict=True)
        ]
        taken = sum(_taken(batch, values) for batch, values in zip(batches, advantages, strict=True))
        if train.normalizes_penalized:
            advantages = _normalized(model, batches, advantages)
        for own, values in zip(extras, advantages, strict=True):
            own["advantages"] = values
    return Compared(tuple(extras), taken, time.perf_counter() - started)


def _penalized(batch: PackedBatch, old_T: Tensor, reference_T: Tensor, kl: KlConfig) -> Tensor:
    mask_T, sequence_T = batch.extras["mask"].to(old_T.device), batch.extras["sequence"].to(old_T.device)
    kl_T = kl_penalty(kl, old_T, reference_T)
    return penalized_advantages(batch.extras["advantages"].to(old_T), kl_T, mask_T, sequence_T, kl.coefficient)


def _taken(batch: PackedBatch, penalized_T: Tensor) -> float:
    taken_T = batch.extras["advantages"].to(penalized_T) - penalized_T
    return float(taken_T[batch.extras["mask"].to(penalized_T.device)].sum())


def _normalized(model: ForwardModel, batches: Sequence[PackedBatch], advantages: Sequence[Tensor]) -> list[Tensor]:
    """By mean and standard deviation over all the step's sampled tokens, also those of the other data ranks."""
    own = [
        advantage_moments(values, batch.extras["mask"].to(values.device))
        for batch, values in zip(batches, advantages, strict=True)
    ]
    total = model.sum_over_data(torch.stack(own).sum(0) if own else torch.zeros(3, dtype=torch.float64))
    return [normalized_advantages(values, total.to(values.device)) for values in advantages]
