"""The modules that mix the tokens of a layer, by the name of their mixer.

Each is made with ``(config, layer_number, *, model_spec, kernels, lora)`` and maps the hidden states ``[S, 1, H]`` of
this tensor rank's tokens to their change, with no bias beside it (Megatron's interface of an attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from agent_rl.models.parts import Mixer
from agent_rl.train.megatron.mixers.delta import GatedDeltaNet
from agent_rl.train.megatron.mixers.grouped import GroupedAttention
from agent_rl.train.megatron.mixers.latent import LatentAttention
from agent_rl.train.megatron.mixers.mamba import Mamba2

MIXERS: Mapping[Mixer, type[torch.nn.Module]] = MappingProxyType(
    {"grouped": GroupedAttention, "latent": LatentAttention, "delta": GatedDeltaNet, "mamba": Mamba2}
)
