"""Megatron's flex dispatcher with a fake of DeepEP: used if it is correct on all ranks, equal to the all-to-all, and
without tensors that outlive a pass. DeepEP itself has not been run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import deep_ep_worker
import megatron_tiny as tiny
import torch
from support.rank_processes import place_of, reserved_port, run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

EXCHANGE = "the exchange of tokens between expert ranks"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks."""
    results, holder = tmp_path_factory.mktemp("deep_ep"), reserved_port()
    tiny.make(results / "model")
    run_ranks(deep_ep_worker.__file__, 2, (results, *place_of(holder)), held=[holder])
    return [torch.load(results / f"{rank}.pt") for rank in range(2)]


@pytest.mark.long
def test_a_correct_deep_ep_is_used(ranks: list[dict[str, Any]]) -> None:
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
def test_a_faulty_or_missing_deep_ep_is_not_used(ranks: list[dict[str, Any]], fault: str, reason: str) -> None:
    for rank in ranks:
        dispatcher, (line,) = rank[fault]
        assert dispatcher == "alltoall"
        assert line == f"kernels: DeepEP is not used for {EXCHANGE}: {reason}; next is Megatron's all-to-all"


def test_a_model_computes_the_same_with_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found, wanted = rank["flex"], rank["alltoall"]
        assert found["dispatches"] > 0 == wanted["dispatches"]
        torch.testing.assert_close(found["logprobs"], wanted["logprobs"], rtol=0, atol=1e-5)
        for one, other in zip(found["gradients"], wanted["gradients"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()) + 1e-6)


def test_no_tensor_outlives_a_pass(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["flex"]["left"] == rank["alltoall"]["left"] == 0
