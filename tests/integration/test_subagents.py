"""``rollout.subagents`` with real SGLang and real Megatron: a model that was taught to delegate is trained by RL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from integration_run import REAL, Run
from marked import ROOT, MarkedProcess

from agent_rl.config.loader import MODELS
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories
from agent_rl.types import BranchCause, Trajectory
from agent_rl.viewer.api import Resources

pytestmark = [*REAL, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SETTINGS = (
    *("env.name=lucky_env:Lucky", "env.options={}", "eval.tasks=0", "train.steps=2", "train.checkpoint_every=0"),
    *("rollout.max_turns=6", "rollout.max_tokens=256", "rollout.max_new_tokens=48", "r3.audit=1"),
    *("rollout.subagents={prompt: Help., max_turns: 2, max_tokens: 96}", "engine.dtype=float32", "train.dtype=float32"),
)


def rows() -> Iterator[list[dict[str, Any]]]:
    """Conversations of an agent that delegates and of its sub-agent, in the environment ``lucky``."""
    system = {"role": "system", "content": "Submit, or do not."}
    for number in range(8):
        task, submit = (
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": given}}]}
            for name, given in (("task", json.dumps({"prompt": "look"})), ("finish", '{"command": "submit"}'))
        )
        request, seen = {"role": "user", "content": f"Task {number}."}, {"role": "tool", "content": "seen"}
        yield [system, request, task, seen, submit]
        yield [system, {"role": "user", "content": "Help.\n\nlook"}, {"role": "assistant", "content": "seen"}]


@pytest.fixture
def taught(tmp_path: Path) -> str:
    """A model that delegates, as ``RUN@STEP``."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows()))
    sft = {"data": [{"path": str(tmp_path / "rows.jsonl")}], "batch_rows": 16, "epochs": 100}
    config = {"base": "quickstart", "name": "taught", "model": str(MODELS["tiny-moe"]), "runs_dir": str(tmp_path)}
    train = {"lr": 1e-3, "lr_schedule": "cosine", "checkpoint_every": 100, "device": "cpu"}
    (tmp_path / "taught.yaml").write_text(yaml.safe_dump({**config, "sft": sft, "train": train}))
    process = MarkedProcess(tmp_path, ["-m", "agent_rl.cli", "sft", tmp_path / "taught.yaml"], cwd=ROOT, path=[ROOT])
    try:
        assert process.process.wait(400) == 0, process.text
    finally:
        process.close()
    return f"{tmp_path}/taught@100"


def test_an_agent_and_its_sub_agent_are_trained_once_in_one_tree(
    start: Callable[..., Run], tmp_path: Path, taught: str
) -> None:
    run = start(*SETTINGS, f"model={taught}")
    assert run.finish(400) == 0, run.text
    for row in read_metrics(tmp_path / "small"):
        assert row["rollout/subagents"] > 0.5
        assert row["train/updates"] == 1
        assert row["mismatch/logprob_abs_diff"] < 2e-5
        assert (row["r3/router_mismatch"], row["r3/missing_token_fraction"], row["r3/audit_mismatch"]) == (0, 0, 0)
    groups = read_trajectories(tmp_path / "small", 2)
    found = [
        (f"2-{number}", trajectory)
        for number, trajectory in enumerate(each for group in groups for each in group.trajectories)
        if len(trajectory.branches) == 2
    ]
    assert found
    for _, trajectory in found:
        check_tree(trajectory)
    name, trajectory = found[0]
    check_viewer(tmp_path / "small", name, trajectory)


def check_tree(trajectory: Trajectory) -> None:
    """Every sampled token is trained in the branch that sampled it, with its routes."""
    _, child = trajectory.branches
    assert (child.cause, child.parent) == (BranchCause.SUBAGENT, 0)
    assert [turn.branch for turn in trajectory.turns][:2] == [0, 1]
    assert trajectory.turns[0].tool == "task"
    assert trajectory.reward is not None
    for number, branch in enumerate(trajectory.branches):
        sampled = sum(turn.completion_tokens for turn in trajectory.turns if turn.branch == number)
        assert int(branch.loss_mask.sum()) == sampled > 0
        assert branch.routing is not None
        assert bool(branch.routing.present[: len(branch.tokens) - 1].all())


def check_viewer(run: Path, name: str, trajectory: Trajectory) -> None:
    """The viewer shows both branches with their tokens, turns and routes."""
    shown = json.loads(Resources([run]).body(f"0/t/{name}", {}))
    assert [turn["branch"] for turn in shown["turns"]] == [turn.branch for turn in trajectory.turns]
    for number, (branch, kept) in enumerate(zip(shown["branches"], trajectory.branches, strict=True)):
        assert branch["tokens"] == kept.tokens.tolist()
        assert kept.routing is not None
        routes = json.loads(Resources([run]).body(f"0/routes/{name}{f'.{number}' if number else ''}", {}))
        assert np.array_equal(routes["experts"], kept.routing.experts)
    assert shown["branches"][1]["cause"] == "subagent"
