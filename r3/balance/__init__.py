"""ForeMoE: expert load balanced from routes that are known before the trainer runs them. numpy alone, pure.

Letters: M micro-batches of a pass, L MoE layers, E experts, R ranks of the expert group, K machines, N = E / R home
experts a rank, X borrowed slots a rank. A *source* is the rank whose router saw a token, a *target* the rank that
computes it; a token counts once for each of its top-k experts.
"""

from r3.balance.plan import Grid, Plan, PlanError, Plans
from r3.balance.planners import Options, plan_pass

__all__ = ["Grid", "Options", "Plan", "PlanError", "Plans", "plan_pass"]
