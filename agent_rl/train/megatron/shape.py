"""From a Hugging Face config.json to Megatron's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from agent_rl.config import ParallelConfig
from agent_rl.families import Family, is_moe, read_config
from agent_rl.train.layouts import expert_problems, model_problems, recompute_problems, refuse
from agent_rl.train.megatron.rotary import Rotary, rotary


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a checkpoint's ``config.json`` the model is built from, under the key names of
    :func:`agent_rl.families.read_config`. ``moe[i]``: layer i has experts."""

    family: Family
    config: dict[str, Any]
    moe: tuple[bool, ...]

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read ``folder/config.json``. Raises ConfigError naming what is missing or not supported."""
        family, config = read_config(folder)
        layers = range(config["num_hidden_layers"])
        return cls(family, config, tuple(family.experts and is_moe(config, layer) for layer in layers))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Megatron's 1-based numbers of the layers that have experts."""
        return tuple(index + 1 for index, moe in enumerate(self.moe) if moe)

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def rotary(self) -> Rotary:
        """The position embedding of queries and keys."""
        return rotary(self.head_dim, self.config["rope_theta"], self.config["rope_scaling"])

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def transformer_config(
        self,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        recompute: Literal["none", "selective", "full"],
        recompute_modules: Sequence[str],
    ) -> TransformerConfig:
        """Megatron's configuration, with everything off that needs Transformer Engine or Apex.

        Raises ConfigError where the layout does not fit the model (:mod:`agent_rl.train.layouts`).
        """
        config, full = self.config, recompute == "full"
        modules = tuple(recompute_modules) if recompute == "selective" else ()
        refuse(
            model_problems(parallel, config)
            + recompute_problems(modules, config)
            + expert_problems(str(dtype).removeprefix("torch."), config)
        )
        virtual = parallel.virtual_pipeline > 1
        return TransformerConfig(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_attention_heads=config["num_attention_heads"],
            num_query_groups=config["num_key_value_heads"],
            kv_channels=self.head_dim,
            ffn_hidden_size=config["intermediate_size"],
            qk_layernorm=self.family.qk_norm,
            add_qkv_bias=bool(config["qkv_bias"]),
            normalization="RMSNorm",
            layernorm_epsilon=config["rms_norm_eps"],
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            init_method_std=config.get("initializer_range", 0.02),
            # Also where weights are loaded: without it Megatron does not mark parameters as cut over tensor ranks, and
            # the gradient norm leaves those of the other ranks out.
            perform_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if virtual else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            sequence_parallel=parallel.tensor > 1,
            variable_seq_lengths=parallel.pipeline > 1,
            batch_p2p_comm=False,
            # Without it the interleaved schedule exchanges activations and gradients in one call, and between two
            # stages, where the next is also the previous, each takes the other's lengths.
            overlap_p2p_comm=virtual,
            # The loss function normalises by global counts, so gradients are summed and never averaged.
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            cuda_graph_scope=[],
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            moe_token_dispatcher_type=parallel.dispatcher,
            recompute_granularity=None if recompute == "none" else recompute,
            recompute_modules=list(modules) if recompute == "selective" else None,
            recompute_method="uniform" if full else None,
            recompute_num_layers=1 if full else None,
            **self._moe_options(),
        )

    def _moe_options(self) -> dict[str, Any]:
        if not any(self.moe):
            return {}
        shared = self.config.get("shared_expert_intermediate_size")
        return {
            "num_moe_experts": self.config["num_experts"],
            "moe_ffn_hidden_size": self.config["moe_intermediate_size"],
            "moe_router_topk": self.config["num_experts_per_tok"],
            "moe_layer_freq": [int(moe) for moe in self.moe],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # Gates that are not normalised over the top k are the softmax over all experts.
            "moe_router_pre_softmax": not self.config["norm_topk_prob"],
            "moe_shared_expert_intermediate_size": shared,
            "moe_shared_expert_gate": shared is not None,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,
            "moe_enable_routing_replay": True,
        }
