"""The policy objectives by name, and what a config must know of each: its clip, and what it refuses. No torch here.

Their formulas are functions of tensors in agent_rl/train/loss/objectives.py, imported where a loss is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent_rl.errors import ConfigError
from sandbox.registry import Registry

Aggregation = Literal["token", "sequence", "constant"]

WIDEST_FOR_SEQUENCES = 0.1
"""The mean ratio of a whole sequence hardly moves: a bound this wide would never cut it."""


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """One objective.

    ``formula``: ``package.module:function``, a :data:`agent_rl.train.loss.objectives.Formula`. ``clip``: how far the
    ratio may fall below and rise above 1 where the config gives no bounds; None for an objective that clips nothing.
    ``ratio``: whose ratio is clipped, a token's or the mean of a whole sequence. ``dual_clip``: whether it has the
    clipped surrogate that dual clip bounds. ``tau``: the temperatures of its soft gate for positive and for other
    advantages, where the config gives none; None for an objective without such a gate. ``aggregation``: over what its
    terms are averaged where the config does not say.
    """

    formula: str
    clip: tuple[float, float] | None = (0.2, 0.27)
    ratio: Literal["token", "sequence"] = "token"
    dual_clip: bool = False
    tau: tuple[float, float] | None = None
    aggregation: Aggregation = "token"

    def refusal(
        self, name: str, low: float | None, high: float | None, dual: float | None, tau: float | None = None
    ) -> str | None:
        """Why the objective, called ``name``, can't do with these settings of its clip and its gate (``tau``: any
        temperature that was given); None where it can."""
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
        if tau is not None and self.tau is None:
            return f"train.tau_positive, train.tau_negative: objective {name} has no soft gate; leave them out"
        return None


_FORMULAS = "agent_rl.train.loss.objectives"
_NAMES = ("GRPO", "GSPO", "CISPO", "REINFORCE", "SAPO", "GMPO")
GRPO = ObjectiveSpec(f"{_FORMULAS}:grpo", dual_clip=True)
# GSPO's ratio is a mean over a sequence, so its bounds are narrow (arXiv 2507.18071, section 5.1).
GSPO = ObjectiveSpec(f"{_FORMULAS}:gspo", (3e-4, 4e-4), "sequence", dual_clip=True, aggregation="sequence")
# CISPO's weight has no lower bound: no ratio is more than 1 below 1 (arXiv 2506.13585, section 3.1).
CISPO = ObjectiveSpec(f"{_FORMULAS}:cispo", clip=(1.0, 0.27))
REINFORCE = ObjectiveSpec(f"{_FORMULAS}:reinforce", clip=None)
# SAPO gates instead of clipping (arXiv 2511.20347, with the temperatures of its experiments).
SAPO = ObjectiveSpec(f"{_FORMULAS}:sapo", clip=None, tau=(1.0, 1.05), aggregation="sequence")
# GMPO bounds the logarithms of its tokens' ratios, widely (arXiv 2507.20673, section 3).
GMPO = ObjectiveSpec(f"{_FORMULAS}:gmpo", clip=(0.4, 0.4), aggregation="sequence")

OBJECTIVES = Registry(
    "objective",
    "agent_rl.objectives",
    {name.lower(): f"agent_rl.config.objectives:{name}" for name in _NAMES},
    ConfigError,
)


def objective_spec(name: str) -> ObjectiveSpec:
    """The objective registered as ``name``. Raises ConfigError where there is none, or where it does not load."""
    facts = OBJECTIVES.load(name)
    if not isinstance(facts, ObjectiveSpec):
        raise ConfigError(f"objective {name!r} is a {type(facts).__name__}, not an ObjectiveSpec")
    return facts
