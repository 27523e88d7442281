"""``agent-rl r3 figures``: runs put together by what their configs say, compared and drawn from their files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from safetensors.numpy import save_file

from agent_rl.commands.figures import read_run, replay_worth, run_figures, setting_of
from agent_rl.config import Ablation, RunConfig
from agent_rl.config.loader import load_config
from agent_rl.errors import UserError
from agent_rl.evaluation.seeds import paired_difference, seed_difference
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.monitoring.plots import line_of
from agent_rl.utils.run_files import write_json
from r3.mismatch import figures
from r3.mismatch.report import f_tau_curve

ROOT = Path(__file__).resolve().parents[2]


def config(seed: int = 0, **train: object) -> RunConfig:
    return RunConfig.model_validate({"name": "test", "model": "there", "seed": seed, "train": train})


def write_run(directory: Path, *, seed: int, rate: float, gap: float, steps: int = 12, **train: object) -> Path:
    """A run whose k3 grows with the step, with ``rate`` in its last evaluation and half of it as the reward from the
    third step on; all tokens are ``gap`` apart."""
    log = MetricsLog(directory)
    for step in range(1, steps + 1):
        values = {"train/grad_norm": 2.0, "train/entropy": 0.25, "mismatch/f_tau_2": 0.0, "mismatch/k3_kl": 1e-3 * step}
        log.append(step, {**values, "reward/mean": rate / 2 * (step > 2), "guard/crossed": float(step > 9)})
    (directory / "config.yaml").write_text(yaml.safe_dump(config(seed, **train).model_dump(mode="json")))
    rates = {"step-0/sampled": 0.25, "step-0/greedy": 0.9, f"step-{steps}/sampled": rate}
    write_json(directory / "state.json", {"evaluations": {key: {"pass_at_1": value} for key, value in rates.items()}})
    (directory / "trajectories").mkdir()
    for step in (1, steps):
        (directory / "trajectories" / f"step-{step:06d}.jsonl.zst").write_bytes(b"")
        arrays = {"sampled": np.array([0, 2, 5], np.uint64), "gap": np.full(5, gap, np.float16)}
        save_file(arrays, directory / "trajectories" / f"step-{step:06d}.train.safetensors")
    return directory


def test_a_setting_is_what_its_config_changes() -> None:
    assert setting_of(config(replay="off")) == "GRPO"
    assert setting_of(config(replay="r3", objective="gspo", mini_steps=4)) == "GSPO + R3, 4 updates a step"
    assert setting_of(config(replay="off", correction={"weight": "token"}, mini_steps=2, epochs=2)) == (
        "GRPO + TIS, 4 updates a step"
    )
    assert setting_of(config(replay="r3", lora={"rank": 8})) == "GRPO + R3 + LoRA"
    ahead = config(replay="r3", old_logprob={"source": "rollout"}).model_dump() | {"async_rollout": {"depth": 2}}
    assert setting_of(RunConfig.model_validate(ahead)) == "GRPO + R3, depth 2"


def test_seeds_are_put_together_and_compared_with_the_first_setting(tmp_path: Path) -> None:
    off = [write_run(tmp_path / f"off-{n}", seed=n, rate=0.4 + n / 10, gap=1.0, replay="off") for n in range(3)]
    r3 = [write_run(tmp_path / f"r3-{n}", seed=n, rate=0.7 + n / 10, gap=0.001, replay="r3") for n in range(3)]
    run_figures([*off, *r3], tmp_path / "out")
    first, second = json.loads((tmp_path / "out" / "runs.json").read_text())["settings"]
    assert (first["name"], first["seeds"], first["difference"]) == ("GRPO", [0, 1, 2], None)
    assert (first["k3_kl"], first["k3_kl_max"], first["crossed"]) == pytest.approx((6.5e-3, 12e-3, 9))
    assert second["pass_at_1"] == pytest.approx([0.7, 0.8, 0.9])
    assert second["difference"]["value"] == pytest.approx(0.3)
    low, high = second["difference"]["interval"]
    assert (low, high) == pytest.approx((0.3 - 0.2267, 0.3 + 0.2267), abs=0.003), "2.776 standard errors of 0.0816"
    assert second["difference"]["shown"] == pytest.approx((2.776 + 0.941) * 0.08165, abs=0.003)
    assert second["rewards"] == pytest.approx([0.35, 0.4, 0.45]), "of the last ten steps"
    assert second["reward_difference"]["value"] == pytest.approx(0.15)
    assert second["reward_difference"]["interval"] == pytest.approx([0.15, 0.15]), "0.15 in the runs of each seed"
    (worth,) = json.loads((tmp_path / "out" / "runs.json").read_text())["replay"]
    assert (worth["replay"], worth["pairs"]) == ("r3", 3)
    assert worth["pass_at_1"]["value"] == pytest.approx(0.3)
    table = (tmp_path / "out" / "runs.md").read_text()
    assert "| GRPO + R3 | 0, 1, 2 | 12 | 0: 25.0, 12: 80.0 | 80.0 (70.0, 80.0, 90.0) | +30.0 [+7.3, +52.7] |" in table
    for name in ("training.png", "f_tau.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_as_many_settings_lie_beside_each_other_as_a_terminal_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve settings in one table had columns of three characters."""
    monkeypatch.setenv("COLUMNS", "80")
    updates = (1, 2, 3, 4, 5, 6, 7, 8)
    runs = [write_run(tmp_path / str(n), seed=0, rate=0.4, gap=1.0, replay="off", mini_steps=n) for n in updates]
    run_figures(runs, tmp_path / "out")
    printed = capsys.readouterr().out
    for n in updates[1:]:
        assert f"GRPO, {n} updates" in printed, "on one line"
    assert printed.count("F(2), max") == 3


