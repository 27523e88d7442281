"""A tiny random Qwen3-MoE (or other) checkpoint made by transformers, and the packed data the tests run on it."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.model_sizes import DENSE_SIZES, EXPERT_SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

VOCAB, LAYERS = DENSE_SIZES["vocab_size"], DENSE_SIZES["num_hidden_layers"]
EXPERTS, TOP_K = EXPERT_SIZES["num_experts"], EXPERT_SIZES["num_experts_per_tok"]
LENGTHS = (17, 1, 30, 9)
DELTA_KEYS = ("full_attention_interval", "partial_rotary_factor")
MAMBA_KEYS = ("hybrid_override_pattern", "mamba_n_groups")
"""See :func:`write_model`."""


def make(
    directory: Path,
    *,
    kind: str = "qwen3_moe",
    tied: bool = True,
    seed: int = 0,
    published: Sequence[str] = (),
    **changes: Any,
) -> Any:
    """A tiny model of ``kind`` (a model_type) with a tokenizer file. ``published``: see :func:`write_model`."""
    common = DENSE_SIZES | {"head_dim": 16, "tie_word_embeddings": tied, "initializer_range": 0.3}
    experts = EXPERT_SIZES | {"norm_topk_prob": True} if "moe" in kind else {}
    model = write_model(directory, kind, common | experts | changes, seed, published)
    (directory / "tokenizer.json").write_text("{}")
    return model


def write_model(directory: Path, kind: str, sizes: dict[str, Any], seed: int = 0, published: Sequence[str] = ()) -> Any:
    """Save a random model in ``directory`` and return it (float32, evaluation mode). A size of None is left out.
    ``published``: sizes that transformers leaves out of its config.json and published models have there."""
    torch.manual_seed(seed)
    sizes = {name: size for name, size in sizes.items() if size is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().eval()
    model.get_input_embeddings().padding_idx = None  # it would have no gradient
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # ones and zeros would hide one that is not applied
            parameter.data += 0.2 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.2 * torch.randn_like(buffer)
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: sizes[name] for name in published}, indent=2))
    return model


def checkpoint_tensors(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` of transformers' ``model``, which stacks experts, by the names of its checkpoint."""
    found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return found


def reference(model: Any, sequences: list[torch.Tensor], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of packed sequences, each run by itself through transformers."""
    logprobs, entropy = [], []
    for tokens in sequences:
        table = (model(tokens[None]).logits[0].float() / temperature).log_softmax(-1)
        chosen = table[:-1].gather(1, tokens[1:, None])[:, 0]
        logprobs += [chosen.new_zeros(1), chosen]
        entropy += [chosen.new_zeros(1), -(table.exp() * table).sum(-1)[:-1]]
    return torch.cat(logprobs), torch.cat(entropy)


def sequences(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def packed(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    return PackedBatch.from_sequences(sequences(seed, lengths))


def random_routes(
    tokens: int, layers: int = LAYERS, seed: int = 2, *, experts: int = EXPERTS, top_k: int = TOP_K
) -> torch.Tensor:
    """Distinct random experts, ``[tokens, layers, top_k]`` uint8: rows can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, experts, generator=generator).argsort(-1)[..., :top_k].to(torch.uint8)


def everywhere(experts: torch.Tensor) -> PackedRoutes:
    """Routes without absent rows."""
    return PackedRoutes(experts, torch.ones(len(experts), dtype=torch.bool))


class RouterEvents:
    """An observer of a replayer that records every call as ``(method, layer number, *arguments)``."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Callable[..., None]:
        def record(*arguments: Any) -> None:
            self.events.append((method, *(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)))

        return record

    def of(self, method: str, layer: int) -> list[tuple[Any, ...]]:
        return [event[2:] for event in self.events if event[:2] == (method, layer)]


def tensors_in_graphs() -> list[torch.Tensor]:
    """All tensors of this process that are part of an autograd graph."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.grad_fn is not None]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def write_published(directory: Path, sizes: dict[str, Any]) -> Any:
    """Save a random Qwen3.5-MoE with a vision tower as it is published, with stacked experts and a tensor of a layer
    that predicts further tokens. Returns transformers' text model, whose names begin with ``model.language_model``."""
    torch.manual_seed(0)
    text = sizes | {"model_type": "qwen3_5_moe_text"}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": sizes["hidden_size"], "num_position_embeddings": 16}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    written = json.loads(path.read_text())
    written["text_config"] |= {name: sizes[name] for name in DELTA_KEYS}
    path.write_text(json.dumps(written))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors |= {"mtp.fc.weight": torch.randn(3, 5).bfloat16()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model
