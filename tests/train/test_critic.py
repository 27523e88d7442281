"""A critic on one rank: its values, the gradients it gives the policy, its warm-up, and what the config refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from support.megatron_world import world_of_one
from support.train_samples import samples
from support.trajectories import trajectory

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.train.batching.partition import split_step
from agent_rl.train.critic import Critic
from agent_rl.train.megatron.packed_batch import PackedBatch
from agent_rl.train.reports import RankReport
from agent_rl.train.requests import OptimizerSpec, StepRequest
from agent_rl.train.route_sharding import shard_routes
from agent_rl.train.step import grpo_step, step_batches
from agent_rl.train.step_metrics import step_metrics
from agent_rl.types import Group

pytestmark = pytest.mark.megatron
CRITIC = {"baseline": "critic", "advantage_scale": "none"}
BATCH = PackedBatch.from_sequences([[5, 9, 2, 7], [3, 8]])


@pytest.fixture(scope="module")
def world(megatron_shim: None) -> Iterator[Any]:
    """The ranks of a world of one."""
    with world_of_one() as ranks:
        yield ranks


@pytest.fixture
def model(tiny_moe: Path, world: Any) -> Any:
    from agent_rl.train.megatron.model import PolicyModel

    return PolicyModel.build(tiny_moe, ParallelConfig(), device=torch.device("cpu"))


def begin(model: Any, config: RunConfig) -> tuple[Critic, Callable[[], RankReport]]:
    """A critic of ``model``, and a global step on the samples of the tests, whose routes are replayed."""
    from agent_rl.train.optimizer import PolicyOptimizer

    critic, optimizer = (
        Critic(model, config.train),
        PolicyOptimizer(model.chunks, OptimizerSpec(lr=1e-2), torch.float32),
    )
    data = samples()
    (shares,) = split_step(data, mini_steps=1, budget=64, ranks=1)
    by_index = dict(enumerate(data))
    routes = [shard_routes(data, batch.sample_ids, model.shard) for batch in step_batches(by_index, shares)]

    def step() -> RankReport:
        request = StepRequest(config, measure_without_replay=False)
        report, differing = grpo_step(model, optimizer, by_index, shares, routes, request, critic=critic)
        assert differing is not None
        assert not any(part.any() for part in differing.replayed), "the values' pass replays the rollout's routes"
        return report

    return critic, step


def metrics(report: RankReport) -> dict[str, float]:
    return step_metrics([report], None, None, RunConfig(name="test", model=Path("none")).train.clip)


def weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.modules[0].parameters()]


def test_values_are_linear_in_the_last_hidden_states(model: Any, tiny_moe: Path, run_config: Any) -> None:
    from transformers import AutoModelForCausalLM

    critic = Critic(model, run_config(**CRITIC).train)
    assert not model.forward_logprobs([BATCH], None)[0].values.any()
    weight = critic.slots()["master"].copy_(torch.randn(65))
    reference, wanted = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32), []
    for tokens in BATCH.tokens.split([4, 2]):
        hidden = reference(tokens[None], output_hidden_states=True).hidden_states[-1][0, :-1]
        wanted += [torch.zeros(1), hidden @ weight[:-1] / 64 + weight[-1]]  # the value before a token
    values = model.forward_logprobs([BATCH], None)[0].values
    torch.testing.assert_close(values, torch.cat(wanted).detach(), rtol=1e-4, atol=1e-5)


def gradients(model: Any, train: Any, coefficient: float) -> list[torch.Tensor]:
    """The policy's gradients of its loss and of a value loss."""
    critic = Critic(
        model, train.model_copy(update={"critic": train.critic.model_copy(update={"coefficient": coefficient})})
    )
    critic.slots()["master"].copy_(torch.linspace(-5, 5, 65))
    zeros, steps = torch.zeros(6), torch.tensor([False, True, True, False, False, True])
    extras = {"old_values": zeros, "returns": zeros + 1, "steps": steps}
    batch = PackedBatch(BATCH.tokens, BATCH.position_ids, BATCH.cu_seqlens, BATCH.sample_ids, extras)
    loss = critic.loss(lambda logprobs, _entropy, _batch: (-logprobs.sum(), {}), [batch])
    model.train_microbatches([batch], None, loss)
    return [parameter.main_grad.clone() for parameter in model.modules[0].parameters()]


