"""The script for machines with GPUs: without a GPU, its table, its limits, and its checks on CPUs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch", reason="torch is not installed (the train extra)")

import gpu_run
from gpu_checks import CHECKS, Check, Row
from gpu_run import NARROW, Site, run, table, write_model
from support.model_sizes import DENSE_SIZES, EXPERT_SIZES

from scripts.gpu_status import FEATURES

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 16}
TINY = NARROW | DENSE_SIZES | EXPERT_SIZES | SHAPE | {"vocab_size": 64, "num_hidden_layers": 2}


def test_without_a_gpu_the_script_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_run.py"])
    with pytest.raises(SystemExit, match=r"^no GPU here: torch sees none, so nothing was run$"):
        gpu_run.main()
    assert capsys.readouterr().out == ""


def test_results_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is killed after the first check leaves its line."""
    out = tmp_path / "table.md"

    def checks(site: Site, _: Any) -> Any:
        assert (site.device, site.gpus) == ("cpu", 1)
        yield Row("kernels", "attention", "1e-3", "right", True)
        assert "| kernels | attention | 1e-3 | right | yes |" in out.read_text()
        yield Row("one GPU", "broke off", "rank 0 took too long", "", False)

    monkeypatch.setattr(gpu_run, "run", checks)
    monkeypatch.setattr(gpu_run, "write_model", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "--cpu", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        gpu_run.main()
    assert ended.value.code == 1
    assert len(out.read_text().splitlines()) == 6


def test_the_table_is_markdown() -> None:
    rows = [Row("step", "peak", "1.2", "1.3 planned", True), Row("a", "b", "c | d"), Row("e", "f", "g", "h", False)]
    lines = ["| step | peak | 1.2 | 1.3 planned | yes |", "| a | b | c / d |  |  |", "| e | f | g | h | **NO** |"]
    assert table(rows).splitlines()[2:] == lines


def test_checks_are_ordered_by_gpus_and_their_layouts_are_possible() -> None:
    from agent_rl.models.spec import ModelSpec
    from agent_rl.train.parallel_checks import layout_problems

    assert [check.gpus for check in CHECKS] == sorted(check.gpus for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    site = Site("cuda", 8, Path("models"), 16384, 0.0)
    for check in CHECKS:
        config, model_spec = site.config(check), ModelSpec.of(gpu_run.WIDE if check.wide else NARROW)
        assert layout_problems(config, model_spec) == []
        assert config.train.parallel.world_size == check.gpus


def test_the_status_page_names_checks_of_the_script() -> None:
    entries = yaml.safe_load(FEATURES.read_text())
    assert {name for entry in entries for name in entry.get("gpu", ())} <= {check.name for check in CHECKS}


def breaking(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Ranks run ``code`` instead, with the rank as the first argument."""
    pipe = subprocess.PIPE

    def start(rank: int, device: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(rank)]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    monkeypatch.setattr(gpu_run, "_start", start)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.stdin.read(); raise RuntimeError('CUDA error: out of memory')", "out of memory"),
        ("import sys; sys.stdin.read(); sys.exit(3)", "rank 0: exit code 3"),
        ("import time; time.sleep(60)", "rank 0 took too long"),
    ],
)
def test_a_failed_check_is_a_row_and_the_next_check_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, reason: str
) -> None:
    breaking(monkeypatch, code)
    checks = [check for check in CHECKS if check.name in ("one GPU", "checkpoint", "EP8")]
    seconds = 0.3 if "sleep" in code else 60.0
    rows = list(run(Site("cpu", 1, tmp_path, 64, time.monotonic() + 100, seconds), checks))
    found = [(row.check, row.what, row.good) for row in rows]
    assert found == [(name, "broke off", False) for name in ("one GPU", "checkpoint")]
    assert all(reason in row.found for row in rows)


def test_the_rank_that_failed_first_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    breaking(monkeypatch, "import sys, time; sys.argv[1] == '1' and sys.exit('out of memory'); time.sleep(60)")
    check = next(check for check in CHECKS if check.gpus == 2)
    rows = list(run(Site("cpu", 2, tmp_path, 64, time.monotonic() + 100, 50.0), [check]))
    assert [row.found for row in rows] == ["rank 1: out of memory"]


def test_no_check_starts_after_the_deadline(tmp_path: Path) -> None:
    rows = list(run(Site("cpu", 8, tmp_path, 64, time.monotonic()), CHECKS))
    assert [row.check for row in rows] == [check.name for check in CHECKS]
    assert {row.found for row in rows} == {"no time was left"}


def on_cpus(directory: Path, gpus: int, checks: Any) -> list[Row]:
    write_model(directory / "wide", TINY)
    write_model(directory / "narrow", TINY)
    return list(run(Site("cpu", gpus, directory, 64, time.monotonic() + 900, 800.0), checks))


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.timeout(300)
def test_a_check_of_each_kind_passes_on_a_cpu(tmp_path: Path) -> None:
    """Kernels, a training step, copies, a group, a shared bucket. The others repeat a step, or take minutes."""
    names = {"kernels", "one GPU", "copies and products", "NCCL", "CUDA IPC"}
    rows = on_cpus(tmp_path, 1, [check for check in CHECKS if check.name in names])
    assert {row.check for row in rows} == names
    assert [row for row in rows if row.good is False] == []


@pytest.mark.exhaustive
@pytest.mark.megatron
@pytest.mark.timeout(900)
def test_every_check_for_one_and_two_gpus_passes_on_cpus(tmp_path: Path) -> None:
    """On a tiny model over gloo, without the GPU's memory."""
    rows = on_cpus(tmp_path, 2, CHECKS)
    assert {row.check for row in rows} == {check.name for check in CHECKS if check.gpus <= 2}
    assert [row for row in rows if row.good is False] == []


@pytest.mark.exhaustive
@pytest.mark.megatron
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [check for check in CHECKS if check.gpus == 8], ids=lambda check: check.name)
def test_every_layout_of_eight_passes_on_cpus(tmp_path: Path, check: Check) -> None:
    assert [row for row in on_cpus(tmp_path, 8, [check]) if row.good is False] == []
