"""Reports of evaluations made by hand, for tests of what becomes of them."""

from __future__ import annotations

from dataclasses import replace

from agent_rl.evaluation.report import EvalReport, TaskOutcome, report


def eval_report(rate: float, **changed: object) -> EvalReport:
    """A report of task ``a``, resolved in one of two samples, that says ``rate``."""
    outcome = TaskOutcome("a", "", 2, 1, 0, 0, ("submitted", "submitted"), 1.0)
    empty = report([], [], policy="engine", samples=1, seconds=1.0)
    return replace(empty, pass_at_1=rate, outcomes=(outcome,), **changed)  # type: ignore[arg-type]