def test_no_two_of_thirty_settings_are_drawn_alike() -> None:
    """The eleventh and twelfth had the first one's colour and the second's."""
    assert len({tuple(line_of(number).items()) for number in range(30)}) == 30


def test_what_replay_is_worth_is_taken_over_all_pairs_that_differ_in_nothing_else(tmp_path: Path) -> None:
    gains = {("grpo", 1): 0.1, ("grpo", 4): 0.2, ("gspo", 1): 0.3}
    for (objective, updates), gain in gains.items():
        setting = {"objective": objective, "mini_steps": updates}
        for replay, rate in (("off", 0.4), ("r3", 0.4 + gain)):
            write_run(
                tmp_path / f"{replay}-{objective}-{updates}", seed=0, rate=rate, gap=1.0, replay=replay, **setting
            )
    write_run(tmp_path / "off-tis", seed=0, rate=0.9, gap=1.0, replay="off", correction={"weight": "token"})
    write_run(tmp_path / "r3-other-seed", seed=1, rate=0.9, gap=1.0, replay="r3")
    run_figures([directory for directory in sorted(tmp_path.iterdir()) if directory.is_dir()], tmp_path / "out")
    (worth,) = json.loads((tmp_path / "out" / "runs.json").read_text())["replay"]
    assert (worth["pairs"], worth["pass_at_1"]["value"]) == (3, pytest.approx(0.2))
    assert worth["reward"]["value"] == pytest.approx(0.1)
    low, high = worth["pass_at_1"]["interval"]
    assert high - low == pytest.approx(2 * 4.303 * 0.1 / 3**0.5, rel=0.02), "4.303 standard errors of 0.1 / sqrt(3)"
    assert "R3 less no replay, in 3 pairs of runs that differ in nothing else; Pass@1 +20.0 [-4.9, +44.9], " in (
        (tmp_path / "out" / "runs.md").read_text()
    )


def test_runs_of_two_learning_rates_are_two_settings(tmp_path: Path) -> None:
    """And are no pair by which replay is judged."""
    for lr in (3e-4, 7.5e-5):
        for seed in (0, 1):
            write_run(tmp_path / f"{lr}-{seed}", seed=seed, rate=0.4, gap=1.0, replay="off", lr=lr)
        write_run(tmp_path / f"r3-{lr}", seed=0, rate=0.5, gap=1.0, replay="r3", lr=lr)
    write_run(tmp_path / "r3-other", seed=1, rate=0.9, gap=1.0, replay="r3", lr=1e-3)
    run_figures(sorted(tmp_path.iterdir()), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert {setting["name"]: setting["seeds"] for setting in found["settings"]} == {
        "GRPO, lr 0.0003": [0, 1],
        "GRPO, lr 7.5e-05": [0, 1],
        "GRPO + R3, lr 0.0003": [0],
        "GRPO + R3, lr 7.5e-05": [0],
        "GRPO + R3, lr 0.001": [1],
    }
    (worth,) = found["replay"]
    assert (worth["pairs"], worth["pass_at_1"]["value"]) == (2, pytest.approx(0.1))


def test_a_run_whose_reward_falls_under_half_of_its_best_has_collapsed(tmp_path: Path) -> None:
    """Means of ten steps: one of few steps, or one that was never better, has not."""
    for replay in ("off", "r3"):
        for seed in (0, 1):
            directory = write_run(tmp_path / f"{replay}-{seed}", seed=seed, rate=0.8, gap=1.0, steps=24, replay=replay)
            if (replay, seed) == ("off", 1):
                rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
                fallen = [row | {"reward/mean": 0.0 if row["step"] > 15 else 0.4} for row in rows]
                (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in fallen))
    runs = sorted(directory for directory in tmp_path.iterdir())
    assert [read_run(directory).collapsed for directory in runs] == [None, 21, None, None], (
        "the first of 4 in 10 below half"
    )
    run_figures(runs, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert [setting["collapsed"] for setting in found["settings"]] == [[None, 21], [None, None]]
    assert found["replay"][0]["collapsed"] == [1, 0]
    table = (tmp_path / "out" / "runs.md").read_text()
    assert "| 1 of 2, at step 21 |" in table
    assert "; 0 collapsed with replay, 1 without." in table


def test_an_ablation_is_no_replay_that_others_are_compared_with(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / f"{replay}-{seed}", seed=seed, rate=0.4, gap=1.0, replay=replay))
        for seed in (0, 1)
        for replay in ("off", "r3")
    ]
    assert replay_worth("r3", runs) is not None
    changed = tmp_path / "r3-1" / "config.yaml"
    changed.write_text(yaml.safe_dump(yaml.safe_load(changed.read_text()) | {"r3": {"ablation": "shifted"}}))
    assert replay_worth("r3", [*runs[:3], read_run(tmp_path / "r3-1")]) is None, "one pair gives no interval"


