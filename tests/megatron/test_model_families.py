"""Every model family of the table against transformers: logits, gradients, replay, export; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest
from other_sizes import other_sizes
from support.model_sizes import (
    DEEPSEEK_V3_SIZES,
    DELTA_SIZES,
    DENSE_SIZES,
    ERNIE4_5_MOE_SIZES,
    EXPERT_SIZES,
    GLM4_MOE_SIZES,
    GPT_OSS_SIZES,
    INDEXER_SIZES,
    NEMOTRON_H_SIZES,
)

from agent_rl.errors import ConfigError
from agent_rl.models.families import FAMILIES, read_config

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron.packed_batch import PackedBatch

pytestmark = pytest.mark.megatron
Build = Callable[..., Any]

RANDOM = {"initializer_range": 0.3, "tie_word_embeddings": False, "rope_theta": 1e4}
SIZES = DENSE_SIZES | RANDOM | {"num_hidden_layers": 3}
QWEN3_MOE = EXPERT_SIZES | {"head_dim": 16, "norm_topk_prob": True}
SHARED_EXPERT = EXPERT_SIZES | {"shared_expert_intermediate_size": 40}
GLM = GLM4_MOE_SIZES | {"head_dim": 16, "norm_topk_prob": True}
GLM_PLAIN = {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
MINIMAX_M2 = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "head_dim": 16,
    "rotary_dim": 8,
}
OLMOE = EXPERT_SIZES | {"moe_intermediate_size": None, "intermediate_size": 24}
DELTA = DELTA_SIZES | {"initializer_range": 0.1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DEEPSEEK_V3 = DEEPSEEK_V3_SIZES | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}
GLM_5 = DEEPSEEK_V3_SIZES | INDEXER_SIZES | {"indexer_rope_interleave": True, "rms_norm_eps": 1e-6}


@dataclass(frozen=True)
class Case:
    """A model of the family ``kind`` (model_type) with ``changes`` to SIZES; ``moe``: its layers with experts."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    moe: tuple[int, ...] = ()
    published: tuple[str, ...] = ()


CASES = {
    "qwen2": Case("qwen2"),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Case("qwen3", {"head_dim": 16}),
    "qwen3-yarn": Case("qwen3", {"head_dim": 16, "rope_scaling": YARN}),
    "qwen2-moe": Case("qwen2_moe", SHARED_EXPERT, (0, 1, 2)),
    "qwen2-moe-normalized": Case("qwen2_moe", SHARED_EXPERT | {"norm_topk_prob": True, "mlp_only_layers": [1]}, (0, 2)),
    "qwen3-moe": Case("qwen3_moe", QWEN3_MOE, (0, 1, 2)),
    "qwen3-moe-tied": Case("qwen3_moe", QWEN3_MOE | {"tie_word_embeddings": True}, (0, 1, 2)),
    "qwen3-moe-not-normalized": Case("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": False}, (0, 1, 2)),
    "qwen3-moe-every-second": Case("qwen3_moe", QWEN3_MOE | {"decoder_sparse_step": 2}, (1,)),
    "qwen3-moe-yarn": Case("qwen3_moe", QWEN3_MOE | {"rope_scaling": YARN}, (0, 1, 2)),
    "glm4-moe": Case("glm4_moe", GLM, (1, 2)),
    "glm4-moe-plain": Case("glm4_moe", GLM | GLM_PLAIN, (0, 1, 2)),
    "gpt-oss": Case("gpt_oss", GPT_OSS_SIZES | {"head_dim": 16}, (0, 1, 2)),
    "ernie4-5-moe": Case("ernie4_5_moe", ERNIE4_5_MOE_SIZES, (1, 2)),
    "ernie4-5-moe-tied": Case("ernie4_5_moe", ERNIE4_5_MOE_SIZES | {"tie_word_embeddings": True}, (1, 2)),
    "olmoe": Case("olmoe", OLMOE, (0, 1, 2)),
    "deepseek-v3": Case("deepseek_v3", DEEPSEEK_V3, (1, 2)),
    "deepseek-v32": Case("deepseek_v32", DEEPSEEK_V3 | INDEXER_SIZES, (1, 2)),
    "glm-5": Case("glm_moe_dsa", GLM_5, (1, 2)),
    "minimax-m2": Case("minimax_m2", MINIMAX_M2, (0, 1, 2)),
    "qwen3-next": Case("qwen3_next", DELTA | {"decoder_sparse_step": 2}, (1,), tiny.DELTA_KEYS),
    "qwen3.5-moe-text": Case("qwen3_5_moe_text", DELTA, (0, 1, 2), tiny.DELTA_KEYS),
    "nemotron-h": Case("nemotron_h", NEMOTRON_H_SIZES, (1, 5), tiny.MAMBA_KEYS),
    "mixtral": Case("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2)),
}