def test_the_coefficient_scales_the_value_loss_in_the_policys_gradient(model: Any, run_config: Any) -> None:
    train = run_config(**CRITIC).train
    train = train.model_copy(update={"critic": train.critic.model_copy(update={"clip": None})})
    none, one, two = (gradients(model, train, coefficient) for coefficient in (0.0, 1.0, 2.0))
    model.value_head = None
    model.train_microbatches([BATCH], None, lambda logprobs, _entropy, _batch: (-logprobs.sum(), {}))
    for parameter, plain in zip(model.modules[0].parameters(), none, strict=True):
        assert torch.equal(parameter.main_grad, plain), "without a coefficient the critic changes no bit"
    changes = [(second - first, third - first) for first, second, third in zip(none, one, two, strict=True)]
    assert any(change.abs().max() > 1e-3 for change, _ in changes)
    for change, twice in changes:
        torch.testing.assert_close(twice, 2 * change, rtol=1e-3, atol=1e-4)


def test_the_policy_waits_for_its_critic_which_learns(model: Any, run_config: Any) -> None:
    config = run_config(**CRITIC, critic={"warmup_steps": 12, "clip": None, "lr": 1.0})
    critic, step = begin(model, config)
    before, rows = weights(model), [metrics(step()) for _ in range(12)]
    assert all(map(torch.equal, weights(model), before)), "the policy is not updated"
    for row in rows:
        assert (row["critic/warmup"], row["train/updates"], row["train/skipped_updates"]) == (1.0, 0.0, 0.0)
    assert rows[0]["critic/explained_variance"] == rows[0]["critic/value_mean"] == 0.0
    assert rows[-1]["critic/loss"] < 0.7 * rows[0]["critic/loss"]
    assert rows[-1]["critic/explained_variance"] > 0.2
    assert not critic.warming_up
    last = metrics(step())
    assert (last["critic/warmup"], last["train/updates"]) == (0.0, 1.0)
    assert not all(map(torch.equal, weights(model), before))


def test_advantages_of_the_critic_are_normalized_over_the_step(model: Any, run_config: Any) -> None:
    seen: list[torch.Tensor] = []
    config = run_config(baseline="critic", advantage_scale="batch")
    critic, step = begin(model, config)
    loss = critic.loss

    def watched(policy_loss: Any, inputs: Sequence[PackedBatch]) -> Any:
        seen.extend(item.extras["advantages"][item.extras["mask"]] for item in inputs)
        return loss(policy_loss, inputs)

    critic.loss = watched  # type: ignore[method-assign]
    step()
    advantages = torch.cat(seen)
    torch.testing.assert_close(advantages.mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(advantages.std(correction=0), torch.tensor(1.0), rtol=0, atol=1e-4)


def test_every_trajectory_is_trained_with_its_reward_also_alone() -> None:
    alone = [Group(name, (trajectory(reward),)) for name, reward in (("a", 1.0), ("b", 1.0), ("c", 0.0))]
    made = build_samples(alone, baseline="critic", scale="none")
    assert [sample.advantage for sample in made.samples] == [1.0, 1.0, 0.0]
    assert made.zero_variance_groups == 0


def config_of(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "test", "model": "m", **sections})


def test_groups_of_one_are_accepted_with_a_critic() -> None:
    config = config_of(train=CRITIC, rollout={"group_size": 1}, async_rollout={"depth": 0})
    assert config.train.learns_from_equal_rewards
    assert not config.train.normalizes_on_ranks


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"train": {"critic": {"lr": 0.2}}}, "train.critic requires train.baseline critic; it is mean"),
        ({"train": {"baseline": "critic"}}, "train.advantage_scale group conflicts with train.baseline critic"),
        ({"train": CRITIC | {"advantage_scale": "mean"}}, "train.advantage_scale mean conflicts with train.baseline"),
        ({"train": CRITIC | {"distill": {"teacher": "http://t:1"}}}, "critic conflicts with train.distill"),
        ({"train": CRITIC | {"kl": {"coefficient": 0.1, "apply_to": "reward"}}}, "conflicts with train.kl"),
        ({"train": CRITIC, "sft": {"data": [{"path": "rows.jsonl"}]}}, "sft conflicts with train.baseline critic"),
        ({"train": CRITIC, "rollout": {"dynamic_sampling": {"enabled": True}}}, "sampling conflicts with train.b"),
        ({"rollout": {"group_size": 1}}, "Alternatively set train.baseline to critic"),
    ],
)  # fmt: skip
def test_what_conflicts_with_a_critic_is_refused_in_one_line(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line.replace(".", r"\.")):
        config_of(**sections)
