"""Rows of ``agent-rl sft``: which are used, with which tokens and loss mask, and what is said about the others."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.family_templates import FORMS
from tokenizers import Tokenizer
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.commands import sft as command
from agent_rl.commands.rows import RowChoice, branches, episode_files, messages_of, write_rows
from agent_rl.commands.sft import LeftOut, RowReader, SftRow, choose, prepare
from agent_rl.commands.show import episodes
from agent_rl.config import RunConfig, SftConfig, SftSource
from agent_rl.config.loader import MODELS, load_config
from agent_rl.controller.sft import SftData
from agent_rl.errors import ConfigError, UserError
from agent_rl.render import ChatRenderer

ROOT = Path(__file__).resolve().parents[2]
RUN, EVALUATION = ROOT / "tests/captured/quickstart", ROOT / "tests/captured/evaluations/tiny-moe"
MODEL = MODELS["tiny-moe"]
CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -la"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": "Look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "a.py", "tool_call_id": "1"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]


def config_of(tmp_path: Path, *sources: dict[str, Any], **more: Any) -> RunConfig:
    sft = {"data": [{name: str(value) if name == "path" else value for name, value in s.items()} for s in sources]}
    overrides = [f"runs_dir={tmp_path}", f"sft={json.dumps({**sft, **more})}", f"model={MODEL}"]
    return load_config(ROOT / "configs/quickstart.yaml", overrides)


def reader_of(tmp_path: Path, limit: int = 512) -> RowReader:
    return RowReader(config_of(tmp_path, {"path": RUN}), limit, 1 << 20)


def rows_file(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_episodes_of_a_run_have_their_recorded_tokens(tmp_path: Path) -> None:
    _, data, lines = prepare(config_of(tmp_path, {"path": RUN}))
    expected = [
        (branch.tokens, branch.loss_mask)
        for file in episode_files(RUN)
        for episode in episodes(file)
        if episode.row["reward"] >= 1
        for branch in branches(file, episode.row)
    ]
    assert len(data.train) == len(expected) > 50
    for (tokens, weights), (recorded, mask) in zip(data.train, expected, strict=True):
        np.testing.assert_array_equal(tokens, recorded)
        np.testing.assert_array_equal(weights, mask.astype(np.float32))
    assert Counter(row["reason"] for row in data.left_out) == {"of a reward below 1": 87}
    assert "left out: 87 of a reward below 1 (step-000001, episode 4)" in lines[0]


def test_a_rendered_episode_equals_what_was_sampled(tmp_path: Path) -> None:
    reader, compared = reader_of(tmp_path), 0
    for file in episode_files(RUN):
        for episode in episodes(file):
            if episode.row["resolved"]:
                ((branch,), (tokens, mask)) = (
                    branches(file, episode.row),
                    reader.render({"messages": messages_of(episode.row)}),
                )
                np.testing.assert_array_equal(tokens, branch.tokens[: len(tokens)])
                np.testing.assert_array_equal(mask, branch.loss_mask[: len(tokens)])
                assert not branch.loss_mask[len(tokens) :].any()
                compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "kimi_k2", "minimax_m2", "gpt_oss"]
)
def test_the_loss_mask_is_that_of_the_assistant(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(FORMS[kind].chat_model(kind))
    monkeypatch.setattr(command, "chat_renderer", lambda config: renderer)
    config = config_of(tmp_path, {"path": RUN})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tool_format": None})})
    thoughts = ["Where?"] if kind not in ("deepseek_v3", "kimi_k2") else []
    thinking = [{**m, "reasoning_content": "".join(thoughts)} if m["role"] == "assistant" else m for m in TALK]
    tokens, mask = RowReader(config, 512, 1 << 20).render({"messages": thinking})
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    spoken = [tokens[start:end].tolist() for start, end in edges]
    assert [turn[-1] in renderer.stop_token_ids for turn in spoken] == [True, True]
    first, last = map(renderer.decode, spoken)
    for text in (*thoughts, "Look.", "bash", "ls -la"):
        assert first.count(text) == 1
    for text in (*thoughts, "Done."):
        assert last.count(text) == 1
    others = renderer.decode(tokens[~mask].tolist())
    assert "Fix it." in others
    assert "a.py" in others
    assert not any(text in others for text in ("Where?", "Look.", "ls -la", "Done.", "Thanks."))
    opening = renderer.initial_prompt(TALK[:1])
    assert tokens[: len(opening)].tolist() == opening


def test_rows_of_a_file_are_used_or_named(tmp_path: Path) -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    file = rows_file(
        tmp_path / "rows.jsonl",
        {"messages": TALK, "task_id": "a", "reward": 1.0},
        {"messages": TALK},
        {"messages": TALK, "reward": 0.5},
        {"messages": TALK[:1]},
        {"messages": [{"role": "user", "content": image}, TALK[3]]},
        {"messages": [{"role": "user", "content": "long " * 600}, TALK[3]]},
        {"messages": TALK[3:]},
        {"text": "no messages"},
        "{broken",
        {"messages": TALK, "reward": "high"},
        {"messages": TALK, "reward": float("nan")},
    )
    rows = list(reader_of(tmp_path).read(SftSource(path=file)))
    assert [row.task for row in rows if isinstance(row, SftRow)] == ["a", "rows.jsonl, row 2"]
    left = {
        row.name.removeprefix("rows.jsonl, row "): (row.reason, row.detail) for row in rows if isinstance(row, LeftOut)
    }
    assert {name: reason for name, (reason, _) in left.items()} == {
        "3": "of a reward below 1",
        "4": "without an assistant turn",
        "5": "not rendered",
        "6": "longer than 512 tokens",
        "7": "not rendered",
        "8": "not rendered",
        "9": "not readable",
        "10": "not readable",
        "11": "of a reward below 1",
    }
    assert "only text parts are supported" in left["5"][1]
    assert "messages" in left["8"][1]
    assert "not JSON" in left["9"][1]


def test_other_forms_of_a_message_are_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(FORMS["qwen3_moe"].chat_model("qwen3_moe"))
    monkeypatch.setattr(command, "chat_renderer", lambda config: renderer)
    reader, start = reader_of(tmp_path), TALK[:1]
    call = {"function": {"name": "bash", "arguments": {"command": "ls -la", "absent": None}}}
    forms: list[dict[str, Any]] = [
        {"reasoning_content": "\nWhere?\n", "content": "Look.", "tool_calls": [CALL]},
        {"reasoning": "Where?", "content": "Look.", "tool_calls": [call]},
        {"content": "<think>\nWhere?\n</think>\n\nLook.", "tool_calls": [call]},
        {"thinking": "Where?", "content": [{"type": "text", "text": "Look."}], "tool_calls": [CALL]},
    ]
    rendered = [reader.render({"messages": [*start, {"role": "assistant", **form}]})[0].tolist() for form in forms]
    assert all(tokens == rendered[0] for tokens in rendered)
    assert renderer.decode(rendered[0]).count("Where?\n</think>") == 1


def test_parquet_rows_equal_those_of_json(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"messages": TALK}])  # absent fields of a message become nulls
    parquet.write_table(table, tmp_path / "rows.parquet")
    reader, json_file = reader_of(tmp_path), rows_file(tmp_path / "rows.jsonl", {"messages": TALK})
    (one,), (other,) = (list(reader.read(SftSource(path=path))) for path in (tmp_path / "rows.parquet", json_file))
    assert isinstance(one, SftRow)
    assert isinstance(other, SftRow)
    for left, right in zip(one.sequences[0], other.sequences[0], strict=True):
        np.testing.assert_array_equal(left, right)


def test_written_rows_keep_their_tokens_for_their_own_tokenizer(tmp_path: Path) -> None:
    write_rows(RUN, tmp_path / "rows.jsonl", RowChoice(per_task=1))
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    changed = [{**row, "messages": TALK} for row in written]  # shows whether the messages or the tokens are read
    other = [{**row, "tokenizer": "another"} for row in changed]
    for rows, spoken in ((changed, False), (other, True)):
        read = list(reader_of(tmp_path).read(SftSource(path=rows_file(tmp_path / "changed.jsonl", *rows))))
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        for row, source in zip(read, written, strict=True):
            assert isinstance(row, SftRow)
            tokens = row.sequences[0][0].tolist()
            assert (tokens == source["tokens"]) is not spoken
            assert ("Look." in tokenizer.decode(tokens)) is spoken


def test_the_best_episodes_of_each_task_are_chosen() -> None:
    def row(name: str, task: str, reward: float) -> SftRow:
        return SftRow(name, task, reward, [])

    given = [row("a", "t", 0.5), row("b", "t", 1.0), row("c", "t", 1.0), row("d", "u", 0.2), LeftOut("e", "bad")]
    used, others = choose(given, SftSource(path=Path("x"), best_of=1))
    assert [each.name for each in used] == ["b", "d"]
    assert [(each.name, each.reason) for each in others] == [
        ("e", "bad"),
        ("a", "beyond best_of"),
        ("c", "beyond best_of"),
    ]
    assert len(choose(given, SftSource(path=Path("x")))[0]) == 4


def test_batches_hold_every_row_once_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 41).tolist()
    data = SftData([(np.zeros(n, np.int32), np.ones(n, np.float32)) for n in lengths], [], [])

    def batches(epochs: int, **limits: int) -> list[list[int]]:
        sft = SftConfig.model_validate({"data": [{"path": "x"}], "epochs": epochs, **limits})
        return data.batches(sft, seed=3)

    by_rows, by_tokens = batches(2, batch_rows=8), batches(1, batch_rows=8, batch_tokens=100)
    assert [len(batch) for batch in by_rows] == [8, 8, 8, 8, 8, 1] * 2
    for epoch in (by_rows[:6], by_rows[6:], by_tokens):
        assert sorted(chain.from_iterable(epoch)) == list(range(41))
    assert by_rows[:6] == batches(1, batch_rows=8), "more epochs change the earlier ones"
    assert by_rows[:6] != by_rows[6:]
    assert all(sum(lengths[index] for index in batch) <= 100 and len(batch) <= 8 for batch in by_tokens)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"epochs": 3}, set()),
        ({"epochs": 3, "eval_every": 1}, {0, 6, 12, 18}),
        ({"epochs": 3, "eval_every": 2}, {0, 12, 18}),
        ({"epochs": 1, "eval_every": 2}, {0, 6}),
    ],
)
def test_epochs_whose_weights_are_evaluated(limits: dict[str, int], steps: set[int]) -> None:
    data = SftData([(np.zeros(4, np.int32), np.ones(4, np.float32))] * 41, [], [])
    sft = SftConfig.model_validate({"data": [{"path": "x"}], "batch_rows": 8, **limits})
    assert data.evaluated_steps(sft, seed=3) == steps


def test_the_rows_of_a_task_are_held_out_together(tmp_path: Path) -> None:
    checked, data, _ = prepare(config_of(tmp_path, {"path": RUN, "weight": 0.5}, validation_share=0.25, epochs=2))
    train, heldout = ({tokens.tobytes()[:200] for tokens, _ in part} for part in (data.train, data.heldout))
    assert heldout
    assert not train & heldout, "the prompt of a held-out task is trained on"
    assert checked.config.train.steps == 2 * -(-len(data.train) // 32)
    assert {float(value) for _, weights in data.train for value in weights} == {0.0, 0.5}
    assert prepare(config_of(tmp_path, {"path": RUN, "weight": 0.5}, validation_share=0.25))[1].digest == data.digest


def test_evaluations_have_no_tokens_and_are_rendered(tmp_path: Path) -> None:
    _, data, (line, _) = prepare(config_of(tmp_path, {"path": EVALUATION}))
    assert "9 rows of 7 tasks" in line
    assert all(weights.any() for _, weights in data.train)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("sft=null", r"sft.data: missing; it lists the runs and files"),
        ("sft.data=[]", "sft.data: .*at least 1 item"),
        ("sft.data=[{path: x, wieght: 2}]", r"unknown key 'sft.data.0.wieght': did you mean 'weight'\?"),
        ("train.mini_steps=2", "sft conflicts with train.mini_steps above 1"),
        ("train.kl.coefficient=0.1", "sft conflicts with train.kl"),
        (
            "sft={data: [{path: x}], eval_every: 1}\nengine.urls=[http://x]",
            "sft conflicts with engine.urls: sft.eval_every",
        ),
        ("sft={data: [{path: x}], eval_every: 1}\nengine.colocate=true", "sft conflicts with engine.colocate"),
        ("sft={data: [{path: x}], eval_every: 1}\nengine.python=/none", "engine.python: no interpreter /none"),
        ("sft.data=[{path: missing.jsonl}]", "sft.data: missing.jsonl: no such file"),
        (f"sft.data=[{{path: {ROOT}/docs}}]", "docs: expected the directory of a run with trajectories, or of an eval"),
        ("sft.validation_share=0.999", r"sft.validation_share: 0.999 of 24 task\(s\) leaves none"),
        ("train.microbatch_tokens=16", r"sft.data: no row to train on; .*longer than 16 tokens"),
    ],
)
def test_a_bad_config_is_one_line_before_a_directory_exists(tmp_path: Path, override: str, problem: str) -> None:
    config = yaml.safe_dump(
        {"base": "quickstart", "name": "x", "runs_dir": str(tmp_path / "runs"), "sft": {"data": [{"path": str(RUN)}]}}
    )
    (tmp_path / "c.yaml").write_text(config)
    with pytest.raises((ConfigError, UserError), match=problem):
        prepare(load_config(tmp_path / "c.yaml", [f"model={MODEL}", *override.split("\n")]))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["train"], ["plan"], ["dry-run"]])
def test_commands_of_rl_refuse_the_section(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(f"{{base: quickstart, sft: {{data: [{{path: {RUN}}}]}}}}")
    result = CliRunner().invoke(app, [*words, str(tmp_path / "c.yaml"), f"model={MODEL}"])
    assert isinstance(result.exception, UserError)
    assert "the config has the section sft" in str(result.exception)
