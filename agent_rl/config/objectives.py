"""The registry of policy objectives with their defaults and constraints. Imports no torch.

Their formulas are in agent_rl/train/loss/objectives.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent_rl.errors import ConfigError
from sandbox.registry import Registry

Aggregation = Literal["token", "sequence", "constant", "prompt"]
Distance = Literal["ratio", "log_ratio", "probability", "kl"]
"""What a clip bounds of a token, relative to the old policy: its ratio less 1, its log-ratio, the change of its
probability, or the KL of the token against all others."""

MAX_SEQUENCE_CLIP = 0.1
"""Upper limit of the clip range of a sequence ratio. A sequence's mean ratio stays near 1, so a wider clip has no
effect."""


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """Defaults and constraints of one objective.

    ``formula``: import path ``package.module:function`` of a :data:`agent_rl.train.loss.objectives.Formula`. ``clip``:
    default distances of the lower and upper bound of the ratio from 1 (or of the divergence from 0); None: no clip.
    ``ratio``: the clipped ratio, per token or the mean of a sequence. ``distance``: what the clip bounds.
    ``dual_clip``: whether dual clip applies. ``tau``: default temperatures of the soft gate, for positive and for other
    advantages; None: no gate. ``options``: the formula's further numbers with their defaults. ``selection``: import
    path of the scores by which tokens are selected (:mod:`agent_rl.train.loss.objectives`), the option ``fraction`` of
    all; None: no selection. ``aggregation``: default loss aggregation.
    """

    formula: str
    clip: tuple[float, float] | None = (0.2, 0.27)
    ratio: Literal["token", "sequence"] = "token"
    distance: Distance = "ratio"
    dual_clip: bool = False
    tau: tuple[float, float] | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    selection: str | None = None
    aggregation: Aggregation = "token"

    def conflict(
        self,
        name: str,
        low: float | None,
        high: float | None,
        dual: float | None,
        tau: float | None = None,
        options: Collection[str] = (),
    ) -> str | None:
        """The error message if the objective ``name`` does not support these settings, else None.

        ``low``, ``high``: clip range. ``dual``: constant of dual clip. ``tau``: any configured gate temperature.
        ``options``: names of configured options.
        """
        widest = max(low or 0.0, high or 0.0)
        if self.clip is None and widest:
            return f"train.eps_low, train.eps_high: objective {name} has no clip; remove them"
        if self.clip is not None and self.ratio == "sequence" and widest >= MAX_SEQUENCE_CLIP:
            return (
                f"train.eps_low, train.eps_high: objective {name} clips a sequence ratio, {widest:g} is too wide; use "
                f"values near its defaults {self.clip[0]:g} and {self.clip[1]:g}"
            )
        if dual is not None and not self.dual_clip:
            return f"train.dual_clip: objective {name} has no clipped surrogate; remove it"
        if tau is not None and self.tau is None:
            return f"train.tau_positive, train.tau_negative: objective {name} has no soft gate; remove them"
        if unknown := sorted(set(options) - set(self.options)):
            known = f"its options: {', '.join(self.options)}" if self.options else "it has none"
            return f"train.objective_options: objective {name} has no option {unknown[0]!r} ({known})"
        return None


_FORMULAS = "agent_rl.train.loss.objectives"
_NAMES = ("GRPO", "GSPO", "CISPO", "REINFORCE", "SAPO", "GMPO", "DPPO_TV", "DPPO_KL", "CLIP_COV", "KL_COV")
GRPO = ObjectiveSpec(f"{_FORMULAS}:grpo", dual_clip=True)
# GSPO clips a sequence's mean ratio, so the clip is narrow (arXiv 2507.18071, section 5.1).
GSPO = ObjectiveSpec(f"{_FORMULAS}:gspo", (3e-4, 4e-4), "sequence", dual_clip=True, aggregation="sequence")
# CISPO's weight has no lower bound: a lower clip range of 1 is none (arXiv 2506.13585, section 3.1).
CISPO = ObjectiveSpec(f"{_FORMULAS}:cispo", clip=(1.0, 0.27))
REINFORCE = ObjectiveSpec(f"{_FORMULAS}:reinforce", clip=None)
# SAPO uses a soft gate instead of a clip (arXiv 2511.20347, with the temperatures of its experiments).
SAPO = ObjectiveSpec(f"{_FORMULAS}:sapo", clip=None, tau=(1.0, 1.05), aggregation="sequence")
# GMPO clips the log-ratios of tokens, with a wide range (arXiv 2507.20673, section 3).
GMPO = ObjectiveSpec(f"{_FORMULAS}:gmpo", clip=(0.4, 0.4), distance="log_ratio", aggregation="sequence")
# DPPO limits the divergence of a token's probability (arXiv 2602.04879). The option is prime-rl's kl_tau.
_PULL = {"log_ratio_penalty": 0.0}
DPPO_TV = ObjectiveSpec(f"{_FORMULAS}:dppo_tv", (0.2, 0.2), distance="probability", options=_PULL)
DPPO_KL = ObjectiveSpec(f"{_FORMULAS}:dppo_kl", (0.05, 0.05), distance="kl", options=_PULL)
# Bounds and fractions as in verl and in arXiv 2505.22617.
CLIP_COV = ObjectiveSpec(
    f"{_FORMULAS}:clip_cov",
    (0.2, 0.2),
    options={"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    selection=f"{_FORMULAS}:within_bounds",
)
KL_COV = ObjectiveSpec(
    f"{_FORMULAS}:kl_cov",
    clip=None,
    options={"fraction": 2e-4, "kl": 1.0},
    selection=f"{_FORMULAS}:by_covariance",
)

OBJECTIVES = Registry(
    "objective",
    "agent_rl.objectives",
    {name.lower(): f"agent_rl.config.objectives:{name}" for name in _NAMES},
    ConfigError,
)


def objective_spec(name: str) -> ObjectiveSpec:
    """The spec of the objective ``name``. Raises ConfigError if it is not registered or cannot be imported."""
    spec = OBJECTIVES.load(name)
    if not isinstance(spec, ObjectiveSpec):
        raise ConfigError(f"objective {name!r} is a {type(spec).__name__}, not an ObjectiveSpec")
    return spec
