"""Megatron's flex dispatcher over a stand-in for DeepEP: it is taken where it is right on all ranks, computes what the
all-to-all does, and keeps nothing of a pass. DeepEP itself was not run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import deep_ep_worker
import megatron_tiny as tiny
import torch
import transfer_worker

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

INSTEAD = "next is Megatron's all-to-all"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    results = tmp_path_factory.mktemp("deep_ep")
    tiny.make(results / "model")
    return transfer_worker.launch(deep_ep_worker.__file__, 2, results)


def test_it_is_taken_where_it_is_right(ranks: list[dict[str, Any]]) -> None:
    assert [rank[""] for rank in ranks] == [("flex", ())] * 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("off", "its error is 1.0e-01 of the largest value (limit 0.0001)"),
        ("backwards", "its error is 1.0e+00 of the largest value (limit 0.0001)"),
        ("raises", "it raised RuntimeError: DeepEP error: timeout"),
        ("missing", "deep_ep is not installed on every rank"),
    ],
)
def test_one_that_is_at_fault_is_passed_over(ranks: list[dict[str, Any]], fault: str, reason: str) -> None:
    for rank in ranks:
        dispatcher, (line,) = rank[fault]
        assert dispatcher == "alltoall"
        assert (
            line == f"kernels: DeepEP is not used for the exchange of tokens between expert ranks: {reason}; {INSTEAD}"
        )


def test_a_model_computes_the_same_by_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found, wanted = rank["flex"], rank["alltoall"]
        assert found["dispatches"] > 0 == wanted["dispatches"]
        torch.testing.assert_close(found["logprobs"], wanted["logprobs"], rtol=0, atol=1e-5)
        for one, other in zip(found["gradients"], wanted["gradients"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()) + 1e-6)


def test_it_keeps_nothing_of_a_pass(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["flex"]["left"] == rank["alltoall"]["left"] == 0
