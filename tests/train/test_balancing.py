"""From routes to plans: what a rank counts, that a group plans the same or all its ranks stop, what is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import balance_worker as worker

from agent_rl.errors import TrainerError
from agent_rl.train.batching.packing import pack
from agent_rl.train.expert_balancing.report import (
    FILE,
    BalanceReport,
    PassBalance,
    balance_metrics,
    forget_balance,
    write_balance,
)
from agent_rl.train.expert_balancing.worker import count_experts, count_foreseen, nodes_of_ranks
from agent_rl.train.route_sharding import shard_routes
from r3.shard import ShardSpec

RANKS = 2


@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9), st.sampled_from([12, 256, 300]))
def test_experts_are_counted_layer_by_layer(rows: int, layers: int, top_k: int, total: int) -> None:
    experts = np.random.default_rng(rows).integers(0, total, (rows, layers, top_k))
    experts = experts.astype(np.uint8 if total <= 256 else np.uint16)
    expected = [np.bincount(experts[:, layer].ravel(), minlength=total) for layer in range(layers)]
    np.testing.assert_array_equal(count_experts(experts, total), np.reshape(expected, (layers, total)))


@pytest.mark.parametrize("spec", [ShardSpec((0, 1)), ShardSpec((1,), context_rank=1, context_size=2, tensor_size=2)])
def test_absent_rows_are_not_foreseen_and_padding_is(make_sample: Any, spec: ShardSpec) -> None:
    samples = {0: make_sample(9, seed=1), 1: make_sample(6, seed=2)}
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
def test_expert_ranks_that_ray_did_not_group_are_refused(hosts: str) -> None:
    with pytest.raises(TrainerError, match=r"not grouped by node \(4 on a, 5 on .*\): use Ray nodes") as caught:
        nodes_of_ranks(hosts, range(4, 8), None)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one group found in every case."""
    directory = tmp_path_factory.mktemp("balance")
    command = [sys.executable, "-W", "ignore", worker.__file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(RANKS), str(directory)], stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_has_the_counts_of_all(results: list[dict[str, Any]]) -> None:
    own = [worker.counts_of(rank) for rank in range(RANKS)]
    for found in results:
        plans = found["sound"]["counts"]
        assert len(plans) == 3, "as many as the rank that has most"
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
def test_plans_that_differ_stop_all_ranks_with_the_layer_named(results: list[dict[str, Any]], case: str) -> None:
    for found in results:
        assert found[case]["error"].startswith(
            "train.balance: layer 5: the plans of ranks [1] differ from those of rank 0; all ranks must run the same"
        )


@pytest.mark.parametrize("case", ["failing first", "failing later"])
def test_a_rank_that_can_not_plan_stops_all(results: list[dict[str, Any]], case: str) -> None:
    own, other = results[1][case]["error"], results[0][case]["error"]
    assert own == "train.balance: rank 1 could not plan: no plan today"
    assert other == "train.balance: rank 1 could not plan: see its own error"


def test_experts_are_refreshed_once_after_the_weights_changed(results: list[dict[str, Any]]) -> None:
    again = results[0]["sound again"]
    assert again["counts"] == results[0]["sound"]["counts"]
    assert again["figures"][-1] == 2


def test_a_stage_without_experts_has_nothing_to_plan(results: list[dict[str, Any]]) -> None:
    assert [found["dense stage"] for found in results] == [[], []]


def report(group: int, passes: int, load: float) -> BalanceReport:
    one = PassBalance(
        kind="update",
        layers=worker.LAYERS,
        imbalance_before=np.full((3, 2), load),
        imbalance_after=np.ones((3, 2)),
        link_before=np.full((3, 2), 9, np.int32),
        link_after=np.full((3, 2), 4, np.int32),
        borrowed=np.full((3, 2), 0.5),
    )
    return BalanceReport(group, (one,) * passes, 30, 3, 100, 10, load, 2.0, 3.0, 4.0)


def test_reports_of_all_ranks_make_the_metrics() -> None:
    values = balance_metrics([report(0, 1, 1.25), report(0, 0, 9.0), report(2, 2, 2.0)])
    assert values["balance/imbalance_before_mean"] == pytest.approx((1.25 + 2 + 2) / 3)
    assert values["balance/imbalance_before_p95"] == 2
    assert (values["balance/imbalance_after_mean"], values["balance/link_before"], values["balance/link_after"]) == (
        1,
        9,
        4,
    )
    assert values["balance/unforeseen_fraction"] == pytest.approx(0.1)
    assert (values["balance/bytes_fetched"], values["balance/planning_ms"]) == (300, 9)
    assert balance_metrics([report(0, 0, 1.0)]) == {}


def test_a_row_a_layer_and_micro_batch_is_written_and_forgotten_on_resume(tmp_path: Path) -> None:
    for step in (1, 2):
        write_balance(tmp_path, step, [report(0, 2, 1.5), report(4, 1, 1.5)])
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(rows) == 2 * (2 + 1) * 3 * 2
    assert rows[-1] == {
        "step": 2, "group": 4, "pass": "update", "number": 0, "microbatch": 2, "layer": 5,
        "imbalance_before": 1.5, "imbalance_after": 1.0, "link_before": 9.0, "link_after": 4.0, "borrowed": 0.5,
    }  # fmt: skip
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "gro')  # as a kill leaves it
    forget_balance(tmp_path, 1)
    kept = [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert kept == [1] * 18
    forget_balance(tmp_path / "none", 1)
