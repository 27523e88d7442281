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
