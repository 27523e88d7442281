"""ForeMoE: balances expert load from routes that are known before the trainer runs. Pure; imports numpy only.

Letters: M micro-batches of a pass, L MoE layers, E experts, R ranks of the expert group, K nodes, N = E / R experts
that a rank owns, X borrowed slots per rank. The *owner rank* of an expert keeps its parameters; other ranks *borrow* it
for one micro-batch. A *source* is the rank whose router assigned a token, a *target* the rank that computes it. A token
counts once for each of its top-k experts.
"""

from r3.balance.plan import ExpertLayout, LayerPlan, PlanArrays, PlanError
from r3.balance.planners import PlannerOptions, plan_pass
from r3.balance.time_model import TimeModel
