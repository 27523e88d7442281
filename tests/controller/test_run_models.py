"""Runs named where a config expects a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipeline_run import Life, run_config

from agent_rl.controller import run_models
from agent_rl.controller.run_models import resolve_run
from agent_rl.errors import UserError


async def test_a_run_at_a_step_is_exported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, depth=0, steps=6)
    assert await Life(config, []).live()
    run, exported = config.run_dir, []

    def export(source: Path, _: Path, out: Path, *, averaged: bool = False) -> None:
        exported.append(source.name)
        out.mkdir(parents=True)
        (out / "config.json").touch()

    monkeypatch.setattr(run_models, "export", export)
    for name in (f"{run}@3", f"{run}@3", str(run)):
        assert resolve_run(Path(name), "model").parent == run / "exports"
    assert exported == ["step-000003", "step-000006"]
    with pytest.raises(UserError, match=r"model: .*: no checkpoint of step 4; complete checkpoints: 3, 6"):
        resolve_run(Path(f"{run}@4"), "model")
    for name in (tmp_path, Path("owner/name@main"), Path("missing")):
        assert resolve_run(name, "model") == name
