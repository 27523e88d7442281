"""clip-cov and KL-cov: which tokens of a step are selected, on one data rank and on two."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.config import TrainConfig  # noqa: E402
from agent_rl.train.batching.packing import pack  # noqa: E402
from agent_rl.train.step import _training_input, _with_selection  # noqa: E402
from agent_rl.types import Sample  # noqa: E402

OPTIONS = {"kl_cov": {"fraction": 0.2}, "clip_cov": {"fraction": 0.2, "cov_low": 0.1, "cov_high": 0.6}}


class Ranks:
    """Data ranks as threads; ``sum_over_data`` adds up what all of them give."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._given = size, threading.Barrier(size), list[Any]([None] * size)

    def model(self, rank: int) -> Any:
        def total(values: torch.Tensor) -> torch.Tensor:
            self._given[rank] = values
            self._barrier.wait(10)
            result = torch.stack(self._given).sum(0)
            self._barrier.wait(10)
            return result

        return SimpleNamespace(sum_over_data=total, ranks=SimpleNamespace(data_rank=rank, data_size=self.size))


def samples(count: int) -> list[tuple[Sample, torch.Tensor]]:
    """Samples of 12 tokens, eight of them sampled, and the trainer's log-probs."""
    made, rng, mask = [], np.random.default_rng(0), np.arange(12) >= 4
    for _ in range(count):
        logprobs = np.where(mask, -rng.random(12) * 3, 0).astype(np.float32)
        sample = Sample(np.arange(12, dtype=np.int32), mask, logprobs, rng.normal(), None)
        made.append((sample, torch.from_numpy(logprobs)))
    return made


def selected(objective: str, parts: list[list[list[tuple[Sample, torch.Tensor]]]]) -> list[bool]:
    """The selection among the sampled tokens of ``parts[rank][micro_batch]``, in that order."""
    train, ranks = TrainConfig(objective=objective, objective_options=OPTIONS[objective]), Ranks(len(parts))

    def run(rank: int) -> list[bool]:
        batches = [pack([sample for sample, _ in part], range(len(part))) for part in parts[rank]]
        logprobs = [torch.cat([own for _, own in part]) for part in parts[rank]]
        items = [_training_input(batch, own, "recompute") for batch, own in zip(batches, logprobs, strict=True)]
        found = _with_selection(ranks.model(rank), items, logprobs, train)
        return [flag for item in found for flag in item.extras["selected"][item.extras["mask"]].tolist()]

    with ThreadPoolExecutor(len(parts)) as pool:
        return [flag for part in pool.map(run, range(len(parts))) for flag in part]


@pytest.mark.parametrize("objective", ["kl_cov", "clip_cov"])
def test_the_selection_equals_the_float_loop_in_every_split(objective: str) -> None:
    """verl's and SkyRL's covariance, over the tokens of the step: (A - mean A) (log pi - mean log pi)."""
    data, options = samples(6), OPTIONS[objective]
    tokens = [(sample.advantage, float(own[at])) for sample, own in data for at in range(4, 12)]
    means = [sum(token[part] for token in tokens) / len(tokens) for part in (0, 1)]
    covariances = [(a - means[0]) * (logprob - means[1]) for a, logprob in tokens]
    number = int(0.2 * len(tokens))
    whole = selected(objective, [[data]])
    assert sum(whole) == number
    if objective == "kl_cov":
        assert whole == [covariance >= sorted(covariances)[-number] for covariance in covariances]
    else:
        inside = [options["cov_low"] < covariance < options["cov_high"] for covariance in covariances]
        assert sum(inside) > number
        assert all(is_inside for is_inside, is_selected in zip(inside, whole, strict=True) if is_selected)
    assert selected(objective, [[data[:1], data[1:]]]) == whole
    assert selected(objective, [[data[:2], data[2:3]], [data[3:]]]) == whole


def test_a_rank_without_samples_takes_part() -> None:
    data = samples(2)
    assert selected("kl_cov", [[data], []]) == selected("kl_cov", [[data]])
