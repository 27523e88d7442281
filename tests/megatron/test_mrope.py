"""Qwen3.5's rotary embedding of three axes is the plain one for text."""

from __future__ import annotations

import pytest
from support.model_sizes import DELTA_SIZES, DENSE_SIZES

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch

from agent_rl.train.megatron.norm_and_rope import rotary, rotary_tables

pytestmark = pytest.mark.megatron


def test_text_positions_on_three_axes_rotate_as_on_one() -> None:
    from transformers import AutoConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    sizes = DENSE_SIZES | DELTA_SIZES | {"head_dim": 256, "rope_parameters": parameters, "partial_rotary_factor": 0.25}
    embedding = Qwen3_5MoeTextRotaryEmbedding(AutoConfig.for_model("qwen3_5_moe_text", **sizes))
    positions = torch.tensor([0, 1, 17, 4095, 262143])
    cos, sin = embedding(torch.zeros(1), positions[None, None].expand(3, 1, -1))
    ours, signed = rotary_tables(positions, rotary(64, 1e7, None))
    torch.testing.assert_close(ours[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(signed[:, 0, 32:], sin[0, :, 32:], rtol=0, atol=1e-6)
