"""Figures of tokens by the age of the weights that sampled them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent_rl.config import Clip, TrainConfig
from agent_rl.train.reports import RankReport, Update, UpdateSums
from agent_rl.train.step_metrics import step_metrics
from r3.mismatch.report import mismatch_metrics

ROLLOUT = np.array([-1.0, -2.0, -3.0, -0.5], np.float32)
TRAINER = np.array([-1.1, -2.0, -3.5, -0.1], np.float32)
SUMS = UpdateSums(4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, Update(grad_norm=1.0, lr=1e-3))


def report(lag: list[int]) -> RankReport:
    return RankReport(ROLLOUT, TRAINER, TRAINER, np.array(lag, np.int32), (SUMS,), 1.0, 1.0, 1.0)


def test_tokens_of_older_weights_count_by_lag_and_not_as_mismatch() -> None:
    values = step_metrics([report([0, 0, 2, 1])], None, None, Clip(0.2, 0.2))
    fresh = mismatch_metrics(TRAINER[:2], ROLLOUT[:2])
    assert {name: values[f"mismatch/{name}"] for name in fresh} == fresh
    assert {name: values[f"mismatch_without_replay/{name}"] for name in fresh} == fresh
    assert (values["staleness/mean"], values["staleness/max"]) == (0.75, 2.0)
    assert [values[f"staleness/share_{lag}"] for lag in range(3)] == [0.5, 0.25, 0.25]
    assert values["off_policy/ratio_mean_lag_2"] == pytest.approx(np.exp(-0.5))
    assert values["off_policy/k3_kl_lag_1"] == pytest.approx(np.exp(0.4) - 1 - 0.4, rel=1e-5)
    assert (values["off_policy/clip_fraction_lag_1"], values["off_policy/clip_fraction_lag_2"]) == (1.0, 1.0)
    assert "off_policy/k3_kl_lag_0" not in values


@pytest.mark.parametrize(
    ("train", "share"),
    [
        ({"objective": "grpo", "eps_low": 0.2, "eps_high": 0.2}, 2 / 4),  # ratios 0.90, 1, 0.61, 1.49
        ({"objective": "gmpo", "eps_low": 0.45, "eps_high": 0.45}, 1 / 4),  # log-ratios -0.1, 0, -0.5, 0.4
        ({"objective": "dppo_tv", "eps_low": 0.02, "eps_high": 0.2}, 2 / 4),  # -0.035, 0, -0.02, 0.298
        ({"objective": "dppo_tv", "eps_low": 0.04, "eps_high": 0.2}, 1 / 4),
        ({"objective": "dppo_kl", "eps_low": 0.001, "eps_high": 0.3}, 3 / 4),  # 0.0028, 0, 0.0049, 0.32
        ({"objective": "dppo_kl", "eps_low": 0.004, "eps_high": 0.4}, 1 / 4),
        ({"objective": "gspo"}, None),
    ],
)
def test_the_share_beyond_the_clip_is_of_what_the_objective_clips(train: dict[str, float], share: float | None) -> None:
    """A clip of a sequence's mean ratio is that of no token."""
    values = step_metrics([report([1] * 4)], None, None, TrainConfig.model_validate(train).clip)
    assert values.get("off_policy/clip_fraction_lag_1") == share


def test_a_step_without_a_fresh_token_has_no_mismatch() -> None:
    reports = [report([1] * 4), replace(report([1] * 4), logprobs_without_replay=None)]
    values = step_metrics(reports, None, None, Clip(0.2, 0.2))
    assert not [name for name in values if name.startswith("mismatch")]
    assert values["staleness/share_1"] == 1.0


def test_reports_of_ranks_are_averaged_over_all_tokens() -> None:
    values = step_metrics([report([0, 0, 0, 0]), report([3, 3, 3, 3])], None, None, Clip(0.2, 0.2))
    assert values["staleness/mean"] == 1.5
    assert values["off_policy/ratio_mean_lag_3"] == pytest.approx(np.exp(TRAINER - ROLLOUT).mean())
