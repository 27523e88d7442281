"""The section ``train.critic``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent_rl.config.base import Section


class CriticConfig(Section):
    """The critic of `train.baseline: critic`: a value head on the policy's last hidden states, whose values give the
    advantages (GAE); see docs/how-to/critic.md."""

    lr: float = Field(
        0.3,
        gt=0,
        description="Learning rate of the value head (Adam, constant): about the change of a value per update.",
    )
    coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the value loss in the gradient of the policy's weights. 0: only the value head learns "
        "from it.",
    )
    clip: float | None = Field(
        0.2, gt=0, description="Limit of a value's change in the updates of a step (PPO). null: no limit."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per step of GAE.")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of the advantages.")
    value_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of the returns that the values learn.")
    warmup_steps: int = Field(0, ge=0, description="Global steps at the start in which only the value head learns.")
    step: Literal["token", "turn"] = Field(
        "token",
        description="Step of GAE. token: every sampled token. turn: the sampled tokens between two observations, with "
        "one value and one advantage. Observation tokens are never steps.",
    )
