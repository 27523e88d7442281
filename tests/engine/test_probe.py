"""The probe against the real server, as it is and behind proxies that each bring in one fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_proxy import Changes, DropsMeta, Fault, IgnoresStart, Lags, MixesSiblings, Rows, StripsEvery, proxy
from typer.testing import CliRunner

from agent_rl import cli
from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.route_probe.checks import CheckStatus
from agent_rl.engine.route_probe.run import probe, table
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import ConfigError, EngineRejected, EngineUnreachable
from agent_rl.models.spec import read_model_spec

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


async def test_a_sound_server_passes_every_check(server: str) -> None:
    report = await probe(server, retract=True)
    assert [check for check in report.checks if check.status is not CheckStatus.OK] == []
    assert len(report.checks) == 15
    assert report.line().startswith(f"15 checks passed; {report.requests} requests, ")


@pytest.mark.exhaustive
async def test_data_parallel_attention_passes_on_every_rank(
    engine_config: EngineConfig, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    options = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    config = engine_config.model_copy(update={"extra_args": options, "threads": 1})
    async with EngineServer(config, model, tmp_path / "engine.log") as server:
        report = await probe(server.url, retract=True)
        assert [check for check in report.checks if check.status is not CheckStatus.OK] == []
        async with SGLangEngine(server.url, read_model_spec(model), config) as engine:
            assert {tuple(engine.admission.placement(server.url, session).items()) for session in "abcdef"} == {
                (("routed_dp_rank", 0),),
                (("routed_dp_rank", 1),),
            }


def changed_count(by: int, finish: str) -> Fault:
    """Adds or drops a row of responses that end with ``finish``."""

    def change(rows: Rows, ended: str, answer: Mapping[str, Any]) -> Rows:
        if ended != finish:
            return rows
        return rows[:-1] if by < 0 else np.concatenate([rows, rows[-1:]])

    return Changes(change)


def zeroed_layer(rows: Rows, finish: str, answer: Mapping[str, Any]) -> Rows:
    rows[:, 2] = 0
    return rows


def doubled_id(rows: Rows, finish: str, answer: Mapping[str, Any]) -> Rows:
    rows[-1, 1, 1] = rows[-1, 1, 0]
    return rows


def out_of_range(rows: Rows, finish: str, answer: Mapping[str, Any]) -> Rows:
    rows[-1, 3, 0] = -1
    return rows


def stale_prefix(rows: Rows, finish: str, answer: Mapping[str, Any]) -> Rows:
    """What was stored for the first hundred tokens is another prompt's, wherever an answer begins."""
    whole = len(rows) > 150
    cached = min(100, answer["meta_info"]["cached_tokens"]) - (0 if whole else 80)
    rows[: max(0, cached)] = [[0, 1]] * 4
    return rows


