"""docs/research/paper-small.md has the tables that benchmarks/paper_figures.py makes of the shipped runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from support.doc_pages import ROOT

from agent_rl.config import Ablation, RunConfig
from agent_rl.config.loader import load_config
from benchmarks import paper_figures, run_matrix
from benchmarks.paper_figures import Run

PAGE = ROOT / "docs/research/paper-small.md"
QUICKSTART = ROOT / "configs/quickstart.yaml"


def run(seed: int, rate: float, *, replay: str = "off", updates: int = 1, rewards: tuple[float, ...] = ()) -> Run:
    """A run of 12 steps with Pass@1 ``rate`` at the end and half of it as the reward of each step."""
    fixed = {"train/grad_norm": 2.0, "train/entropy": 0.25, "mismatch/f_tau_2": 0.0}
    steps = [
        {"step": step, "reward/mean": reward, "mismatch/k3_kl": 1e-3 * step, **fixed}
        for step, reward in enumerate(rewards or (rate / 2,) * 12, 1)
    ]
    return Run(f"{replay}-{seed}", "GRPO", replay, "none", 0, updates, 3e-4, seed, steps, {0: 0.25, len(steps): rate})


def test_the_page_has_the_tables_of_the_shipped_runs() -> None:
    text = PAGE.read_text()
    runs = paper_figures.read_table(paper_figures.PAGE_TABLE)
    missing = [title for title, table in paper_figures.page_tables(runs) if table not in text]
    assert not missing, f"print them with python benchmarks/paper_figures.py: {missing}"


def test_every_figure_of_the_page_can_be_drawn(tmp_path: Path) -> None:
    runs = paper_figures.read_table(paper_figures.PAGE_TABLE)
    for name, series in paper_figures.FIGURES.items():
        assert f"]({name}.png)" in PAGE.read_text()
        assert len(paper_figures.of_series(runs, *series)) >= 18
    paper_figures.draw(paper_figures.of_series(runs, "paper-small", 4)[:2], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_runs_with_a_response_length_have_a_curve_of_it(tmp_path: Path) -> None:
    """Figure 6a of the R3 paper. The table of the page has no lengths."""
    length = "rollout/sampled_tokens_mean"
    without = run(0, 0.5)
    runs = [replace(without, steps=[{**row, length: 100.0} for row in without.steps]), run(1, 0.5)]
    assert [name for name, *_ in paper_figures.panels_of(runs)] == [name for name, *_ in paper_figures.PANELS]
    assert length not in [name for name, *_ in paper_figures.panels_of(runs[1:])]
    paper_figures.draw(runs, tmp_path / "seven.png")


def test_a_setting_is_compared_with_the_first_one_of_as_many_updates() -> None:
    off = [run(seed, 0.4 + seed / 10) for seed in range(3)]
    r3 = [run(seed, 0.7 + seed / 10, replay="r3") for seed in range(3)]
    others = [run(seed, 0.9, updates=4) for seed in range(3)]
    _, first, four, second = paper_figures.settings_table([*off, *others, *r3])
    assert first[1:4] == ["25.0 → 50.0 (40.0, 50.0, 60.0)", "", "25.0 (20.0, 25.0, 30.0)"]
    assert (four[0], four[2]) == ("GRPO, 4", "")
    assert second[2] == "+30.0 [+7.3, +52.7]; 30", "2.776 standard errors of 0.0816"
    assert second[4] == "+15.0 [+15.0, +15.0]; 0", "0.15 in the runs of each seed"


def test_replay_is_compared_over_pairs_that_differ_in_nothing_else() -> None:
    gains = {1: 0.1, 2: 0.2, 4: 0.3}
    pairs = [run(0, 0.4, updates=updates) for updates in gains]
    pairs += [run(0, 0.4 + gain, replay="r3", updates=updates) for updates, gain in gains.items()]
    without_partner = run(1, 0.9, replay="r3")
    _, row = paper_figures.pairs_table([*pairs, without_partner])
    assert row[:2] == ["R3 minus no replay", "3"]
    assert row[2].startswith("+20.0 [-4.9, +44.9]"), "4.303 standard errors of 0.1 / sqrt(3)"


def test_one_run_per_setting_gives_no_interval() -> None:
    assert paper_figures.difference([0.5], [0.7, 0.8]) is None
    assert paper_figures.paired_difference({0: 0.1, 1: 0.5}, {1: 0.6}) is None


def test_a_run_whose_reward_falls_under_half_of_its_best_has_collapsed() -> None:
    assert run(0, 0.8).collapsed is None
    assert run(0, 0.8, rewards=(0.4,) * 15 + (0.0,) * 9).collapsed == 21, "the first of 4 in 10 below half"


def test_a_second_run_of_a_setting_and_seed_is_refused() -> None:
    with pytest.raises(SystemExit, match="a second run of GRPO with seed 0"):
        paper_figures.by_setting([run(0, 0.5), run(0, 0.6)])


def write_run(directory: Path) -> Path:
    """The files of a run with the keys that the config has today."""
    directory.mkdir()
    train = {"replay": "off", "correction": {"weight": "token"}, "mini_steps": 2, "epochs": 2}
    config = RunConfig.model_validate({"name": "test", "model": "there", "seed": 3, "train": train})
    (directory / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    row = {"step": 1, "reward/mean": 0.5, "mismatch/k3_kl": 1e-3, "time/step": 9.0}
    (directory / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    rates = {"step-0/sampled": 0.25, "step-0/greedy": 0.9, "step-1/sampled": 0.5}
    evaluations = {key: {"pass_at_1": value} for key, value in rates.items()}
    (directory / "state.json").write_text(json.dumps({"evaluations": evaluations}))
    return directory


def test_a_run_is_read_from_its_directory_and_from_a_table(tmp_path: Path) -> None:
    read = paper_figures.read_run(write_run(tmp_path / "one"))
    assert (read.setting, read.updates, read.seed, read.pass_at_1) == ("GRPO + TIS", 4, 3, {0: 0.25, 1: 0.5})
    assert read.steps == [{"step": 1, "reward/mean": 0.5, "mismatch/k3_kl": 1e-3}]
    paper_figures.write_table([read], tmp_path / "runs.csv.zst")
    assert paper_figures.read_table(tmp_path / "runs.csv.zst") == [read]
    with pytest.raises(SystemExit, match="not a run directory"):
        paper_figures.read_run(tmp_path)


def test_each_ablation_can_be_run_by_the_matrix() -> None:
    made = [load_config(QUICKSTART, run_matrix.overrides_of(QUICKSTART, name, 0, [])) for name in run_matrix.ABLATIONS]
    assert {config.r3.ablation for config in made} == set(get_args(Ablation))


def test_a_run_of_the_matrix_is_named_for_its_setting_whatever_all_runs_override() -> None:
    common, named = ["name=pilot", "train.mini_steps=4", "seed=9", "train.replay=r2"], {}
    for setting in run_matrix.SETTINGS:
        config = load_config(QUICKSTART, run_matrix.overrides_of(QUICKSTART, setting, 2, common))
        assert config.name == f"pilot-{setting}-4-2"
        assert config.seed == 2
        named[setting] = config.train.objective, config.train.replay, config.train.correction.weight
    assert named == {
        **{replay: ("grpo", replay, None) for replay in ("off", "r2", "r3")},
        **{"tis": ("grpo", "off", "token"), "gspo": ("gspo", "off", None), "gspo-r3": ("gspo", "r3", None)},
    }


@pytest.mark.parametrize("source", run_matrix.SOURCES)
def test_the_matrix_runs_each_source_of_old_logprobs(source: str) -> None:
    train = load_config(QUICKSTART, run_matrix.overrides_of(QUICKSTART, source, 0, [])).train
    assert (train.old_logprob.source, train.replay, train.needs_trainer_logprobs) == (source, "off", False)
