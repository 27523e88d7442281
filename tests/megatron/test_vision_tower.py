"""Qwen3.5 as it is published: the text model is trained, and the export keeps the vision tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest
from support.model_sizes import DELTA_SIZES, DENSE_SIZES

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from safetensors.torch import load_file

from agent_rl.train.megatron.packed_batch import PackedBatch

pytestmark = pytest.mark.megatron


def test_text_model_equals_transformers_and_export_keeps_other_tensors(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    from megatron_worker import gradients

    reference = tiny.write_published(tmp_path / "model", DENSE_SIZES | DELTA_SIZES | {"initializer_range": 0.1})
    ours, sequences = build(tmp_path / "model"), tiny.sequences()
    batch, (expected, _) = PackedBatch.from_sequences(sequences), tiny.reference(reference, sequences)
    output = ours.forward_logprobs([batch], None)[0]
    torch.testing.assert_close(output.logprobs, expected.detach(), rtol=0, atol=1e-4)

    expected.sum().backward()
    ours.train_microbatches([batch], None, lambda logprobs, *_: (logprobs.sum(), {}))
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    found = gradients(ours)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    ours.save_hf(tmp_path / "saved", dtype=torch.bfloat16)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        kept = name not in found or name.endswith(".A_log")
        assert torch.equal(after[name], tensor if kept else tensor.bfloat16()), name
    assert (tmp_path / "saved/config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