SEEDS = (1, 2)


def case_of_other_sizes(plain: Case, seed: int) -> Case:
    """``plain`` with sizes drawn for its family."""
    changes, moe = other_sizes(plain.kind, seed)
    return replace(plain, changes=plain.changes | changes, moe=moe)


FIRST = {case.kind: case for case in reversed(CASES.values())}
OTHER_SIZES = {f"{kind}-sizes-{seed}": case_of_other_sizes(FIRST[kind], seed) for kind in FIRST for seed in SEEDS}
EVERY = CASES | OTHER_SIZES


def test_every_family_has_a_case() -> None:
    """transformers has no Kimi-K2, which computes as DeepSeek-V3 does; Qwen3.5 with its vision tower has a test of its
    own (test_vision_tower.py)."""
    assert {case.kind for case in CASES.values()} == set(FAMILIES) - {"kimi_k2", "qwen3_5_moe"}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHER_SIZES)])
def test_logprobs_gradients_export_and_replay_equal_transformers(name: str, build: Build, tmp_path: Path) -> None:
    """In one test, because making the two models is most of its time."""
    case = EVERY[name]
    reference = tiny.write_model(tmp_path / "model", case.kind, SIZES | case.changes, published=case.published)
    ours = build(tmp_path / "model")
    check_logprobs_gradients_and_export(case, reference, ours, tmp_path)
    if case.moe:
        check_replay(case, reference, ours)


def check_logprobs_gradients_and_export(case: Case, reference: Any, ours: Any, directory: Path) -> None:
    from megatron_worker import gradients
    from transformers import AutoModelForCausalLM

    assert ours.layer_numbers == tuple(layer + 1 for layer in case.moe)
    sequences = tiny.sequences(lengths=(17, 1, 200))
    batch, (expected, entropy) = PackedBatch.from_sequences(sequences), tiny.reference(reference, sequences)
    output = ours.forward_logprobs([batch], None, entropy=True)[0]
    torch.testing.assert_close(output.logprobs, expected.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, entropy.detach(), rtol=0, atol=1e-4)

    weights = torch.linspace(-1, 1, len(batch))

    def loss(got: Tensor, spread: Tensor, _: PackedBatch | None = None) -> tuple[Tensor, dict[str, Any]]:
        return (got * weights + spread * weights.flip(0)).sum(), {}

    loss(expected, entropy)[0].backward()
    ours.train_microbatches([batch], None, loss, entropy_gradient=True)
    found = {name: gradient for name, gradient in gradients(ours).items() if not is_frozen(name)}
    if reference.config.tie_word_embeddings:  # exported twice, for engines that do not tie
        assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
    wanted = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in reference.named_parameters()
        if "correction_bias" not in name
    }
    wanted = {n: tensor for n, tensor in tiny.checkpoint_tensors(reference, wanted).items() if not is_frozen(n)}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    ours.save_hf(directory / "saved")
    configs = [(directory / name / "config.json").read_bytes() for name in ("model", "saved")]
    assert configs[0] == configs[1]
    options = {"dtype": torch.float32, "output_loading_info": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(directory / "saved", **options)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "error_msgs"))
    kept = reference.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in loaded.state_dict().items())
    torch.testing.assert_close(tiny.reference(loaded, sequences)[0], expected, rtol=0, atol=1e-5)


def is_frozen(name: str) -> bool:
    """Whether no gradient reaches a tensor."""
    return "correction_bias" in name or ".indexer." in name


def check_replay(case: Case, reference: Any, ours: Any) -> None:
    """The model's own experts change no bit; other experts give what transformers computes with them."""
    sequences = tiny.sequences(lengths=(17, 9))
    batch = PackedBatch.from_sequences(sequences)
    native = ours.forward_logprobs([batch], None, record=True)[0]
    own = ours.forward_logprobs([batch], [tiny.everywhere(native.routes)])[0]
    assert torch.equal(own.logprobs, native.logprobs)

    spec = ours.model_spec
    given = tiny.random_routes(len(batch), len(case.moe), experts=spec.num_experts, top_k=spec.top_k)
    replayed = ours.forward_logprobs([batch], [tiny.everywhere(given)])[0]
    assert (replayed.logprobs - native.logprobs).abs().max() > 0.1
    pinned = iter(given.split([len(tokens) for tokens in sequences]))
    expected = []
    for tokens in sequences:
        with routed(spec.num_experts, next(pinned).long()):
            expected.append(tiny.reference(reference, [tokens])[0])
    torch.testing.assert_close(replayed.logprobs, torch.cat(expected).detach(), rtol=0, atol=1e-4)


