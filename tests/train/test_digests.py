"""Checksums of tensors that an engine arranges in another way than the checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fake_sglang import SPEC

from agent_rl.models.parts import Mamba
from agent_rl.weight_sync.digests import DigestKind, Digests, engine_name

EXPERTS, HIDDEN, INNER = 3, 5, 64
NAME = "model.layers.1.mlp.experts"


def checksums(tensors: dict[str, Any], ranks: int, **changes: Any) -> list[dict[str, str]]:
    kind = DigestKind(ranks)
    digests = Digests(replace(SPEC, **{"expert_form": "clamped"} | changes), [kind])
    for name, tensor in tensors.items():
        digests.add([name], [tensor.shape], tensor.itemsize, tensor.reshape(-1).view(np.uint8))
    return [dict(rank) for rank in digests.expected()[kind]]


def checksum(tensor: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).digest()[:8].hex()


@pytest.mark.parametrize("ranks", [1, 2])
def test_stacked_experts_are_transposed_and_divided(ranks: int) -> None:
    generator = np.random.default_rng(0)
    shapes = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
        "gate_up_proj_bias": (EXPERTS, 2 * INNER),
        "down_proj": (EXPERTS, INNER, HIDDEN),
        "down_proj_bias": (EXPERTS, HIDDEN),
    }
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = checksums({f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, ranks)
    for rank, actual in enumerate(found):
        wide = slice(rank * 2 * INNER // ranks, (rank + 1) * 2 * INNER // ranks)
        narrow = slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
        down_bias = tensors["down_proj_bias"]
        assert actual == {
            f"{NAME}.w13_weight": checksum(tensors["gate_up_proj"].swapaxes(1, 2)[:, wide]),
            f"{NAME}.w13_weight_bias": checksum(tensors["gate_up_proj_bias"][:, wide]),
            f"{NAME}.w2_weight": checksum(tensors["down_proj"].swapaxes(1, 2)[:, :, narrow]),
            f"{NAME}.w2_weight_bias": checksum(down_bias if rank == 0 else np.zeros_like(down_bias)),
        }


def test_sinks_are_divided_and_the_bias_of_the_output_is_not() -> None:
    sinks, bias = np.arange(4, dtype=np.float32), np.arange(6, dtype=np.float32)
    attention = "model.layers.0.self_attn"
    found = checksums({f"{attention}.sinks": sinks, f"{attention}.o_proj.bias": bias}, 2)
    assert [rank[f"{attention}.sinks"] for rank in found] == [checksum(sinks[:2]), checksum(sinks[2:])]
    assert {rank[f"{attention}.o_proj.bias"] for rank in found} == {checksum(bias)}


def test_the_correction_bias_of_ernie_has_the_engines_name() -> None:
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    assert engine_name(name) == "model.layers.1.mlp.gate.e_score_correction_bias"


def test_mamba_parts_are_divided_each_and_the_decay_is_not_its_logarithm() -> None:
    """4 heads of width 1, 2 groups of width 3: rows are 4 gates, 4 values, 6 inputs, 6 outputs and 4 time steps."""
    mixer = "layers.0.mixer"
    rows, decay_log = np.arange(24, dtype=np.float32), np.array([-1, 0, 1, 2], np.float32)
    tensors = {f"backbone.{mixer}.in_proj.weight": rows.reshape(24, 1), f"backbone.{mixer}.A_log": decay_log}
    mamba = Mamba(heads=4, head_dim=1, groups=2, state=3, kernel=4)
    for rank, actual in enumerate(checksums(tensors, 2, expert_form="squared", mamba=mamba)):
        parts = [part.reshape(2, -1)[rank] for part in np.split(rows, [4, 8, 14, 20])]
        assert actual == {
            f"model.{mixer}.in_proj.weight": checksum(np.concatenate(parts)),
            f"model.{mixer}.A": checksum(-np.exp(decay_log.astype(float)).astype("f4").reshape(2, -1)[rank]),
        }


@pytest.mark.parametrize(
    ("published", "served"),
    [
        ("backbone.embeddings.weight", "model.embed_tokens.weight"),
        ("backbone.norm_f.weight", "model.norm_f.weight"),
        ("backbone.layers.1.mixer.k_proj.weight", "model.layers.1.mixer.qkv_proj.weight"),
        ("backbone.layers.1.mixer.up_proj.weight", "model.layers.1.mixer.up_proj.weight"),
        ("backbone.layers.1.mixer.shared_experts.up_proj.weight", "model.layers.1.mixer.shared_experts.up_proj.weight"),
        ("backbone.layers.1.mixer.experts.3.up_proj.weight", "model.layers.1.mixer.experts.w13_weight"),
    ],
)
def test_nemotron_h_has_the_engines_names(published: str, served: str) -> None:
    assert engine_name(published) == served
