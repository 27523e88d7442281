"""The structured initial weights do what they are built for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config.loader import MODEL_FILES, install_model
from agent_rl.errors import UserError
from agent_rl.utils.directory_lock import LOCK, lock_directory
from scripts.tiny_moe import SHAPES, TinyMoe, initial_weights, save_checkpoint
from scripts.train_demo_model import WARMUPS, _keep_only


def test_the_same_seed_gives_the_same_weights() -> None:
    sizes = TinyMoe()
    first, second, other = (initial_weights(sizes, seed) for seed in (1, 1, 2))
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert not np.array_equal(first[name], other[name])
    assert sum(weight.size for weight in first.values()) == 2_102_912


def test_the_papers_shape_has_as_many_experts_as_qwen3_30b_a3b() -> None:
    weights = initial_weights(SHAPES["paper"], 0)
    assert weights["model.layers.7.mlp.gate.weight"].shape == (128, 128)
    total, dense = (sum(w.size for w in each.values()) for each in (weights, initial_weights(SHAPES["dense"], 0)))
    assert 2 * total < 15_000_000, "bytes in bfloat16"
    assert 0.98 * total < dense < total


def test_a_warm_up_resumes_only_from_its_own_settings(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        _keep_only(tmp_path, WARMUPS["paper"])
        (tmp_path / "checkpoints" / "step-000100").mkdir(parents=True)
        (tmp_path / "demonstrations.json").write_text("[]")
        _keep_only(tmp_path, WARMUPS["paper"])
        assert (tmp_path / "checkpoints" / "step-000100").exists()
        _keep_only(tmp_path, replace(WARMUPS["paper"], seed=1))
        assert {path.name for path in tmp_path.iterdir()} == {LOCK, "settings.json"}


@pytest.mark.megatron
@pytest.mark.parametrize("shape", ["tiny", "dense"])
def test_the_checkpoint_loads_and_the_induction_heads_find_what_followed_before(tmp_path: Path, shape: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the trainer environment (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the trainer environment (transformers)")
    sizes = SHAPES[shape]
    save_checkpoint(tmp_path, initial_weights(sizes, 0), sizes, eos=2, pad=0)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    model = model.float().eval()
    sequence = torch.randperm(1000)[:60] + 10
    tokens = torch.cat([sequence, sequence])[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, 60:-1]
    ranks = (logits > logits.gather(1, tokens[0, 61:, None])).sum(-1)
    assert ranks.float().median() <= 5, "the token that followed before should be among the likeliest of 1,024"


def test_an_unfinished_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="contains no complete model"):
        install_model(tmp_path)


@pytest.mark.parametrize("shape", ["tiny", "paper"])
def test_a_shipped_model_is_installed_once_and_has_its_sizes(tmp_path: Path, shape: str) -> None:
    out = tmp_path / "models" / shape
    assert install_model(out, f"{shape}-moe")
    assert {path.name for path in out.iterdir()} == set(MODEL_FILES)
    assert json.loads((out / "config.json").read_text()) == SHAPES[shape].config(eos=2, pad=0)
    assert not install_model(out, f"{shape}-moe")