class routed:
    """Makes transformers use the experts ``routes [tokens, moe_layers, k]`` instead of ``torch.topk``'s."""

    def __init__(self, experts: int, routes: Tensor) -> None:
        self._experts, self._layers = experts, iter(routes.unbind(1))

    def __enter__(self) -> None:
        self._topk = torch.topk
        torch.topk = self._chosen  # type: ignore[assignment]

    def _chosen(self, scores: Tensor, k: int, dim: int = -1, **options: Any) -> tuple[Tensor, Tensor]:
        if scores.ndim != 2 or scores.shape[-1] != self._experts:  # the choice of groups
            return self._topk(scores, k, dim, **options)
        experts = next(self._layers)
        return scores.gather(dim, experts), experts

    def __exit__(self, *_: Any) -> None:
        torch.topk = self._topk


@pytest.mark.parametrize(
    ("kind", "original", "factor", "truncate"),
    [("qwen3", 16384, 4.0, True), ("qwen3_moe", 16384, 4.0, True), ("gpt_oss", 4096, 32.0, False)],
)
def test_yarn_frequencies_equal_transformers_at_full_length(
    kind: str, original: int, factor: float, truncate: bool
) -> None:
    """The paper's 65,536 tokens, and gpt-oss' 131,072."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from agent_rl.train.megatron.norm_and_rope import rotary

    scaling = {"factor": factor, "original_max_position_embeddings": original, "truncate": truncate}
    length = int(original * factor)
    sizes = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": length}
    sizes["rope_scaling"] = {"rope_type": "yarn", **scaling}
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(kind, **SIZES | sizes), "cpu")
    ours = rotary(128, 1e6, {"beta_fast": 32.0, "beta_slow": 1.0, **scaling})
    assert ours.scale == pytest.approx(scale)
    torch.testing.assert_close((length - 1) * ours.frequencies, (length - 1) * frequencies, rtol=0, atol=1e-2)


def config(tmp_path: Path, kind: str, **changes: Any) -> Path:
    from transformers import AutoConfig

    plain = next(case for case in CASES.values() if case.kind == kind)
    AutoConfig.for_model(kind, **SIZES | plain.changes).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    if not changes.keys().isdisjoint(("rope_theta", "rope_scaling")):  # as transformers 4 wrote them
        written |= {"rope_theta": written.pop("rope_parameters")["rope_theta"]}
    path.write_text(json.dumps({k: v for k, v in (written | changes).items() if v != "absent"}))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3", {"model_type": "llama"}, "model_type 'llama' is not supported; supported: .*mixtral, .*qwen3"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu' is"),
        ("qwen2", {"attention_dropout": 0.1}, r"attention_dropout=0\.1 is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1 is not supported"),
        ("qwen3", {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ("qwen3", {"logit_softcapping": 30.0}, r"logit_softcapping=30\.0 is not supported for qwen3"),
        ("qwen3", {"num_experts": 8}, "num_experts=8 is not supported for qwen3"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported for mixtral"),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type llama3"),
        ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "rope_scaling of type dynamic"),
        ("qwen3", {"rope_scaling": {"factor": 8.0}}, "rope_scaling of type default is not supported"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "requires original_max_position_embeddings"),
        ("qwen3", {"rope_scaling": {**YARN, "factor": 2.0}}, "max_position_embeddings=512 must equal .* = 256"),
        ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.2}}, r"rope_scaling\.attention_factor"),
        ("qwen3", {"rope_theta": "absent"}, "rope_theta is missing"),
        ("qwen3", {"num_key_value_heads": "absent"}, "num_key_value_heads is missing; qwen3 requires it"),
        ("mixtral", {"num_local_experts": "absent"}, "num_local_experts is missing"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(
    tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_config(config(tmp_path, kind, **change))
    assert "\n" not in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_rotary_settings_of_newer_config_files_are_read(tmp_path: Path) -> None:
    newer = {"rope_theta": "absent", "rope_scaling": "absent", "rope_parameters": {**YARN, "rope_theta": 5e5}}
    found = read_config(config(tmp_path, "qwen3", **newer))
    assert found["rope_theta"] == 5e5
    assert found["rope_scaling"]["factor"] == 4
    found = read_config(config(tmp_path, "qwen3", rope_parameters={"rope_theta": 7.0, "rope_type": "default"}))
    assert (found["rope_theta"], found["rope_scaling"]) == (7.0, None)
