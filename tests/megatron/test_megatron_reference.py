"""The reference model, swapped into a real model, and its use in a step. test_megatron_parallel.py has the layouts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import megatron_tiny as tiny
import torch
from torch import Tensor

from agent_rl.config import Clip, RunConfig
from agent_rl.errors import ConfigError
from agent_rl.train.batching.partition import split_step
from agent_rl.train.loss.objectives import kl_estimate, penalized_advantages
from agent_rl.train.megatron.packed_batch import PackedBatch
from agent_rl.train.reports import RankReport
from agent_rl.train.requests import OptimizerSpec, StepRequest
from agent_rl.train.step_metrics import step_metrics
from agent_rl.types import Sample

pytestmark = pytest.mark.megatron

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like the trained one, with other weights."""
    directory = tmp_path_factory.mktemp("other") / "model"
    tiny.make(directory, seed=7)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_changes_only_the_log_probs(build: Build, other: Path, dtype: torch.dtype) -> None:
    """Weights, gradients and optimizer state are bit-identical afterwards."""
    from agent_rl.train.optimizer import PolicyOptimizer
    from agent_rl.train.reference import Reference

    batch = tiny.packed()
    given = [tiny.everywhere(tiny.random_routes(len(batch)))]
    expected = build(other, dtype=dtype).forward_logprobs([batch], given)[0].logprobs
    model = build(dtype=dtype)
    reference = Reference.load(model, other)
    optimizer = PolicyOptimizer(model.chunks, OptimizerSpec(lr=1e-2), dtype)
    for _ in range(2):
        model.train_microbatches([batch], given, lambda got, _, __: (-got.mean(), {}))
        optimizer.step()
        model.train_microbatches([batch], given, lambda got, _, __: (-got.mean(), {}))  # gradients for the next update
        before, own = traces(model, optimizer), model.forward_logprobs([batch], given)[0].logprobs
        with reference.swapped_in():
            (output,) = model.forward_logprobs([batch], given)
        assert torch.equal(output.logprobs, expected)
        assert not torch.equal(own, expected)
        after = traces(model, optimizer)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_failed_pass_restores_the_weights(build: Build, other: Path) -> None:
    from agent_rl.train.reference import Reference

    model = build()
    before = {name: weight.clone() for name, weight in model.modules[0].state_dict().items() if torch.is_tensor(weight)}
    reference = Reference.load(model, other)
    with pytest.raises(ZeroDivisionError), reference.swapped_in():
        raise ZeroDivisionError
    after = model.modules[0].state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def traces(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Copies of weights, gradients and optimizer state."""
    found = {}
    for name, parameter in model.modules[0].named_parameters():
        found |= {f"{name} weight": parameter.detach().clone(), f"{name} gradient": parameter.main_grad.clone()}
    for shard in optimizer.shards():
        found |= {f"{shard.name} {slot}": tensor.clone() for slot, tensor in shard.slots.items()}
    return found


def test_a_reference_of_another_architecture_is_refused(build: Build, tmp_path: Path) -> None:
    from agent_rl.train.reference import Reference

    tiny.make(tmp_path / "wide", moe_intermediate_size=16)
    model = build()
    before = model.modules[0].decoder.layers[0].mlp.router.weight.clone()
    with pytest.raises(ConfigError, match=r"train\.kl\.reference: .*wide has moe_intermediate_size 16, not 24 as"):
        Reference.load(model, tmp_path / "wide")
    assert torch.equal(before, model.modules[0].decoder.layers[0].mlp.router.weight)


def test_the_entropys_gradient_equals_finite_differences(world: Any) -> None:
    from agent_rl.train.megatron.logprobs import vocab_parallel_entropy

    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    logits[0, 3] = -800.0  # its probability underflows to 0, as does its share of the entropy
    logits.requires_grad_()
    table = logits.detach().log_softmax(-1)
    expected = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(vocab_parallel_entropy(logits, gradient=True).detach(), expected)
    torch.testing.assert_close(vocab_parallel_entropy(logits, gradient=False), expected)
    assert not vocab_parallel_entropy(logits, gradient=False).requires_grad
    assert torch.autograd.gradcheck(lambda z: vocab_parallel_entropy(z, gradient=True), (logits,))


def samples() -> list[Sample]:
    generator = np.random.default_rng(0)
    found = []
    for place, tokens in enumerate(tiny.sequences(lengths=(17, 30, 12, 21))):
        mask = np.arange(len(tokens)) > 3 + place
        logprobs = np.where(mask, -3 * generator.random(len(tokens)), 0).astype(np.float32)
        found.append(Sample(tokens.numpy().astype(np.int32), mask, logprobs, float(generator.normal()), None))
    return found


def take_step(model: Any, reference: Any, seen: list[Any], **train: Any) -> RankReport:
    """A step of two mini steps of two micro-batches each. Adds to ``seen`` for each update its micro-batches and the
    policy's log-probs before it."""
    from agent_rl.train.optimizer import PolicyOptimizer
    from agent_rl.train.step import grpo_step

    settings = {"replay": "off", "device": "cpu", **train}
    config = RunConfig.model_validate({"name": "test", "model": model.directory, "train": settings})
    (shares,) = split_step(samples(), mini_steps=2, budget=32, ranks=1)
    assert [len(share.micro_batches) for share in shares] == [2, 2]

    class Watched:
        """The model with its updates recorded."""

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def train_microbatches(self, batches: Any, routes: Any, loss_fn: Any, **options: Any) -> Any:
            now = [output.logprobs for output in model.forward_logprobs(batches, routes, temperature=1.0)]
            seen.append((batches, now))
            return model.train_microbatches(batches, routes, loss_fn, **options)

    optimizer = PolicyOptimizer(model.chunks, OptimizerSpec(lr=3e-3), torch.float32)
    order = StepRequest(config, measure_without_replay=False)
    report, _ = grpo_step(Watched(), optimizer, dict(enumerate(samples())), shares, [], order, reference=reference)
    return report


def test_all_mini_steps_use_the_log_probs_from_before_the_first(build: Build, other: Path) -> None:
    """Those of policy and reference. The KL in the loss is the current policy's."""
    from agent_rl.train.reference import Reference

    seen: list[Any] = []
    model, whole = build(), PackedBatch.from_sequences([torch.from_numpy(s.tokens) for s in samples()])
    start, theirs = model.forward_logprobs([whole], None)[0].logprobs, build(other).forward_logprobs([whole], None)
    bounds = whole.cu_seqlens.tolist()

    def of(batch: PackedBatch, values: Tensor) -> Tensor:
        return torch.cat([values[bounds[index] : bounds[index + 1]] for index in batch.sample_ids])

    kl = {"coefficient": 0.2, "estimator": "k2"}
    report = take_step(model, Reference.load(model, other), seen, kl=kl, mini_steps=2)
    assert len(report.updates) == len(seen) == 2
    for update, (batches, now) in zip(report.updates, seen, strict=True):
        moved = squares = 0.0
        for batch, current in zip(batches, now, strict=True):
            mask, old, reference = (batch.extras[name] for name in ("mask", "old_logprobs", "reference"))
            torch.testing.assert_close(old, of(batch, start), rtol=0, atol=2e-5)
            torch.testing.assert_close(reference, of(batch, theirs[0].logprobs), rtol=0, atol=2e-5)
            gap = (current - old)[mask]
            moved += float((gap.exp() - 1 - gap).sum())
            squares += float(kl_estimate("k2", current, reference)[mask].sum())
        assert update.kl == pytest.approx(moved, rel=1e-3, abs=1e-5)
        assert update.kl_reference == pytest.approx(squares, rel=1e-4)
    assert report.updates[0].kl == pytest.approx(0, abs=1e-6)
    assert report.updates[1].kl > 1e-3, "the policy has moved"


def test_epochs_repeat_the_same_mini_steps(build: Build, other: Path) -> None:
    """With the log-probs from before the first. Figures of a step are counted once."""
    from agent_rl.train.reference import Reference

    kl = {"coefficient": 0.2, "estimator": "k1", "apply_to": "reward"}
    seen: list[Any] = []
    model = build()
    report = take_step(model, Reference.load(model, other), seen, kl=kl, mini_steps=2, epochs=2)
    assert len(report.updates) == len(seen) == 4
    assert [update.tokens for update in report.updates[2:]] == [update.tokens for update in report.updates[:2]]
    for (first, _), (second, _) in zip(seen[:2], seen[2:], strict=True):
        assert all(map(operator.is_, first, second))
    assert report.updates[2].kl > report.updates[0].kl
    assert report.reference is not None
    sampled = sum(update.tokens for update in report.updates[:2])
    values = step_metrics([report], None, None, Clip(0.2, 0.2))
    assert values["train/kl_penalty"] == pytest.approx(report.reference.taken / sampled)
    assert values["train/sampled_tokens"] == 2 * sampled


def test_normalized_weights_have_the_mean_one_over_a_step(build: Build) -> None:
    seen: list[Any] = []
    correction = {"weight": "token", "weight_high": None, "normalize": True}
    take_step(build(), None, seen, mini_steps=2, correction=correction)
    batches = [batch for given, _ in seen for batch in given]
    names = ("mask", "factors", "log_weight")
    mask, factors, log_weight = (torch.cat([batch.extras[name] for batch in batches]) for name in names)
    assert float(factors[mask].mean()) == pytest.approx(1.0, rel=1e-6)
    expected = log_weight[mask].exp()
    torch.testing.assert_close(factors[mask], expected / expected.mean())


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_a_penalty_in_the_reward_reaches_the_updates(build: Build, other: Path, scale: str) -> None:
    from agent_rl.train.reference import Reference

    seen: list[Any] = []
    model = build()
    kl = {"coefficient": 0.2, "estimator": "k1", "apply_to": "reward"}
    report = take_step(model, Reference.load(model, other), seen, kl=kl, advantage_scale=scale, mini_steps=2)
    batches = [batch for given, _ in seen for batch in given]
    mask = torch.cat([batch.extras["mask"] for batch in batches])
    plain, expected = [], []
    for batch in batches:
        extras, own = batch.extras, torch.tensor([samples()[index].advantage for index in batch.sample_ids])
        plain.append(own.repeat_interleave(batch.cu_seqlens.diff()))
        k1 = extras["old_logprobs"] - extras["reference"]
        expected.append(penalized_advantages(plain[-1], k1, extras["mask"], extras["sequence"], 0.2))
    values = torch.cat(expected)
    assert report.reference is not None
    assert report.reference.taken == pytest.approx(float((torch.cat(plain) - values)[mask].sum()), rel=1e-4)
    if scale == "batch":
        values = (values - values[mask].mean()) / (values[mask].std(correction=0) + 1e-6)
    found = torch.cat([batch.extras["advantages"] for batch in batches])
    torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-4)
