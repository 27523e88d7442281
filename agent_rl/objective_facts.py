"""The policy objectives by name, and what a config must know of each: its clip, and what it refuses. No torch here.

Their formulas are functions of tensors in agent_rl/train/loss/objectives.py, imported where a loss is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent_rl.errors import ConfigError
from sandbox.plugins import Registry

WIDEST_FOR_SEQUENCES = 0.1
"""The mean ratio of a whole sequence hardly moves: a bound this wide would never cut it."""


@dataclass(frozen=True, slots=True)
class ObjectiveFacts:
    """One objective.

    ``formula``: ``package.module:function``, a :data:`agent_rl.train.loss.objectives.Formula`. ``clip``: how far the
    ratio may fall below and rise above 1 where the config gives no bounds; None for an objective that clips nothing.
    ``ratio``: whose ratio is clipped, a token's or the mean of a whole sequence. ``dual_clip``: whether it has the
    clipped surrogate that dual clip bounds.
    """

    formula: str
    clip: tuple[float, float] | None = (0.2, 0.27)
    ratio: Literal["token", "sequence"] = "token"
    dual_clip: bool = False

    def refusal(self, name: str, low: float | None, high: float | None, dual: float | None) -> str | None:
        """Why the objective, called ``name``, can't do with these settings of its clip; None where it can."""
        widest = max(low or 0.0, high or 0.0)
        if self.clip is None and widest:
            return f"train.eps_low, train.eps_high: objective {name} clips nothing; leave them out"
        if self.clip is not None and self.ratio == "sequence" and widest >= WIDEST_FOR_SEQUENCES:
            return (
                f"train.objective {name} clips the mean ratio of a whole sequence, which {widest:g} never would: leave "
                f"eps_low and eps_high out ({self.clip[0]:g} and {self.clip[1]:g}), or give others as narrow"
            )
        if dual is not None and not self.dual_clip:
            return f"train.dual_clip bounds the clipped surrogate, which objective {name} has not"
        return None


_FORMULAS = "agent_rl.train.loss.objectives"
GRPO = ObjectiveFacts(f"{_FORMULAS}:grpo", dual_clip=True)
# GSPO's ratio is a mean over a sequence, so its bounds are narrow (arXiv 2507.18071, section 5.1).
GSPO = ObjectiveFacts(f"{_FORMULAS}:gspo", clip=(3e-4, 4e-4), ratio="sequence", dual_clip=True)
CISPO = ObjectiveFacts(f"{_FORMULAS}:cispo")
REINFORCE = ObjectiveFacts(f"{_FORMULAS}:reinforce", clip=None)

OBJECTIVES = Registry(
    "objective",
    "agent_rl.objectives",
    {name.lower(): f"agent_rl.objective_facts:{name}" for name in ("GRPO", "GSPO", "CISPO", "REINFORCE")},
    ConfigError,
)


def objective_facts(name: str) -> ObjectiveFacts:
    """The objective registered as ``name``. Raises ConfigError where there is none, or where it does not load."""
    facts = OBJECTIVES.load(name)
    if not isinstance(facts, ObjectiveFacts):
        raise ConfigError(f"objective {name!r} is a {type(facts).__name__}, not an ObjectiveFacts")
    return facts
