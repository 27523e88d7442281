"""``agent-rl train`` end to end on a tiny random model of each family: real SGLang, real Megatron under Ray.

One family is ordinary, because the others differ from it in the engine and in the trainer only:
tests/engine/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import REAL, Run
from support.family_models import FAMILIES, write_model
from support.quantized_model import write_float8_model, write_mxfp4_model

from agent_rl.models.spec import difference, read_model_spec
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories

pytestmark = [*REAL, pytest.mark.timeout(300)]

Start = Callable[..., Run]

SETTINGS = (
    *("env.name=lucky_env:Lucky", "env.options={}", "eval.tasks=0", "train.steps=3", "train.checkpoint_every=0"),
    *("rollout.max_turns=2", "rollout.max_new_tokens=24", "rollout.tasks_per_step=2"),
    *("engine.dtype=float32", "train.dtype=float32"),
)
TOKENS = 1024
"""The vocabulary of the shipped model, whose tokenizer the models have."""

THINKING = "glm4_moe"
GAPS = {"olmoe": 1e-4}
"""SGLang norms OLMoE's queries and keys with a fixed epsilon."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content }}{{ m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.long
def test_turns_with_closed_thoughts_train_without_mismatch(start: Start, tmp_path: Path) -> None:
    """``rollout.max_thinking_tokens`` and ``r3.audit``."""
    limits = ("rollout.max_thinking_tokens=8", "r3.audit=1")
    for row in train_three_steps(THINKING, start, tmp_path, *limits, template=TEMPLATE):
        assert row["rollout/thinking_truncated"] > 0.2
        assert row["r3/audit_cached_mismatch"] == 0
        assert row["r3/audit_mismatch"] < 0.004, (
            "a prefill rounds otherwise: scores that are almost equal change places"
        )
        assert row["r3/missing_token_fraction"] == 0
    for group in read_trajectories(tmp_path / "small", 2):
        for trajectory in group.trajectories:
            turns = trajectory.turns
            assert int(trajectory.loss_mask.sum()) == sum(turn.completion_tokens for turn in turns)
            assert all(turn.thinking_tokens - turn.inserted_tokens <= 8 for turn in turns if turn.inserted_tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", [kind for kind in FAMILIES if kind != THINKING])
def test_every_other_family_trains_three_steps(model_type: str, start: Start, tmp_path: Path) -> None:
    train_three_steps(model_type, start, tmp_path, gap=GAPS.get(model_type, 2e-5))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("write", "kind"), [(write_float8_model, "deepseek_v3"), (write_mxfp4_model, "gpt_oss")])
def test_a_quantized_checkpoint_is_trained(write: Callable[..., Path], kind: str, start: Start, tmp_path: Path) -> None:
    model = write(tmp_path / "model", kind, vocab_size=TOKENS)
    run = start(*SETTINGS)
    assert run.finish() == 0, run.text
    for row in read_metrics(tmp_path / "small"):
        assert row["mismatch/logprob_abs_diff"] < 2e-5
        assert (row["r3/router_mismatch"], row["weight_sync/verified"]) == (0, 1)
    exported = read_model_spec(tmp_path / "small/model")
    assert difference(exported, read_model_spec(model)) is None
    assert not exported.quantized


def train_three_steps(
    model_type: str, start: Start, directory: Path, *settings: str, gap: float = 2e-5, template: str | None = None
) -> list[dict[str, float]]:
    """Train the family's model with replay: every update is verified in the engine, no router differs between trainer
    and engine, log-probs differ by less than ``gap`` on average, and the export has the config of the start. Returns
    the metrics."""
    model = write_model(directory / "model", model_type, seed=0, vocab_size=TOKENS)
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    published = (model / "config.json").read_bytes()
    run = start(*SETTINGS, *settings)
    assert run.finish() == 0, run.text
    rows = read_metrics(directory / "small")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/updates"] == 1
        assert row["train/grad_norm"] > 0
        assert row["mismatch/logprob_abs_diff"] < gap
        assert row["r3/router_mismatch"] == 0
        assert (row["weight_sync/verified"], row["weight_sync/retries"]) == (1, 0)
    assert (directory / "small/model/config.json").read_bytes() == published
    assert read_model_spec(directory / "small/model") == read_model_spec(model)
    return rows
