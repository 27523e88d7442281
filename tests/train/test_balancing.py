"""From routes to plans: what a rank counts, ranks that plan alike or all stop, and the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rank_processes import run_ranks
from support.train_samples import sample_of

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import balance_worker as worker

from agent_rl.errors import TrainerError
from agent_rl.train.batching.packing import pack
from agent_rl.train.expert_balancing import report as reports
from agent_rl.train.expert_balancing.report import FILE, BalanceReport, PassBalance, balance_metrics
from agent_rl.train.expert_balancing.worker import count_experts, count_foreseen, nodes_of_ranks
from agent_rl.train.route_sharding import shard_routes
from r3.shard import ShardSpec

RANKS = 2


@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9), st.sampled_from([12, 256, 300]))
def test_experts_are_counted_by_layer(rows: int, layers: int, top_k: int, total: int) -> None:
    experts = np.random.default_rng(rows).integers(0, total, (rows, layers, top_k))
    experts = experts.astype(np.uint8 if total <= 256 else np.uint16)
    expected = [np.bincount(experts[:, layer].ravel(), minlength=total) for layer in range(layers)]
    np.testing.assert_array_equal(count_experts(experts, total), np.reshape(expected, (layers, total)))


@pytest.mark.parametrize("spec", [ShardSpec((0, 1)), ShardSpec((1,), context_rank=1, context_size=2, tensor_size=2)])
def test_present_rows_and_padding_are_foreseen_and_absent_rows_are_not(spec: ShardSpec) -> None:
    samples = {0: sample_of(9, seed=1), 1: sample_of(6, seed=2)}
    batch, share = pack(samples, (0, 1)), shard_routes(list(samples.values()), (0, 1), spec)
    found = count_foreseen([batch], [share], spec, 4)
    absent = 2 if spec.tensor_size == 1 else 1  # the last row of each sequence; of this rank's, the first sequence's
    assert found.rows.tolist() == [len(share.present)]
    assert found.unforeseen.tolist() == [absent]
    assert found.counts.sum(axis=-1).tolist() == [[2 * (len(share.present) - absent)] * len(spec.columns)]


@pytest.mark.parametrize(
    ("hosts", "per_node", "nodes"),
    [("aabb", None, (0, 0, 1, 1)), ("aaaa", None, (0, 0, 0, 0)), ("aaaa", 2, (0, 0, 1, 1)), ("ba", None, (0, 1))],
)
def test_nodes_of_ranks_follow_host_names(hosts: str, per_node: int | None, nodes: Any) -> None:
    assert nodes_of_ranks(hosts, range(4, 8), per_node) == nodes


@pytest.mark.parametrize("hosts", ["abab", "aaab"])
def test_expert_groups_over_several_nodes_are_refused(hosts: str) -> None:
    with pytest.raises(TrainerError, match=r"not grouped by node \(4 on a, 5 on .*\): use Ray nodes") as caught:
        nodes_of_ranks(hosts, range(4, 8), None)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks, by case."""
    directory = tmp_path_factory.mktemp("balance")
    run_ranks(worker.__file__, RANKS, (RANKS, directory), seconds=120.0)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_has_the_counts_of_all(results: list[dict[str, Any]]) -> None:
    own = [worker.counts_of(rank) for rank in range(RANKS)]
    for found in results:
        plans = found["sound"]["counts"]
        assert len(plans) == 3, "as many as the rank with the most micro-batches"
        for at, by_column in enumerate(plans):
            for column in range(len(worker.LAYERS)):
                given = [counts[at, column] if at < len(counts) else np.zeros(worker.EXPERTS) for counts in own]
                np.testing.assert_array_equal(by_column[str(column)], given)


def test_the_first_rank_of_a_group_reports_its_passes(results: list[dict[str, Any]]) -> None:
    (first, second), counts = (found["sound"] for found in results), worker.counts_of(0)
    ((kind, layers, imbalance),) = first["passes"]
    assert (kind, tuple(layers), np.shape(imbalance)) == ("update", worker.LAYERS, (3, 2))
    alone = counts[2].reshape(2, RANKS, -1).sum(axis=2)  # the second rank has no third micro-batch
    np.testing.assert_allclose(imbalance[2], alone.max(axis=1) / alone.mean(axis=1))
    assert second["passes"] == []
    assert [found["sound"]["figures"] for found in results] == [[60, 6, 7, 1], [40, 4, 7, 1]]


@pytest.mark.parametrize("case", ["other first", "other later"])
def test_different_plans_stop_all_ranks_and_name_the_layer(results: list[dict[str, Any]], case: str) -> None:
    line = "train.balance: layer 5: the plans of ranks [1] differ from those of rank 0; all ranks must run the same"
    assert all(found[case]["error"].startswith(line) for found in results)


@pytest.mark.parametrize("case", ["failing first", "failing later"])
def test_a_rank_that_cannot_plan_stops_all(results: list[dict[str, Any]], case: str) -> None:
    errors = [found[case]["error"] for found in results]
    assert errors == [f"train.balance: rank 1 could not plan: {why}" for why in ("see its own error", "no plan today")]


def test_experts_are_refreshed_once_after_the_weights_changed(results: list[dict[str, Any]]) -> None:
    again = results[0]["sound again"]
    assert again["counts"] == results[0]["sound"]["counts"]
    assert again["figures"][-1] == 2


def test_a_stage_without_experts_plans_nothing(results: list[dict[str, Any]]) -> None:
    assert [found["dense stage"] for found in results] == [[], []]


def report(group: int, passes: int, load: float) -> BalanceReport:
    links = {name: np.full((3, 2), value, np.int32) for name, value in (("link_before", 9), ("link_after", 4))}
    before, after, borrowed = (np.full((3, 2), value) for value in (load, 1.0, 0.5))
    loads = {"imbalance_before": before, "imbalance_after": after, "borrowed": borrowed}
    one = PassBalance(kind="update", layers=worker.LAYERS, **loads, **links)
    return BalanceReport(group, (one,) * passes, 30, 3, 100, 10, load, 2.0, 3.0, 4.0)


def test_reports_of_all_ranks_make_the_metrics() -> None:
    values = balance_metrics([report(0, 1, 1.25), report(0, 0, 9.0), report(2, 2, 2.0)])
    expected = {"imbalance_before_mean": (1.25 + 2 + 2) / 3, "imbalance_before_p95": 2, "imbalance_after_mean": 1}
    expected |= {"link_before": 9, "link_after": 4, "unforeseen_fraction": 0.1, "bytes_fetched": 300, "planning_ms": 9}
    assert {name: values[f"balance/{name}"] for name in expected} == pytest.approx(expected)
    assert balance_metrics([report(0, 0, 1.0)]) == {}


def test_balance_rows_are_written_by_layer_and_micro_batch_and_removed_on_resume(tmp_path: Path) -> None:
    for step in (1, 2):
        reports.write_balance(tmp_path, step, [report(0, 2, 1.5), report(4, 1, 1.5)])
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(rows) == 2 * (2 + 1) * 3 * 2
    assert rows[-1] == {
        "step": 2, "group": 4, "pass": "update", "number": 0, "microbatch": 2, "layer": 5,
        "imbalance_before": 1.5, "imbalance_after": 1.0, "link_before": 9.0, "link_after": 4.0, "borrowed": 0.5,
    }  # fmt: skip
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "gro')  # as a kill leaves it
    reports.forget_balance(tmp_path, 1)
    kept = [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert kept == [1] * 18
    reports.forget_balance(tmp_path / "none", 1)  # a run without the file
