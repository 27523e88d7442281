"""ForeMoE: expert load balanced from routes that are known before the trainer runs them. numpy alone, pure.

Letters in names' ends: M micro-batches of a pass, L MoE layers, E experts, R ranks of the expert group, K machines,
N = E / R home experts a rank, X borrowed slots a rank. A *source* is the rank whose router saw a token, a *target* the
rank that computes it; a *token* is one of its top-k copies.
"""

from r3.balance.plan import Grid, Plan, PlanError, Plans

__all__ = ["Grid", "Plan", "PlanError", "Plans"]
