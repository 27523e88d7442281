"""The trained model on one rank: its layers, log-probs of packed batches, gradients, and weights in and out."""

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
from agent_rl.config.train import FrozenModule
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.models.tensors import belongs_to
from agent_rl.train.expert_balancing.plan_feed import BalancingSpec, ExpertBalancer
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.hf_writer import write_adapter, write_checkpoint
from agent_rl.train.megatron import hf_weights as hf
from agent_rl.train.megatron.forward_backward import ForwardBackward
from agent_rl.train.megatron.kernel_choice import choose_kernels
from agent_rl.train.megatron.layers import block_spec
from agent_rl.train.megatron.lora import init_adapters, train_only
from agent_rl.train.megatron.parallel import ParallelState, current_parallel_state
from agent_rl.train.megatron.token_sharding import shard_spec
from agent_rl.train.megatron.transformer import transformer_config
from agent_rl.train.parallel_checks import uses_distributed_optimizer
from agent_rl.train.route_trace import PassTrace
from agent_rl.weight_sync.adapters import SUFFIX, merge, pack
from r3.megatron_replay import RouterReplayer


class HiddenGPT(GPTModel):
    """A GPT model whose last stage returns hidden states; :mod:`.logprobs` computes logits in chunks."""

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """The output projection ``[local vocabulary, hidden]`` of the last stage (the embedding where tied)."""
        if self.share_embeddings_and_output_weights:
            tied: Tensor = self.shared_embedding_or_output_weight()
            return tied
        weight: Tensor = self.output_layer.weight
        return weight


