"""Two recipes of papers with the small model: the row's method on the quickstart's tasks, hardware and lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from integration_run import REAL, Run

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_recorded
from agent_rl.monitoring.metrics_log import read_metrics
from scripts.make_recipes import Recipe, read_recipes

pytestmark = [*REAL, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SCALE = ("model", "env.", "engine.", "eval.", "train.steps", "train.parallel", "rollout.tasks_per_step", "rollout.max_")
"""Keys of a row that say how large a run is, and on what. All others are its method."""
SMALL = (
    "env.name=lucky_env:Lucky", "env.options={}", "eval.tasks=0", "train.steps=2", "train.checkpoint_every=0",
    "rollout.max_turns=2", "rollout.max_new_tokens=24", "rollout.tasks_per_step=4", "rollout.group_size=8",
)  # fmt: skip


def method_of(recipe: Recipe) -> list[str]:
    return [
        f"{key}={yaml.safe_dump(stated.value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}"
        for key, stated in recipe.settings.items()
        if not key.startswith(SCALE)
    ]


@pytest.fixture
def trained(start: Callable[..., Run], tmp_path: Path) -> Callable[[str], tuple[RunConfig, list[dict[str, float]]]]:
    def train(name: str) -> tuple[RunConfig, list[dict[str, float]]]:
        recipe = next(recipe for recipe in read_recipes() if recipe.name == name)
        run = start(*SMALL, *method_of(recipe))
        assert run.finish(600) == 0, run.text
        return load_recorded(tmp_path / "small" / "config.yaml"), read_metrics(tmp_path / "small")

    return train


def test_gspo_with_r3_and_eight_mini_steps(
    trained: Callable[[str], tuple[RunConfig, list[dict[str, float]]]],
) -> None:
    config, rows = trained("r3-table1-sft-gspo-r3-8")
    assert (config.train.objective, config.train.replay, config.train.mini_steps) == ("gspo", "r3", 8)
    assert (config.train.clip.low, config.train.clip.high, config.train.lr) == (3e-4, 4e-4, 1e-6)
    assert config.rollout.dynamic_sampling.enabled
    for row in rows:
        assert (row["train/updates"], row["r3/router_mismatch"]) == (8, 0)
        assert row["reward/groups_uniform"] == 0


def test_kwaikat_leaves_the_trainers_pass_out(
    trained: Callable[[str], tuple[RunConfig, list[dict[str, float]]]],
) -> None:
    config, rows = trained("kat-rescore")
    assert (config.train.old_logprob.source, config.train.replay) == ("rescore", "off")
    for row in rows:
        assert (row["train/updates"], row["old_logprob/evaluations"]) == (1, 8)
        assert "mismatch/k3_kl" not in row, "measured every tenth step"
        assert row["time/old_logprob"] < 0.05 * row["time/update"]
