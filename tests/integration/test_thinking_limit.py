"""``rollout.max_thinking_tokens`` in a run with real SGLang and real Megatron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import REAL, Run

from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories

pytestmark = [*REAL, pytest.mark.timeout(300)]

SETTINGS = (
    *("env.name=lucky_env:Lucky", "env.options={}", "eval.tasks=0", "train.steps=2", "train.checkpoint_every=0"),
    *("rollout.max_turns=2", "rollout.max_new_tokens=24", "rollout.max_thinking_tokens=8", "r3.audit=1"),
    *("engine.dtype=float32", "train.dtype=float32"),
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content }}{{ m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_turns_with_closed_thoughts_train_without_mismatch(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    run = start(*SETTINGS)
    assert run.finish() == 0, run.text
    for row in read_metrics(tmp_path / "small"):
        assert row["rollout/thinking_truncated"] > 0.2
        assert row["train/updates"] == 1
        assert row["mismatch/logprob_abs_diff"] < 2e-5
        assert (row["r3/router_mismatch"], row["r3/audit_mismatch"], row["r3/audit_cached_mismatch"]) == (0, 0, 0)
        assert row["r3/missing_token_fraction"] == 0
    for group in read_trajectories(tmp_path / "small", 2):
        for trajectory in group.trajectories:
            turns = trajectory.turns
            assert int(trajectory.loss_mask.sum()) == sum(turn.completion_tokens for turn in turns)
            assert all(turn.thinking_tokens - turn.inserted_tokens <= 8 for turn in turns if turn.inserted_tokens)
