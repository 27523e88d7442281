"""A real SGLang server as the teacher of on-policy distillation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.trajectories import trajectory

from agent_rl.controller.teacher import Teacher
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


async def test_a_policy_that_is_its_own_teacher_has_a_divergence_of_zero(engine: SGLangEngine) -> None:
    prompt = list(range(3, 40))
    sampled = await engine.generate(prompt, SamplingParams(max_new_tokens=24), routes_from=None, session="distill")
    tokens = np.array([*prompt, *sampled.tokens], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    logprobs = np.where(mask, np.array([*np.zeros(len(prompt)), *sampled.logprobs]), 0).astype(np.float32)
    made = replace(trajectory(1.0), tokens=tokens, loss_mask=mask, logprobs=logprobs)
    scored = await Teacher(engine, concurrency=1).score(made)
    assert scored.teacher_logprobs == pytest.approx(logprobs[mask], abs=1e-4)
    assert logprobs[mask].max() < 0


async def test_the_most_likely_tokens_are_those_of_every_sampled_token(engine: SGLangEngine) -> None:
    """The teacher's top tokens hold the greedy ones with their own log-probs, sorted, of a mass of at most 1."""
    prompt = list(range(3, 40))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    sampled = await engine.generate(prompt, greedy, routes_from=None, session="distill")
    tokens = np.array([*prompt, *sampled.tokens], np.int32)
    made = replace(trajectory(1.0), tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))
    scored = await Teacher(engine, concurrency=1, top_k=5).score(made)
    top = scored.teacher_top
    assert top is not None
    assert top.ids.shape == top.logprobs.shape == (len(sampled.tokens), 5)
    assert top.ids[:, 0].tolist() == list(sampled.tokens)
    np.testing.assert_allclose(top.logprobs[:, 0], scored.teacher_logprobs, atol=1e-6)
    assert (np.diff(top.logprobs) <= 0).all()
    assert (np.exp(top.logprobs.astype(np.float64)).sum(1) <= 1 + 1e-5).all()