class PolicyModel(ForwardBackward):
    """This rank's part of the policy model.

    ``chunks``: the DDP-wrapped modules, one per virtual pipeline stage. ``config``: the Megatron configuration for
    ``get_megatron_optimizer``. ``shard``: the tokens and MoE layers of this rank's routers. ``notes``: lines about the
    chosen kernels. Every method that runs the model is collective.
    """

    def __init__(
        self,
        modules: Sequence[HiddenGPT],
        model_spec: ModelSpec,
        ranks: ParallelState,
        device: torch.device,
        directory: Path,
        *,
        distributed_optimizer: bool = False,
        balance: BalancingSpec | None = None,
        lora: LoraConfig | None = None,
        freeze: Sequence[FrozenModule] = (),
        notes: Sequence[str] = (),
    ) -> None:
        if lora:
            train_only(modules, lambda name: ".lora." in name)
        if freeze:
            train_only(modules, lambda name: not belongs_to(name, freeze))
        self.notes, self.directory, self.lora = tuple(notes), directory, lora
        self._expert_order: hf.ExpertOrder = {}
        self.config: TransformerConfig = modules[0].config
        shard = shard_spec(ranks, model_spec.moe, model_chunks=len(modules))
        moe_layers = [model_spec.moe_layer_ids[column] + 1 for column in shard.columns]
        replayer = RouterReplayer(modules, moe_layers)
        balancer = ExpertBalancer(modules, balance, moe_layers) if balance else None
        chunks = [_wrap(module, distributed_optimizer) for module in modules]
        super().__init__(chunks, model_spec, ranks, device, replayer, shard, balancer)

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
        balance: BalancingSpec | None = None,
        lora: LoraConfig | None = None,
        freeze: Sequence[FrozenModule] = (),
        model_spec: ModelSpec | None = None,
        seed: int = 0,
        progress: LoadProgress | None = None,
    ) -> PolicyModel:
        """Make the model of ``hf_dir`` on this rank (after ``init_parallel``) and load its weights.

        ``load=False`` draws random weights. ``balance``: experts can be borrowed, where a pass is given plans.
        ``lora``: only adapters are trained, drawn by ``seed``. ``freeze``: modules that are not trained.
        ``model_spec``: the architecture; None reads ``config.json``.
        ``progress`` grows while weights are read. Raises ConfigError where the directory or the layout does not fit.
        """
        model_spec, ranks = model_spec or read_model_spec(hf_dir), current_parallel_state()
        config = transformer_config(model_spec, parallel, dtype, recompute, recompute_modules)
        kernels = choose_kernels(model_spec, parallel, dtype, device, balanced=balance is not None)
        config.moe_permute_fusion = kernels.fused_permutation
        config.moe_token_dispatcher_type = kernels.dispatcher
        count = parallel.virtual_pipeline
        with device:  # Megatron creates routers and the gates of shared experts on the default device
            modules = [
                HiddenGPT(
                    config=config,
                    transformer_layer_spec=block_spec(
                        config,
                        model_spec,
                        stage if count > 1 else None,
                        kernels=kernels,
                        balanced=balance is not None,
                        lora=lora,
                    ),
                    vocab_size=model_spec.vocab_size,
                    max_sequence_length=model_spec.max_positions,
                    pre_process=ranks.pipeline_rank == 0 and stage == 0,
                    post_process=ranks.last_stage and stage == count - 1,
                    share_embeddings_and_output_weights=model_spec.tied,
                    position_embedding_type="none",  # applied in the core attention, from each token's own position
                    vp_stage=stage if count > 1 else None,
                )
                for stage in range(count)
            ]
        model = cls(
            modules,
            model_spec,
            ranks,
            device,
            hf_dir,
            distributed_optimizer=uses_distributed_optimizer(parallel),
            balance=balance,
            lora=lora,
            freeze=freeze,
            notes=kernels.notes,
        )
        init_adapters((slot for slot in model.param_mappings() if slot.adapter), ranks, seed)
        if load:
            model.load_hf(hf_dir, progress)
        return model

    @property
    def modules(self) -> list[HiddenGPT]:
        """The chunks without DDP; their ``state_dict``s are this rank's weights."""
        return [chunk.module for chunk in self.chunks]

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron's numbers, from 1, of the layers with experts."""
        return tuple(layer + 1 for layer in self.model_spec.moe_layer_ids)

    @property
    def moe_layers(self) -> int:
        return len(self.model_spec.moe_layer_ids)

    def observe(self, trace: PassTrace | None) -> None:
        """Report the routes of the following passes to ``trace``; None stops."""
        self.trace = self.replayer.observer = trace

    def sum_over_data(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the data ranks. Collective."""
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total

    def param_mappings(self) -> Iterator[hf.ParamMapping]:
        """The Hugging Face tensors of each of this rank's parameters."""
        return hf.param_mappings(self.modules, self.model_spec, self._expert_order, self.lora)

    def set_placement(self, placement: NDArray[np.integer]) -> None:
        """Place experts by ``placement`` ``[moe_layers, E]`` (:attr:`r3.balance.ExpertLayout.placement`), the same on
        all ranks, in a model built with ``balance``. The caller must load the weights again."""
        assert self.balancer is not None
        self._expert_order = dict(zip(self.model_spec.moe_layer_ids, placement.tolist(), strict=True))
        self.balancer.set_placement({layer + 1: order for layer, order in self._expert_order.items()}, self.device)

    def load_hf(self, directory: Path, progress: LoadProgress | None = None) -> None:
        """Load the weights of a Hugging Face checkpoint; ``progress`` counts the bytes. Raises ConfigError for a
        missing tensor, TrainerError for a file that cannot be read."""
        hf.load_weights(self.param_mappings(), directory, self.ranks, progress or LoadProgress())

    def export_weights(self, to: hf.Receivers = "rank 0") -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors with adapters merged. Only the receivers yield; every rank must exhaust
        the iterator."""
        changes = dict(self.export_changes(to)) if self.lora else {}
        mappings = self.param_mappings()
        for name, weight in hf.export_weights(mappings, self.model_spec, self.ranks, to):
            change = changes.get(name + SUFFIX)
            yield name, weight if change is None else merge(weight, change)

    def export_changes(self, to: hf.Receivers = "rank 0") -> Iterator[tuple[str, Tensor]]:
        """The packed adapters, which engines merge into the base checkpoint (:mod:`agent_rl.engine.server.lora_merge`).
        Iterates as :meth:`export_weights`."""
        assert self.lora is not None
        for name, a, b in hf.export_adapters(self.param_mappings(), self.ranks, to):
            yield name + SUFFIX, pack(a, b, self.lora.scale)

    def save_hf(self, directory: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face checkpoint with the config and tokenizer files of the directory this model came from.

        The directory appears atomically. ``dtype`` None keeps the dtype of the weights.
        """
        weights = self.export_weights()
        if self.ranks.rank == 0:
            write_checkpoint(weights, self.directory, directory, dtype or self.config.params_dtype)
        else:
            for _ in weights:
                pass
        torch.distributed.barrier()

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in PEFT's format."""
        assert self.lora is not None
        adapters = list(hf.export_adapters(self.param_mappings(), self.ranks))
        if self.ranks.rank == 0:
            write_adapter(adapters, self.directory, directory, self.lora)
        torch.distributed.barrier()


def _wrap(chunk: HiddenGPT, distributed_optimizer: bool) -> DistributedDataParallel:
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer)
    return DistributedDataParallel(chunk.config, config, chunk)
