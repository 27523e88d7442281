"""A run's recording is graded without an option for its split, which is train by default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_rl.commands.eval import EvalOptions, run_evaluation
from agent_rl.commands.policy import PolicyChoice
from agent_rl.config.loader import load_config
from agent_rl.errors import ConfigError
from agent_rl.rollout.jsonl_zst import encode_rows
from envs.mini import generate, to_record
from tools import ToolCall
from tools.formats import tool_format

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_a_recording_of_training_needs_no_split(tmp_path: Path) -> None:
    recording = tmp_path / "step-000001.jsonl.zst"
    turn = tool_format("xml").render(ToolCall("finish", {"command": "submit"}))
    task = to_record(next(iter(generate("train", 1, 0)))).id
    recording.write_bytes(encode_rows([{"task_id": task, "turns": [{"text": turn}]}])[0])
    sizes = ["env.options.train_tasks=2", "env.options.heldout_tasks=2"]
    config = load_config(QUICKSTART, [f"runs_dir={tmp_path}", *sizes])
    policy = PolicyChoice(f"replay:{recording}")
    assert await run_evaluation(config, EvalOptions(policy, out=tmp_path / "out")) is None
    (outcome,) = json.loads((tmp_path / "out" / "report.json").read_text())["outcomes"]
    assert (outcome["task_id"], outcome["stops"]) == (task, ["submitted"])
    with pytest.raises(ConfigError, match="--split heldout: none of the recording's tasks"):
        await run_evaluation(config, EvalOptions(policy, split="heldout", out=tmp_path / "other"))
