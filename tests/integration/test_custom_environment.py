"""From an empty directory to updates: `agent-rl init` and `train`, with real SGLang and real Megatron. (The commands
between, `envs check` and `eval`, are run by tests/test_wheel.py.)

One run trains on the new project's environment, and on the worked examples and the dialogue of
docs/reference/environments.md, since starting its engine and trainer is most of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from integration_run import REAL, ROOT, Run
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories

EXAMPLES = ("sql_tools", "retrieval_tools", "letters", "sentences")
pytestmark = [*REAL, pytest.mark.timeout(400)]


def begun(project: Path) -> Path:
    """A new user's project in a new directory; it has its own package ``tools``."""
    (project / "tools").mkdir(parents=True)
    (project / "tools" / "__init__.py").touch()
    assert CliRunner().invoke(app, ["init", str(project)]).exit_code == 0
    return project


@pytest.mark.long
def test_a_run_trains_on_custom_environments(start: Callable[..., Run], tmp_path: Path) -> None:
    project = begun(tmp_path / "project")
    page = (ROOT / "docs/reference/environments.md").read_text()
    (dialogue,) = [code for code in page.split("```python\n") if "class Sentences" in code]
    (project / "sentences.py").write_text(dialogue.split("```")[0])
    # Two turns are just too few for some episodes to finish in time, so that groups have something to compare.
    run = start(
        "env.name=all_examples:AllExamples", "env.options={count: 16}", "rollout.max_turns=2",
        "rollout.tasks_per_step=12",
        "train.steps=2", "train.checkpoint_every=0", "eval.tasks=0",
        "rollout.dynamic_sampling={enabled: true, max_draws: 2}", "train.old_logprob.source=rescore",
        "train.old_logprob.rescore.n=2", "train.old_logprob.measure_every=1", project=project,
    )  # fmt: skip
    assert run.finish() == 0, run.text
    groups = [group for step in (1, 2) for group in read_trajectories(tmp_path / "small", step)]
    compared = {group.task_id.partition("-")[0] for group in groups if len({t.reward for t in group.trajectories}) > 1}
    assert compared == {*EXAMPLES}, "every environment had a group to learn from"
    said = [t for group in groups if group.task_id.startswith("sentences") for t in group.trajectories]
    assert {turn.tool for t in said for turn in t.turns} == {None}
    assert {message["role"] for t in said for message in t.messages} == {"user", "assistant"}
    rows = read_metrics(tmp_path / "small")
    assert [row["step"] for row in rows] == [1, 2]
    updated = [row for row in rows if row["train/samples"]]
    assert updated, "no group had anything to compare: nothing was learned from"
    for row in updated:
        assert row["train/updates"] == 1
        assert row["train/grad_norm"] > 0
        assert row["r3/router_mismatch"] == 0
        assert row["rollout/infrastructure_failures"] == 0
        assert row["old_logprob/evaluations"] == 2
        assert row["old_logprob/rescore_failed"] == 0
        assert 0 < row["old_logprob/rollout_abs_diff"] < 0.3, "the engine's prefill and its sampling round differently"
        assert row["train/samples"] == row["old_logprob/rescored"]
    assert [row["data/position"] for row in rows] == np.cumsum([row["filter/groups_drawn"] for row in rows]).tolist()