def test_every_setting_has_its_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Figure]()
    monkeypatch.setattr(figures, "_png", drawn.append)
    names = ["off", "r2", "r3", "tis", "gspo", "gspo-r3"]
    figures.f_tau_curves({name: f_tau_curve(np.full(3, number + 1.0)) for number, name in enumerate(names)})
    lines, legend = drawn[0].axes[0].get_lines(), drawn[0].axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == names
    assert len({line.get_color() for line in lines[: len(names)]}) == len(names)


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    path = ROOT / "benchmarks" / "run_matrix.py"
    source = importlib.util.spec_from_file_location("run_matrix", path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


def test_each_ablation_can_be_run_by_the_matrix_and_is_named(matrix: ModuleType) -> None:
    quickstart = ROOT / "configs" / "quickstart.yaml"
    made = [load_config(quickstart, matrix.overrides_of(quickstart, name, 0, [])) for name in matrix.ABLATIONS]
    assert {config.r3.ablation for config in made} == set(get_args(Ablation))
    assert len({setting_of(config) for config in made if config.r3.ablation != "none"}) == len(get_args(Ablation)) - 1


def test_a_run_of_the_matrix_is_named_for_what_it_is_whatever_all_runs_override(matrix: ModuleType) -> None:
    quickstart = ROOT / "configs" / "quickstart.yaml"
    common = ["name=pilot", "train.mini_steps=4", "seed=9", "train.replay=r2"]
    made = {
        setting: load_config(quickstart, matrix.overrides_of(quickstart, setting, 2, common))
        for setting in matrix.SETTINGS
    }
    assert {config.name: (setting_of(config), config.seed) for config in made.values()} == {
        "pilot-off-4-2": ("GRPO, 4 updates a step", 2),
        "pilot-r2-4-2": ("GRPO + R2, 4 updates a step", 2),
        "pilot-r3-4-2": ("GRPO + R3, 4 updates a step", 2),
        "pilot-tis-4-2": ("GRPO + TIS, 4 updates a step", 2),
        "pilot-gspo-4-2": ("GSPO, 4 updates a step", 2),
        "pilot-gspo-r3-4-2": ("GSPO + R3, 4 updates a step", 2),
    }


def test_one_run_a_setting_says_nothing_of_chance() -> None:
    assert seed_difference([0.5], [0.7, 0.8]) is None


def test_runs_of_one_seed_are_compared_with_each_other() -> None:
    found = paired_difference({0: 0.1, 1: 0.5, 2: 0.9, 7: 0.0}, {2: 1.0, 1: 0.6, 0: 0.5})
    assert found is not None
    assert found.value == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.2 - 0.4303, 0.2 + 0.4303), abs=0.01), "4.303 standard errors of 0.1"
    assert paired_difference({0: 0.1, 1: 0.5}, {1: 0.6}) is None


def test_what_cannot_be_drawn_is_told_in_a_line(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", seed=0, rate=0.5, gap=0.0, replay="off")
    two = write_run(tmp_path / "two", seed=0, rate=0.5, gap=0.0, replay="off")
    with pytest.raises(UserError, match="both are GRPO with seed 0"):
        run_figures([one, two], tmp_path / "out")
    with pytest.raises(UserError, match="no run with a step there"):
        run_figures([tmp_path], tmp_path / "out")
