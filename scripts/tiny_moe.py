"""A tiny Qwen3-MoE, GLM-4-MoE or dense Qwen3 as a Hugging Face checkpoint, with structured initial weights.

From random weights a model of this size learns to copy text only after very many updates, and an agent that cannot copy
a line cannot edit it. Two attention heads therefore start as an induction circuit: a head of layer 0 attends to the
previous token, and a head of layer 1 attends to the token that followed an earlier occurrence of the current token, and
copies it. All other weights are random. Training may change every weight.

The tokenizer is byte-level BPE with 1,024 tokens, trained on generated repositories and dialogues. Numbers are split
into digits, words include their leading space, a run of indentation is one piece, and each tag of the XML tool-call
format is one token, so that an episode has about 250 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Weights = dict[str, NDArray[np.float32]]

VOCAB_SIZE = 1024
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_PIECES = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n|[^\S\n]+"
_TOOLS = ("file_editor", "execute_bash", "search", "finish")
_PARAMETERS = (
    *("command", "path", "old_str", "new_str", "file_text", "insert_line", "view_range"),
    *("cmd", "search_term", "result"),
)
TAGS = (
    *(f"<function={name}>" for name in _TOOLS),
    *(f"<parameter={name}>" for name in _PARAMETERS),
    "</parameter>",
    "</function>",
)


@dataclass(frozen=True, slots=True)
class TinyMoe:
    """The sizes, under the names of Qwen3-MoE's config, and the family."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    rope_theta: float = 1e6
    model_type: Literal["qwen3_moe", "glm4_moe", "qwen3"] = "qwen3_moe"

    def config(self, eos: int, pad: int) -> dict[str, Any]:
        """The content of ``config.json``."""
        kinds = {"qwen3_moe": self._qwen_experts, "glm4_moe": self._glm_experts, "qwen3": self._dense}
        return {
            **kinds[self.model_type](),
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": eos,
            "pad_token_id": pad,
            "bos_token_id": None,
        }

    def _dense(self) -> dict[str, Any]:
        """One MLP as wide as all experts together."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "intermediate_size": self.moe_intermediate_size * self.num_experts,
        }

    def _experts(self) -> dict[str, Any]:
        return {
            "intermediate_size": self.moe_intermediate_size * self.num_experts_per_tok,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "norm_topk_prob": True,
        }

    def _qwen_experts(self) -> dict[str, Any]:
        return self._experts() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "sliding_window": None,
            "use_sliding_window": False,
        }

    def _glm_experts(self) -> dict[str, Any]:
        """Sigmoid scores with a correction bias, and a shared expert of an expert's size in every layer."""
        return self._experts() | {
            "architectures": ["Glm4MoeForCausalLM"],
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": True,
            "partial_rotary_factor": 1.0,
        }


_PAPER = TinyMoe(num_hidden_layers=8, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=16)
SHAPES: Mapping[str, TinyMoe] = {
    "tiny": TinyMoe(),
    "paper": _PAPER,
    "glm": replace(_PAPER, model_type="glm4_moe"),
    "dense": replace(_PAPER, model_type="qwen3"),
}
"""``tiny``: the quickstart's model. ``paper``: the number of experts of Qwen3-30B-A3B, whose 8th and 9th of 128 router
logits are often so close that bfloat16 swaps them. ``glm``: ``paper`` with the router of GLM-4.5. ``dense``:
``paper`` with one MLP of as many weights in place of a layer's experts."""


_CORRECTION = 0.05
"""The standard deviation of correction biases. Training does not change them."""


