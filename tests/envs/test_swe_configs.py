"""The shipped configs of the large data sets load, hold the paper's limits, and name environments that can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from envs import EnvContext, load_environment

CONFIGS = Path(__file__).parents[2] / "configs"


def loaded(name: str) -> RunConfig:
    config = load_config(CONFIGS / name)
    load_environment(config.env.name, EnvContext(None), config.env.options)  # type: ignore[arg-type]
    return config


@pytest.mark.parametrize("name", ["swebench-verified.yaml", "paper-swe.yaml"])
def test_configs_have_the_papers_limits(name: str) -> None:
    config = loaded(name)
    assert (config.rollout.max_turns, config.rollout.max_tokens) == (50, 65536)
    assert config.sandbox.backend == "docker"
    assert config.engine.max_total_tokens >= config.rollout.max_tokens
    assert config.name == name.removesuffix(".yaml")


def test_swebench_verified_evaluates_each_task_once() -> None:
    config = loaded("swebench-verified.yaml")
    assert (config.eval.tasks, config.eval.split) == (500, "test")
    assert config.env.options["path"] == "SWE-bench/SWE-bench_Verified"


def test_r2e_gym_config_matches_the_paper() -> None:
    config = loaded("paper-swe.yaml")
    assert (config.rollout.tasks_per_step, config.rollout.group_size) == (64, 8)
    assert (config.train.lr, config.train.mini_steps, config.train.replay) == (2e-6, 1, "r3")
    assert (config.train.eps_low, config.train.eps_high, config.eval.every) == (0.2, 0.27, 10)
    parallel = config.train.parallel
    assert config.train.microbatch_tokens >= config.rollout.max_tokens
    assert parallel.world_size % (parallel.context * parallel.tensor * parallel.pipeline) == 0
    assert parallel.world_size % parallel.expert == 0
