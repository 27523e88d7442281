"""Where the old log-probs come from, up to the loss: samples, packed micro-batches, and every correction with each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from support.trajectories import trajectory

torch = pytest.importorskip("torch")

from agent_rl.config import (  # noqa: E402
    CorrectionConfig,
    CorrectionMask,
    CorrectionWeight,
    OldLogprobSource,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from agent_rl.config.builtin import install_model  # noqa: E402
from agent_rl.controller.advantages import build_samples  # noqa: E402
from agent_rl.controller.preflight import check_lengths  # noqa: E402
from agent_rl.errors import TrainerError, UserError  # noqa: E402
from agent_rl.models.spec import read_model_spec  # noqa: E402
from agent_rl.train.batching.packing import MicroBatch, pack  # noqa: E402
from agent_rl.train.loss.corrections import correction_factors  # noqa: E402
from agent_rl.train.step import _training_input  # noqa: E402
from agent_rl.types import Group, Rescored, Sample, StopReason  # noqa: E402

SOURCES = get_args(OldLogprobSource)


def rescored_group() -> Group:
    values = np.array([[-3.0, -1.0], [-1.0, -2.0]], np.float32)
    return Group("t", tuple(replace(trajectory(reward), rescored=Rescored(values)) for reward in (0.0, 1.0)))


def test_a_sample_bears_the_mean_at_its_sampled_tokens() -> None:
    for sample in build_samples([rescored_group()]).samples:
        assert sample.old_logprobs is not None
        np.testing.assert_array_equal(sample.old_logprobs, [0, 0, 0, -2.0, -1.5])
        np.testing.assert_array_equal(sample.logprobs, [0, 0, 0, -1, -1])
    plain = build_samples([Group("t", (trajectory(0.0), trajectory(1.0)))]).samples
    assert [sample.old_logprobs for sample in plain] == [None, None]


def test_a_masked_ending_counts_for_the_groups_advantages_and_is_no_sample() -> None:
    cut = trajectory(0.0, sampled=9, stop=StopReason.MAX_TURNS)
    group = Group("t", (trajectory(1.0), trajectory(0.0), cut, trajectory(0.0)))
    whole, masked = build_samples([group]), build_samples([group], masked={StopReason.MAX_TURNS})
    assert len(whole.samples) == 4
    assert [sample.advantage for sample in masked.samples] == [whole.samples[at].advantage for at in (0, 1, 3)]
    assert all(len(sample.tokens) == 5 for sample in masked.samples)


def test_micro_batches_hold_them_or_none_and_never_some() -> None:
    first, second = build_samples([rescored_group()]).samples
    batch = pack([first, second], [0, 1])
    assert batch.old_logprobs_T is not None
    np.testing.assert_array_equal(batch.old_logprobs_T, [0, 0, 0, -2.0, -1.5] * 2)
    assert pack([replace(first, old_logprobs=None)], [0]).old_logprobs_T is None
    with pytest.raises(TrainerError, match="sample 1 has no old log-probs"):
        pack([first, replace(second, old_logprobs=None)], [0, 1])
    with pytest.raises(TrainerError, match="sample 0 has 5 tokens and 4 old log-probs"):
        pack([replace(first, old_logprobs=np.zeros(4, np.float32))], [0])


def made_batch(seed: int = 0) -> tuple[MicroBatch, torch.Tensor]:
    """Two packed samples whose rollout, rescored and trainer's log-probs all differ; and the trainer's."""
    rng = np.random.default_rng(seed)

    def sample() -> Sample:
        mask = np.arange(12) >= 4
        rollout, old = (np.where(mask, rng.normal(-1, 0.3, 12), 0).astype(np.float32) for _ in range(2))
        return Sample(np.arange(12, dtype=np.int32), mask, rollout, 1.0, None, old_logprobs=old)

    return pack([sample(), sample()], [0, 1]), torch.from_numpy(rng.normal(-1, 0.3, 24).astype(np.float32))


def test_each_source_gives_its_own() -> None:
    batch, trainer = made_batch()
    wanted: dict[OldLogprobSource, torch.Tensor] = {
        "recompute": trainer,
        "rollout": torch.from_numpy(batch.logprobs_T),
        "rescore": torch.from_numpy(batch.old_logprobs_T),
    }
    for source, expected in wanted.items():
        extras = _training_input(batch, trainer, source).extras
        torch.testing.assert_close(extras["old_logprobs"], expected, rtol=0, atol=0)
        torch.testing.assert_close(extras["log_ratio"], trainer - torch.from_numpy(batch.logprobs_T))
        torch.testing.assert_close(extras["log_weight"], expected - torch.from_numpy(batch.logprobs_T))


def test_what_was_not_rescored_is_refused() -> None:
    batch, trainer = made_batch()
    with pytest.raises(TrainerError, match="source is rescore and the engine did not evaluate sample 0 again"):
        _training_input(replace(batch, old_logprobs_T=None), trainer, "rescore")


@pytest.mark.parametrize("mask", [None, *get_args(CorrectionMask)])
@pytest.mark.parametrize("weight", [None, *get_args(CorrectionWeight)])
@pytest.mark.parametrize("source", SOURCES)
def test_a_correction_asks_the_same_of_every_source(
    source: OldLogprobSource, weight: CorrectionWeight | None, mask: CorrectionMask | None
) -> None:
    """Masks judge trainer against engine, whatever the source; rho times a weight is the ratio to the sampler, once."""
    batch, trainer = made_batch()
    extras = _training_input(batch, trainer, source).extras
    mask_T, sequence_T = extras["mask"], extras["sequence"]

    def factors(bounds: CorrectionConfig) -> torch.Tensor:
        log_weight_T = extras["log_weight"]
        return correction_factors(bounds, extras["log_ratio"], mask_T, sequence_T, log_weight_T=log_weight_T)

    sampler_T = torch.from_numpy(batch.logprobs_T)
    now_T = trainer + 0.1
    log_rho_T = now_T - extras["old_logprobs"]
    wide = factors(CorrectionConfig(weight=weight, weight_high=None, mask=mask, mask_low=0.0, mask_high=1e9))
    if weight == "token":
        torch.testing.assert_close((log_rho_T.exp() * wide)[mask_T], (now_T - sampler_T).exp()[mask_T])
    elif weight == "sequence":
        whole = [(extras["log_weight"] * mask_T)[sequence_T == at].sum().exp() for at in (0, 1)]
        torch.testing.assert_close(wide, torch.stack(whole)[sequence_T])
    else:
        assert (wide == 1).all()
    narrow = CorrectionConfig(weight=weight, mask=mask, mask_low=0.9, mask_high=1.1)
    reference = correction_factors(narrow, extras["log_ratio"], mask_T, sequence_T)
    assert torch.equal(factors(narrow) == 0, reference == 0)


def test_a_trajectory_that_may_fill_the_context_cannot_be_rescored(tmp_path: Path) -> None:
    def check(max_tokens: int, source: str) -> None:
        train = TrainConfig.model_validate({"old_logprob": {"source": source}})
        check_lengths(RolloutConfig(max_tokens=max_tokens), train, tmp_path / "model", model_spec)

    install_model(tmp_path / "model")
    model_spec = read_model_spec(tmp_path / "model")
    positions = model_spec.max_positions
    check(positions, "recompute")
    check(positions - 1, "rescore")
    with pytest.raises(UserError, match=f"lower rollout.max_tokens to {positions - 1}"):
        check(positions, "rescore")


@pytest.mark.parametrize(("temperature", "fine"), [(1.0, True), (0.0, True), (0.7, False)])
def test_rescoring_at_another_temperature_is_refused(temperature: float, fine: bool) -> None:
    data = {
        "name": "n",
        "model": "m",
        "rollout": {"temperature": temperature},
        "train": {"old_logprob": {"source": "rescore"}},
    }
    if fine:
        RunConfig.model_validate(data)
        return
    with pytest.raises(ValueError, match=r"rollout\.temperature is 0\.7"):
        RunConfig.model_validate(data)