def initial_weights(sizes: TinyMoe, seed: int) -> Weights:
    """Random weights by their Hugging Face names, with the induction circuit in layers 0 and 1."""
    rng = np.random.default_rng(seed)

    def normal(std: float, *shape: int) -> NDArray[np.float32]:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    hidden, head = sizes.hidden_size, sizes.head_dim
    weights: Weights = {
        "model.embed_tokens.weight": normal(0.1, sizes.vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(sizes.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        weights[f"{attention}.q_proj.weight"] = normal(0.05, sizes.num_attention_heads * head, hidden)
        weights[f"{attention}.k_proj.weight"] = normal(0.05, sizes.num_key_value_heads * head, hidden)
        weights[f"{attention}.v_proj.weight"] = normal(0.05, sizes.num_key_value_heads * head, hidden)
        weights[f"{attention}.o_proj.weight"] = normal(0.01, hidden, sizes.num_attention_heads * head)
        for norm, width in (("q_norm", head), ("k_norm", head)):
            weights[f"{attention}.{norm}.weight"] = np.full(width, 1.7, np.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
        experts, inner = [f".experts.{expert}" for expert in range(sizes.num_experts)], sizes.moe_intermediate_size
        down = 0.01
        if sizes.model_type == "qwen3":  # the output is as large as that of one expert
            experts, inner, down = [""], inner * sizes.num_experts, down / sizes.num_experts**0.5
        else:
            weights[f"{prefix}.mlp.gate.weight"] = normal(0.05, sizes.num_experts, hidden)
        if sizes.model_type == "glm4_moe":
            weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = normal(_CORRECTION, sizes.num_experts)
            experts.append(".shared_experts")
        for expert in experts:
            mlp = f"{prefix}.mlp{expert}"
            weights[f"{mlp}.gate_proj.weight"] = normal(0.05, inner, hidden)
            weights[f"{mlp}.up_proj.weight"] = normal(0.05, inner, hidden)
            weights[f"{mlp}.down_proj.weight"] = normal(down, hidden, inner)
    _set_induction_circuit(weights, sizes, rng)
    return weights


def _set_induction_circuit(weights: Weights, sizes: TinyMoe, rng: np.random.Generator) -> None:
    """Set head 0 of layer 0 (previous token) and head 0 of layer 1 (induction).

    Both heads use embedding dimension 0, a constant. Through the tied output layer it adds the same logit to every
    token, which changes no probability.
    """
    head, half = sizes.head_dim, sizes.head_dim // 2
    basis = np.linalg.qr(rng.standard_normal((sizes.hidden_size - 1, sizes.hidden_size - 1)))[0].astype(np.float32)
    token, written = (np.zeros((half, sizes.hidden_size), np.float32) for _ in range(2))
    token[:, 1:], written[:, 1:] = basis[:half], basis[half : 2 * half]
    weights["model.embed_tokens.weight"][:, 0] = 0.5

    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    query, key = _previous_token_vectors(sizes)
    for name, vector in (("q_proj", query), ("k_proj", key)):
        weights[f"{first}.{name}.weight"][:head] *= 0.1
        weights[f"{first}.{name}.weight"][:head, 0] = vector
    _copy(weights, first, token, written, 0.25, head)

    # The slow half of RoPE rotates little over an episode: there queries match keys by content, at any distance.
    slow = np.r_[half // 2 : half, half + half // 2 : head]
    for name, reads in (("q_proj", token), ("k_proj", written)):
        weights[f"{second}.{name}.weight"][:head] *= 0.1
        weights[f"{second}.{name}.weight"][slow] = reads
    full = np.zeros((head, sizes.hidden_size), np.float32)
    full[:, 1:] = np.linalg.qr(rng.standard_normal((sizes.hidden_size - 1, head)))[0].T
    _copy(weights, second, full, full, 0.25, head)


def _copy(
    weights: Weights,
    attention: str,
    reads: NDArray[np.float32],
    writes: NDArray[np.float32],
    gain: float,
    head: int,
) -> None:
    """Make head 0 copy the projection on ``reads`` at the attended token to the directions ``writes``."""
    rows = len(reads)
    weights[f"{attention}.v_proj.weight"][:rows] = reads
    weights[f"{attention}.v_proj.weight"][rows:head] *= 0.1
    weights[f"{attention}.o_proj.weight"][:, :rows] = gain * writes.T


def _previous_token_vectors(sizes: TinyMoe) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A constant query and key whose product under RoPE is largest at a distance of one token."""
    half = sizes.head_dim // 2
    turns = sizes.rope_theta ** (-np.arange(half) / half)
    size = np.zeros(half)
    size[:6] = np.sqrt([0.3, 0.25, 0.15, 0.1, 0.1, 0.1])
    query = np.concatenate([size * np.cos(turns), -size * np.sin(turns)])
    key = np.concatenate([size, np.zeros(half)])
    return query.astype(np.float32), key.astype(np.float32)


def save_checkpoint(directory: Path, weights: Weights, sizes: TinyMoe, *, eos: int, pad: int) -> None:
    """Write ``model.safetensors``, ``config.json`` and ``generation_config.json`` into ``directory``.

    The file includes the tied output projection, because SGLang's Qwen3-MoE never ties it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(sizes.config(eos, pad), indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def train_tokenizer(corpus: Iterable[str]) -> Tokenizer:
    """A tokenizer with exactly ``VOCAB_SIZE`` tokens, special tokens and tags first. Any text round-trips.

    Raises ValueError if the corpus is too small.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS, *TAGS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are required: use more text"
        )
    return _with_plain_tags(tokenizer)


def _with_plain_tags(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the tags as ordinary added tokens, so that decoding without special tokens keeps them."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(data))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [BOS],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": chat_template(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def chat_template() -> str:
    """ChatML without the newline after a message, so that the end of a turn is one token."""
    return (Path(__file__).parent / "tiny_moe_template.jinja").read_text()