class Blank(Fault):
    """A server that responds and is not SGLang."""

    def answer(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        answer.clear()


class Moved(Fault):
    """A server whose model is on another machine."""

    def changed_line(self, path: str, line: str) -> str:
        return '{"model_path": "/elsewhere"}' if path == "/model_info" else line


def lost_by_retraction(rows: Rows, finish: str, answer: Mapping[str, Any]) -> Rows:
    return rows[-3:] if answer["meta_info"]["num_retractions"] else rows


ENDS = ("length", "a stop token", "an abort", "a retraction")
Case = tuple[str, Fault, dict[str, str]]
FAULTS: list[Case] = [
    ("strips the key", StripsEvery(), {"key in every response": "34 of 34 responses lack"}),
    ("ignores the start", IgnoresStart(), {"start honored": "from row 80, received all 160 rows"}),
    ("lags by a row", Lags(), {"row i is token i's": "diverge 1 after the token"}),
    (
        "leads by a row",
        Changes(lambda rows, finish, answer: np.roll(rows, -1, axis=0)),
        {"row i is token i's": "diverge 1 before the token"},
    ),
    (
        "sends the same rows for everything",
        Changes(lambda rows, finish, answer: np.broadcast_to(np.arange(2, dtype=np.int32), rows.shape)),
        {"row i is token i's": "different prompts get the same rows"},
    ),
    ("zeroes a layer", Changes(zeroed_layer), {"no all-zero MoE layer": "layer 2: all zeros"}),
    ("doubles an id", Changes(doubled_id), {"distinct ids in range": "MoE layer 1 names expert"}),
    ("sends ids out of range", Changes(out_of_range), {"distinct ids in range": "names expert -1"}),
    (
        "serves stale rows",
        Changes(stale_prefix),
        {"cold and cached alike": "of the stored sets differ, first in row"},  # row 0 may happen to be right
    ),
    ("a row too many after a stop", changed_count(1, "stop"), {"rows after a stop token": "expected 1"}),
    ("a row too few after an abort", changed_count(-1, "abort"), {"rows after an abort": "rows, received"}),
    ("loses rows by a retraction", Changes(lost_by_retraction), {"rows after a retraction": "received 3"}),
    ("mixes siblings up", MixesSiblings(), {"siblings keep their rows": "a sibling's own rows"}),
    (
        "half a row",
        Changes(lambda rows, finish, answer: rows.reshape(-1)[:-3]),
        dict.fromkeys((*(f"rows after {end}" for end in ENDS), "start honored"), "not whole rows"),
    ),
    (
        "no log-probs and no version",
        DropsMeta("output_token_logprobs", "weight_version"),
        {"log-probs": "0 finite log-probs for 8 tokens", "weight version": "a response has none"},
    ),
]
SECOND_PASS = "conversations alike in a second pass"
"""Compares all rows, so it may fail with any other check."""
ALSO = {
    "leads by a row": {"start honored", "siblings keep their rows"},
    "serves stale rows": {"siblings keep their rows"},
}
"""What else a fault may fail: the end of one answer is the middle of another; siblings may find each other cached."""


@pytest.mark.parametrize(("name", "fault", "expected"), FAULTS, ids=[case[0] for case in FAULTS])
async def test_each_fault_is_reported_and_nothing_else(
    server: str, name: str, fault: Fault, expected: dict[str, str]
) -> None:
    async with proxy(server, fault) as url:
        report = await probe(url, retract=True)
    found = {check.name: check.finding for check in report.failed}
    for check, finding in expected.items():
        assert finding in found.get(check, ""), report.line()
        assert check in report.line()
    assert found.keys() - ALSO.get(name, set()) - {SECOND_PASS} == expected.keys()
    assert all(check.advice for check in report.failed)
    assert report.spoils(missing_allowed=True) == report.failed
    assert table(report).row_count == 15


async def test_some_responses_without_routes_are_allowed_by_policy(server: str) -> None:
    async with proxy(server, StripsEvery(nth=10)) as url:
        report = await probe(url)
    assert [check.name for check in report.spoils(missing_allowed=False)] == ["key in every response"]
    assert "3 of 33 responses lack routed_experts" in report.line()
    assert report.spoils(missing_allowed=True) == ()


async def test_another_model_and_another_server_are_reported(server: str, model: Path) -> None:
    wrong = replace(read_model_spec(model), moe=(True,) * 48, num_experts=128, top_k=8)
    assert "not whole rows" in (await probe(server, wrong)).line()
    with pytest.raises(EngineUnreachable, match="ClientConnectorError"):
        await probe("http://127.0.0.1:9")
    with pytest.raises(EngineRejected, match=r"not a response of SGLang's /generate \(KeyError\('meta_info'\)\)"):
        async with proxy(server, Blank()) as url:
            await probe(url)
    with pytest.raises(ConfigError, match=r"serves /elsewhere, which is not a directory of this machine: .*--model"):
        async with proxy(server, Moved()) as url:
            await probe(url)


def test_the_command_reports_by_its_exit_code(server: str, model: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = CliRunner().invoke(cli.app, ["r3", "probe", server, "--json", str(found)])
    assert done.exit_code == 0, done.output
    assert "row i is token i's" in done.output
    report = json.loads(found.read_text())
    assert report["ok"] is True
    assert [check["finding"] for check in report["checks"] if check["status"] != "ok"] == [
        "not provoked: not requested"
    ]
    missing = CliRunner().invoke(cli.app, ["r3", "probe", "http://127.0.0.1:9", "--model", str(model)])
    assert isinstance(missing.exception, EngineUnreachable), "main() reports it in one line with exit code 2"
