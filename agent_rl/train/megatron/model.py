"""The policy as the trainer sees it: log-probs of packed batches, gradients of a loss over them, weights in and out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.config import LoraConfig, ParallelConfig, Recompute
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.train.expert_balancing.plan_feed import Balancing, ExpertBalancer
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.megatron import hf_weights as hf
from agent_rl.train.megatron.forward_backward import Passes
from agent_rl.train.megatron.kernel_choice import choose_kernels
from agent_rl.train.megatron.layers import block_spec
from agent_rl.train.megatron.lora import draw, freeze_base
from agent_rl.train.megatron.packed_batch import LossFn, PackedBatch, PassOutput, PassPlans, Routes
from agent_rl.train.megatron.parallel import Ranks, current_ranks
from agent_rl.train.megatron.token_sharding import shard_spec
from agent_rl.train.megatron.transformer import transformer_config
from agent_rl.train.parallel_checks import shares_optimizer
from agent_rl.train.route_trace import PassTrace
from agent_rl.weight_sync.adapters import SUFFIX, merge, pack
from r3.megatron_replay import RouterReplayer


class HiddenGPT(GPTModel):
    """A GPT model whose last stage gives its hidden states: logits are made later, a chunk at a time."""

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """The output projection ``[vocabulary share, hidden]`` of the last stage (the embedding where tied)."""
        if self.share_embeddings_and_output_weights:
            tied: Tensor = self.shared_embedding_or_output_weight()
            return tied
        weight: Tensor = self.output_layer.weight
        return weight


class PolicyModel:
    """This rank's part of a Qwen3 or Qwen3-MoE policy.

    ``chunks`` are the DDP-wrapped modules (several under virtual pipelining) and ``config`` the Megatron configuration,
    for ``get_megatron_optimizer``.
    ``shard`` says which tokens and MoE layers this rank's routers see, ``notes`` which kernels were chosen, in lines.
    Every method that runs the model is collective: all ranks call it together.
    """

    def __init__(
        self,
        modules: Sequence[HiddenGPT],
        facts: ModelSpec,
        ranks: Ranks,
        device: torch.device,
        directory: Path,
        *,
        distributed_optimizer: bool = False,
        balance: Balancing | None = None,
        lora: LoraConfig | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = tuple(notes)
        self.facts, self.ranks, self.device, self.directory = facts, ranks, device, directory
        self._homes: hf.Homes = {}
        self.lora = lora
        if lora:
            freeze_base(modules)
        self.config: TransformerConfig = modules[0].config
        self.shard = shard_spec(ranks, facts.moe, model_chunks=len(modules))
        moe_layers = [self.layer_numbers[column] for column in self.shard.columns]
        self.replayer = RouterReplayer(modules, moe_layers)
        self.balancer = ExpertBalancer(modules, balance, moe_layers) if balance else None
        self.chunks = [_wrap(module, distributed_optimizer) for module in modules]
        self._passes = Passes(self.chunks, facts, ranks, device, self.replayer, self.shard, self.balancer)

    @classmethod
    def build(
        cls,
        hf_dir: Path,
        parallel: ParallelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
        recompute_modules: Sequence[str] = ("core_attn",),
        load: bool = True,
        balance: Balancing | None = None,
        lora: LoraConfig | None = None,
        seed: int = 0,
        progress: LoadProgress | None = None,
    ) -> PolicyModel:
        """Make the model of ``hf_dir`` on this rank (after ``init_parallel``) and load its weights.

        ``load=False`` draws random weights. ``balance``: experts can be borrowed, where a pass is given plans.
        ``lora``: only adapters are trained, drawn by ``seed``.
        ``progress`` grows while weights are read. Raises ConfigError where the directory or the layout does not fit.
        """
        facts, ranks = read_model_spec(hf_dir), current_ranks()
        config = transformer_config(facts, parallel, dtype, recompute, recompute_modules)
        kernels = choose_kernels(facts, parallel, dtype, device, balanced=balance is not None)
        config.moe_permute_fusion = kernels.fused_permutation
        config.moe_token_dispatcher_type = kernels.dispatcher
        count = parallel.virtual_pipeline
        with device:  # Megatron makes the routers' weights, and the shared experts' gates, on the default device
            modules = [
                HiddenGPT(
                    config=config,
                    transformer_layer_spec=block_spec(
                        config,
                        list(facts.moe),
                        stage if count > 1 else None,
                        kernels=kernels,
                        balanced=balance is not None,
                        lora=lora,
                    ),
                    vocab_size=facts.vocab_size,
                    max_sequence_length=facts.max_positions,
                    pre_process=ranks.pipeline_rank == 0 and stage == 0,
                    post_process=ranks.last_stage and stage == count - 1,
                    share_embeddings_and_output_weights=facts.tied,
                    position_embedding_type="none",  # applied in the core attention, from each token's own position
                    vp_stage=stage if count > 1 else None,
                )
                for stage in range(count)
            ]
        model = cls(
            modules,
            facts,
            ranks,
            device,
            hf_dir,
            distributed_optimizer=shares_optimizer(parallel),
            balance=balance,
            lora=lora,
            notes=kernels.notes,
        )
        draw((slot for slot in model.slots() if slot.adapter), ranks, seed)
        if load:
            model.load_hf(hf_dir, progress)
        return model

    @property
    def modules(self) -> list[HiddenGPT]:
        """The bare chunks (their ``state_dict``s are this rank's weights)."""
        return [chunk.module for chunk in self.chunks]

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron's numbers, from 1, of the layers that have experts."""
        return tuple(layer + 1 for layer in self.facts.moe_layer_ids)

    @property
    def moe_layers(self) -> int:
        return len(self.facts.moe_layer_ids)

    @property
    def num_experts(self) -> int:
        return self.facts.num_experts

    @property
    def top_k(self) -> int:
        return self.facts.top_k

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    def observe(self, trace: PassTrace | None) -> None:
        """Tell ``trace`` what the following passes bring to the routers and what those use; None: nobody."""
        self._passes.trace = self.replayer.observer = trace

    def forward_logprobs(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        record: bool = False,
        plans: PassPlans | None = None,
    ) -> list[PassOutput]:
        """Log-probs of every token without gradients, one output a batch, on every model-parallel rank.

        ``routes`` replays given experts (None routes natively); ``record`` also returns the experts that this rank's
        routers used. Data ranks may give different numbers of batches. ``plans``: which experts ranks borrow, in a
        model built with ``balance``. Raises ReplayError on routes that are wrong or not consumed exactly once,
        TrainerError on those of other tokens.
        """
        return self._passes.forward(
            batches, routes, temperature=temperature, entropy=entropy, record=record, plans=plans
        )

    def train_microbatches(
        self,
        batches: Sequence[PackedBatch],
        routes: Sequence[Routes | None] | None,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
        entropy_gradient: bool = False,
        plans: PassPlans | None = None,
    ) -> list[dict[str, Any]]:
        """Zero the gradients, run all micro-batches forward and backward, reduce the gradients over data ranks.

        The gradient is that of the *sum* of the losses over all micro-batches and data ranks, so ``loss_fn`` normalizes
        by global counts. The entropy it is given is detached unless ``entropy_gradient``. Returns its metrics, one dict
        a batch. Raises as :meth:`forward_logprobs`.
        """
        return self._passes.train(
            batches,
            routes,
            loss_fn,
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            plans=plans,
        )

    def sum_over_data(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the data ranks, on each of them. Collective."""
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total

    def slots(self) -> Iterator[hf.Slot]:
        """What each of this rank's parameters is in a Hugging Face checkpoint."""
        return hf.slots(self.modules, self.facts, self._homes)

    def rehome(self, homes: NDArray[np.integer]) -> None:
        """From now on experts live as ``homes`` ``[moe_layers, E]`` says (:attr:`r3.balance.Grid.home`), the same on
        all ranks; of a model built with ``balance``. The weights must be loaded anew."""
        assert self.balancer is not None
        self._homes = dict(zip(self.facts.moe_layer_ids, homes.tolist(), strict=True))
        self.balancer.rehome({layer + 1: home for layer, home in self._homes.items()}, self.device)

    def load_hf(self, directory: Path, progress: LoadProgress | None = None) -> None:
        """Load the weights of a Hugging Face checkpoint; ``progress`` grows. Raises ConfigError naming what is missing,
        TrainerError where a file can't be read."""
        hf.load_weights(self.modules, self.facts, directory, self.ranks, self._homes, progress or LoadProgress())

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, adapters merged, on rank 0 alone; every rank must exhaust the
        iterator."""
        changes = dict(self.export_changes()) if self.lora else {}
        for name, weight in hf.export_weights(self.modules, self.facts, self.ranks, self._homes):
            change = changes.get(name + SUFFIX)
            yield name, weight if change is None else merge(weight, change)

    def export_changes(self) -> Iterator[tuple[str, Tensor]]:
        """What adapters make of the checkpoint that this model came from, as engines take it
        (:mod:`agent_rl.engine.server.lora_merge`); else as :meth:`export_weights`."""
        assert self.lora is not None
        for name, a, b in hf.export_adapters(self.modules, self.facts, self.ranks, self._homes):
            yield name + SUFFIX, pack(a, b, self.lora.scale)

    def save_hf(self, directory: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face checkpoint with the config and tokenizer files of the directory this model came from.

        The directory appears whole or not at all; ``dtype`` None keeps the weights' own.
        """
        weights = self.export_weights()
        if self.ranks.rank == 0:
            hf.write_checkpoint(weights, self.directory, directory, dtype or self.config.params_dtype)
        else:
            for _ in weights:
                pass
        torch.distributed.barrier()

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters alone, as PEFT reads them."""
        assert self.lora is not None
        adapters = list(hf.export_adapters(self.modules, self.facts, self.ranks, self._homes))
        if self.ranks.rank == 0:
            hf.write_adapter(adapters, self.directory, directory, self.lora)
        torch.distributed.barrier()


def _wrap(chunk: HiddenGPT, distributed_optimizer: bool) -> DistributedDataParallel:
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer)
    return DistributedDataParallel(chunk.config, config, chunk)
