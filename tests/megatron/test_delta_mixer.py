"""The layer of the gated delta rule against transformers' layer: packed sequences of several chunks, and gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_tiny as tiny
import pytest
from support.model_sizes import DELTA_SIZES, DENSE_SIZES

from agent_rl.config import ParallelConfig
from agent_rl.models.spec import read_model_spec

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch

pytestmark = pytest.mark.megatron
OTHER_NAMES = {"A_log": "decay_log", "norm.weight": "norm", "conv1d.weight": "conv1d"}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_outputs_and_gradients_equal_transformers(kind: str, tmp_path: Path) -> None:
    from agent_rl.train.megatron.kernel_choice import choose_kernels
    from agent_rl.train.megatron.mixers.delta import GatedDeltaNet
    from agent_rl.train.megatron.transformer import transformer_config

    sizes = DENSE_SIZES | DELTA_SIZES | {"initializer_range": 0.3, "tie_word_embeddings": False}
    reference = tiny.write_model(tmp_path, kind, sizes, published=tiny.DELTA_KEYS).model.layers[0].linear_attn
    spec = read_model_spec(tmp_path)
    config = transformer_config(spec, ParallelConfig(), torch.float32, "none", ())
    kernels = choose_kernels(spec, ParallelConfig(), torch.float32, torch.device("cpu"), balanced=False)
    ours = GatedDeltaNet(config, 1, model_spec=spec, kernels=kernels)
    wanted = {OTHER_NAMES.get(name, name): parameter for name, parameter in reference.named_parameters()}
    ours.load_state_dict({name: parameter.detach() for name, parameter in wanted.items()})

    lengths = [70, 3, 65]
    hidden = torch.randn(sum(lengths), 1, spec.hidden)
    packed: Any = SimpleNamespace(layout=SimpleNamespace(lengths=lengths, context_size=1))
    output = ours(hidden, packed_seq_params=packed)[0][:, 0]
    expected = torch.cat([reference(part[None, :, 0])[0] for part in hidden.split(lengths)])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-4, msg=name)
