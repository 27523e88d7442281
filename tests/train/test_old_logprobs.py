"""The three sources of old log-probs, from samples and packed micro-batches to the inputs of the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.trajectories import trajectory

torch = pytest.importorskip("torch")

from agent_rl.config import OldLogprobSource, RolloutConfig, RunConfig, TrainConfig  # noqa: E402
from agent_rl.config.loader import install_model  # noqa: E402
from agent_rl.controller.advantages import build_samples  # noqa: E402
from agent_rl.controller.preflight import check_lengths  # noqa: E402
from agent_rl.errors import TrainerError, UserError  # noqa: E402
from agent_rl.models.spec import read_model_spec  # noqa: E402
from agent_rl.train.batching.packing import MicroBatch, pack  # noqa: E402
from agent_rl.train.step import _training_input  # noqa: E402
from agent_rl.types import Group, Rescored, Sample, StopReason  # noqa: E402
from r3.kept_tokens import KeptTokens  # noqa: E402


def rescored_group() -> Group:
    values = np.array([[-3.0, -1.0], [-1.0, -2.0]], np.float32)
    return Group("t", tuple(replace(trajectory(reward), rescored=Rescored(values)) for reward in (0.0, 1.0)))


def test_a_sample_has_the_mean_of_its_rescored_values_at_sampled_tokens() -> None:
    for sample in build_samples([rescored_group()]).samples:
        assert sample.old_logprobs is not None
        np.testing.assert_array_equal(sample.old_logprobs, [0, 0, 0, -2.0, -1.5])
        np.testing.assert_array_equal(sample.logprobs, [0, 0, 0, -1, -1])
    plain = build_samples([Group("t", (trajectory(0.0), trajectory(1.0)))]).samples
    assert [sample.old_logprobs for sample in plain] == [None, None]


def test_a_token_with_kept_ids_keeps_its_log_prob_as_sampled() -> None:
    """The engine evaluates it again over the whole vocabulary."""
    kept = KeptTokens.from_rows([[3, 9], []])
    group = rescored_group()
    masked = replace(group, trajectories=tuple(replace(each, kept=kept) for each in group.trajectories))
    for sample in build_samples([masked]).samples:
        assert sample.old_logprobs is not None
        np.testing.assert_array_equal(sample.old_logprobs, [0, 0, 0, -1.0, -1.5])


def test_a_masked_trajectory_counts_in_the_groups_advantages_but_is_not_trained() -> None:
    cut = trajectory(0.0, sampled=9, stop=StopReason.MAX_TURNS)
    group = Group("t", (trajectory(1.0), trajectory(0.0), cut, trajectory(0.0)))
    whole, masked = build_samples([group]), build_samples([group], masked={StopReason.MAX_TURNS})
    assert len(whole.samples) == 4
    assert [sample.advantage for sample in masked.samples] == [whole.samples[at].advantage for at in (0, 1, 3)]
    assert all(len(sample.tokens) == 5 for sample in masked.samples)


def test_a_micro_batch_has_old_logprobs_of_all_samples_or_of_none() -> None:
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


def test_every_source_weighs_against_the_sampler_and_masks_by_trainer_against_engine() -> None:
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


def test_rescore_without_rescored_values_is_refused() -> None:
    batch, trainer = made_batch()
    with pytest.raises(TrainerError, match="source is rescore and the engine did not evaluate sample 0 again"):
        _training_input(replace(batch, old_logprobs_T=None), trainer, "rescore")


@pytest.mark.parametrize(
    "train", [{"old_logprob": {"source": "rescore"}}, {"distill": {"teacher": "http://teacher:30000"}}]
)
def test_an_evaluation_needs_one_token_more_than_rollout_max_tokens(tmp_path: Path, train: dict[str, object]) -> None:
    def check(max_tokens: int, settings: dict[str, object]) -> None:
        limits = RolloutConfig(max_tokens=max_tokens)
        check_lengths(limits, TrainConfig.model_validate(settings), tmp_path / "model", model_spec)

    install_model(tmp_path / "model")
    model_spec = read_model_spec(tmp_path / "model")
    positions = model_spec.max_positions
    check(positions, {})
    check(positions - 1, train)
    with pytest.raises(UserError, match=f"lower rollout.max_tokens to {positions - 1}"):
        check(positions, train)


def test_rescoring_at_another_temperature_is_refused() -> None:
    data = {"name": "n", "model": "m", "train": {"old_logprob": {"source": "rescore"}}}
    for temperature in (1.0, 0.0):
        RunConfig.model_validate({**data, "rollout": {"temperature": temperature}})
    with pytest.raises(ValueError, match=r"rollout\.temperature is 0\.7"):
        RunConfig.model_validate({**data, "rollout": {"temperature": 0.7}})
