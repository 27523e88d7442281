"""GAE over tokens and turns and the value loss: against loops over the equations, and against verl's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed (the train extra)")

from agent_rl.config.train import CriticConfig  # noqa: E402
from agent_rl.train.loss.gae import generalized_advantages, value_loss  # noqa: E402

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=24), min_size=1, max_size=5)
SHARES = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def packed(masks: list[list[bool]], seed: int) -> dict[str, Any]:
    """Sequences whose first token is an observation, with random values and rewards."""
    rng, rows = np.random.default_rng(seed), [[False, *mask] for mask in masks]
    lengths = torch.tensor([len(row) for row in rows])
    values = torch.from_numpy(rng.normal(size=int(lengths.sum())).astype(np.float32))
    rewards = torch.from_numpy(rng.normal(size=len(rows)).astype(np.float32))
    return {
        "values_T": values,
        "rewards_T": rewards.repeat_interleave(lengths),
        "mask_T": torch.tensor([each for row in rows for each in row]),
        "sequence_T": torch.arange(len(rows)).repeat_interleave(lengths),
    }


def split(batch: dict[str, Any]) -> list[tuple[list[float], float, list[bool]]]:
    """Values, reward and mask of each sequence, as Python numbers."""
    found = []
    for number in range(int(batch["sequence_T"].max()) + 1):
        own = batch["sequence_T"] == number
        found.append(
            (batch["values_T"][own].tolist(), float(batch["rewards_T"][own][0]), batch["mask_T"][own].tolist())
        )
    return found


def by_loop(values: list[float], reward: float, mask: list[bool], critic: CriticConfig) -> tuple[list[float], ...]:
    """Advantages and returns of one sequence, by the equations: one step after another, from the last."""
    begins = [t for t, yes in enumerate(mask) if yes and (critic.step == "token" or not mask[t - 1])]
    advantage = surplus = following = 0.0
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for step, begin in reversed(list(enumerate(begins))):
        last = step == len(begins) - 1
        delta = (reward if last else 0.0) + critic.gamma * following - values[begin]
        advantage = delta + critic.gamma * critic.gae_lambda * advantage
        surplus = delta + critic.gamma * critic.value_lambda * surplus
        following, returns[begin] = values[begin], values[begin] + surplus
        end = len(mask) if last else begins[step + 1]
        for t in range(begin, end):
            advantages[t] = advantage if mask[t] else 0.0
    return advantages, returns


@settings(max_examples=60, deadline=None)
@given(MASKS, st.integers(0, 99), SHARES, SHARES, st.sampled_from([0.9, 1.0]), st.sampled_from(["token", "turn"]))
def test_gae_equals_a_loop_over_the_equations(
    masks: list[list[bool]], seed: int, gae_lambda: float, value_lambda: float, gamma: float, step: Any
) -> None:
    critic = CriticConfig(gamma=gamma, gae_lambda=gae_lambda, value_lambda=value_lambda, step=step)
    batch = packed(masks, seed)
    found = generalized_advantages(**batch, critic=critic)
    wanted = [by_loop(*each, critic) for each in split(batch)]
    for got, which in ((found.advantages_T, 0), (found.returns_T, 1)):
        expected = torch.tensor([value for sequence in wanted for value in sequence[which]])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not found.returns_T[~found.steps_T].any()


def verl_gae(rewards: Any, values: Any, mask: Any, gamma: float, lam: float) -> tuple[Any, Any]:
    """The formula of verl's compute_gae_advantage_return (verl 0.7, trainer/ppo/core_algos.py) before it whitens: at
    tokens outside of the mask the next value and the last advantage stay."""
    length, following, last, found = values.shape[1], 0.0, 0.0, []
    for t in reversed(range(length)):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = delta + gamma * lam * last
        following = mask[:, t] * values[:, t] + (1 - mask[:, t]) * following
        last = mask[:, t] * advantage + (1 - mask[:, t]) * last
        found.append(last)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + values


@settings(max_examples=30, deadline=None)
@given(MASKS, st.integers(0, 99), SHARES)
def test_gae_over_tokens_equals_that_of_verl(masks: list[list[bool]], seed: int, lam: float) -> None:
    batch = packed(masks, seed)
    found = generalized_advantages(**batch, critic=CriticConfig(gae_lambda=lam, value_lambda=lam))
    for number, (values, reward, mask) in enumerate(split(batch)):
        if not any(mask):
            continue
        rewards = torch.zeros(1, len(mask), dtype=torch.float64)
        rewards[0, max(t for t, yes in enumerate(mask) if yes)] = reward
        arguments = (torch.tensor([values], dtype=torch.float64), torch.tensor([mask]).double())
        advantages, returns = (each[0][mask].float() for each in verl_gae(rewards, *arguments, 1.0, lam))
        own = (batch["sequence_T"] == number) & batch["mask_T"]
        torch.testing.assert_close(found.advantages_T[own], advantages, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.returns_T[own], returns, rtol=1e-5, atol=1e-5)


def test_the_tokens_of_a_turn_share_an_advantage_and_a_return() -> None:
    mask, values = torch.tensor([False, True, True, False, False, True, True]), torch.tensor([0, 0.5, 9, 9, 9, 0.8, 9])
    arguments = (values, torch.ones(7), mask, torch.zeros(7, dtype=torch.int64))
    found = generalized_advantages(*arguments, CriticConfig(step="turn", gae_lambda=0.5))
    last = 1 - 0.8
    first = (0.8 - 0.5) + 0.5 * last
    torch.testing.assert_close(found.advantages_T, torch.tensor([0, first, first, 0, 0, last, last]))
    assert found.steps_T.nonzero()[:, 0].tolist() == [1, 5]
    torch.testing.assert_close(found.returns_T, torch.tensor([0.0, 1, 0, 0, 0, 1, 0]))


def test_observations_change_no_advantage() -> None:
    narrow = torch.tensor([False, True, True, True])
    wide = torch.tensor([False, False, True, False, False, True, True, False])
    values, found = torch.randn(3), []
    for mask in (narrow, wide):
        spread_T = torch.full((len(mask),), 7.0).masked_scatter(mask, values)
        arguments = (spread_T, torch.ones(len(mask)), mask, torch.zeros(len(mask), dtype=torch.int64))
        found.append(generalized_advantages(*arguments, CriticConfig(gae_lambda=0.7, gamma=0.9)).advantages_T[mask])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_equals_that_of_verl_also_in_parts(clip: float | None) -> None:
    """verl's compute_value_loss, token-mean: half of the mean of the larger squared error."""
    torch.manual_seed(0)
    values, old, returns = (torch.randn(40, dtype=torch.float64) for _ in range(3))
    steps = torch.rand(40) < 0.6
    values.requires_grad_()
    limited = values if clip is None else torch.min(torch.max(values, old - clip), old + clip)
    first, second = (values - returns) ** 2, (limited - returns) ** 2
    wanted = 0.5 * torch.max(first, second)[steps].mean()
    (slope,) = torch.autograd.grad(wanted, values)
    count, own = int(steps.sum()), values.detach().clone().requires_grad_()
    parts = [
        value_loss(own[at], old[at], returns[at], steps[at], clip=clip, count=count)
        for at in (slice(17), slice(17, 40))
    ]
    loss = sum(part for part, _ in parts)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, own)[0], slope)
    clipped = sum(float(number) for _, number in parts)
    assert clipped == float((second > first)[steps].sum())
    assert (clipped > 0) == (clip is not None)
