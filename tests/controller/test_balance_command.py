"""``agent-rl r3 balance`` on captured quickstart trajectories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
from agent_rl.cli import app
from agent_rl.commands.balance import run_counts
from agent_rl.config.loader import load_config
from agent_rl.errors import AgentRlError

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parents[2]
CAPTURED = ROOT / "tests/captured"


def simulate(tmp_path: Path, run: Path, *options: str) -> dict[tuple[int, str], dict[str, Any]]:
    """The rows of the table by expert ranks and planner."""
    out = tmp_path / "balance.json"
    result = CliRunner().invoke(app, ["r3", "balance", str(run), "--json", str(out), *options])
    if result.exception is not None:
        raise result.exception
    assert "max / mean" in result.output
    return {(row["expert_ranks"], row["planner"]): row for row in json.loads(out.read_text())}


def test_balancing_lowers_the_imbalance_of_captured_routes(tmp_path: Path) -> None:
    rows = simulate(tmp_path, CAPTURED, "--tokens", "384", "--expert-ranks", "2,4")
    planners = "none", "EPLB, last step", "shadowing", "foremoe"
    assert list(rows) == [(ranks, planner) for ranks in (2, 4) for planner in planners]
    assert rows[2, "none"]["imbalance_mean"] > 1.1
    assert rows[2, "foremoe"]["imbalance_p95"] <= 1.005
    assert rows[4, "none"]["imbalance_mean"] > 1.2
    assert rows[4, "foremoe"]["imbalance_median"] <= 1.005
    assert rows[4, "foremoe"]["imbalance_p95"] <= 1.07
    for (ranks, planner), row in rows.items():
        assert row["imbalance_mean"] >= rows[ranks, "foremoe"]["imbalance_mean"], planner
        assert (row["borrowed"] == 0) == (planner == "none")
        assert (row["link"], row["gain"]) == (0, None), "one machine, and no config that names the model"


def test_micro_batch_and_model_come_from_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(CAPTURED, run)
    config = load_config(ROOT / "configs/quickstart.yaml", ["train.microbatch_tokens=512"])
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    rows = simulate(tmp_path, run, "--expert-ranks", "4", "--ranks-per-node", "2", "--steps", "1")
    assert (4, "EPLB, last step") not in rows, "there is no step before"
    assert rows[4, "none"]["gain"] == 1
    assert 1 < rows[4, "foremoe"]["gain"] < rows[4, "none"]["imbalance_mean"]
    assert rows[4, "none"]["link"] > rows[4, "foremoe"]["link"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--expert-ranks", "3"], "--expert-ranks 3: expected a divisor of the model's 8 experts"),
        (["--expert-ranks", "4", "--ranks-per-node", "3"], "a multiple of --ranks-per-node (3)"),
        (["--expert-ranks", "2;4"], "--expert-ranks 2;4: expected integers separated by commas"),
        (["--tokens", "100"], "and train.microbatch_tokens is 100: raise it"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, options: list[str], told: str) -> None:
    with pytest.raises(AgentRlError) as caught:
        simulate(tmp_path, CAPTURED, *options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_directory_without_trajectories_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(AgentRlError, match="no trajectories found"):
        simulate(tmp_path, tmp_path)


def test_counts_of_a_run_are_those_of_its_steps() -> None:
    found = run_counts(CAPTURED / "quickstart", 4, ranks_per_node=2)
    assert found is not None
    layout, steps, shape = found
    assert (layout.ranks, layout.nodes, shape.hidden) == (4, 2, 128)
    assert all(counts.shape[1:] == (4, 4, 8) for counts in steps)
    assert run_counts(CAPTURED / "quickstart", 3, ranks_per_node=1) is None
