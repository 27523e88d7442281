"""What balancing did in a step: a rank's report, and all reports merged into metrics and ``balance.jsonl``.

numpy only: the driver merges the reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from agent_rl.utils.run_files import write_atomic

FILE = "balance.jsonl"

BalancedPass = Literal["recompute", "update"]
"""A pass without gradients (the old log-probs), or one mini step's forward and backward passes."""


@dataclass(frozen=True, slots=True, eq=False)
class PassBalance:
    """A pass of an expert group; arrays ``[M, C]``: M micro-batches, C MoE layers of this stage, numbered ``layers``.

    ``imbalance``: tokens of the fullest rank over the mean. ``link``: tokens over the busiest node's link.
    ``before``: every token on its expert's owner rank; ``after``: as planned. ``borrowed``: mean borrowed experts per
    rank.
    """

    kind: BalancedPass
    layers: tuple[int, ...]
    imbalance_before: NDArray[np.float64]
    imbalance_after: NDArray[np.float64]
    link_before: NDArray[np.int32]
    link_after: NDArray[np.int32]
    borrowed: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a new expert placement took: ``nbytes`` of state that this rank received, ``ms`` that the step waited."""

    nbytes: int = 0
    ms: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class BalanceReport:
    """One rank's report of a step. Only the first rank of an expert group (``group`` is its number) lists ``passes``.

    ``rows``: (token, layer) pairs in passes with plans; ``unforeseen`` of them had no routes and were routed without
    replay. ``bytes_fetched``: weights received; ``bytes_returned``: gradients sent. ``planning_ms``: processor time of
    planning. The other milliseconds are the time that passes waited for plans, for experts and for the pool's refresh,
    and that the step waited for experts to move to new owner ranks, ``bytes_moved`` of their state to this rank.
    """

    group: int
    passes: tuple[PassBalance, ...]
    rows: int
    unforeseen: int
    bytes_fetched: int
    bytes_returned: int
    planning_ms: float
    planning_exposed_ms: float
    exposed_transfer_ms: float
    pool_refresh_ms: float
    bytes_moved: int = 0
    placement_ms: float = 0.0


def balance_metrics(reports: Sequence[BalanceReport]) -> dict[str, float]:
    """Returns the ``balance/*`` metrics of all reports: figures over all micro-batches and layers, sums of bytes, and
    times of the slowest rank."""
    passes = [each for report in reports for each in report.passes]
    if not passes:
        return {}
    values = {f"balance/{name}": float(_values(passes, name).mean()) for name in ("link_before", "link_after")}
    for name in ("imbalance_before", "imbalance_after"):
        ratios = _values(passes, name)
        values[f"balance/{name}_mean"] = float(ratios.mean())
        values[f"balance/{name}_p95"] = float(np.quantile(ratios, 0.95))
    rows, unforeseen = (sum(getattr(report, name) for report in reports) for name in ("rows", "unforeseen"))
    values["balance/unforeseen_fraction"] = unforeseen / max(1, rows)
    for field in (field.name for field in fields(BalanceReport)):
        if field.startswith("bytes_"):
            values[f"balance/{field}"] = float(sum(getattr(report, field) for report in reports))
        elif field.endswith("_ms"):
            values[f"balance/{field}"] = max(getattr(report, field) for report in reports)
    return values


def _values(passes: Sequence[PassBalance], name: str) -> NDArray[np.float64]:
    return np.concatenate([getattr(each, name).ravel() for each in passes]).astype(np.float64)


def write_balance(run_dir: Path, step: int, reports: Sequence[BalanceReport]) -> None:
    """Append ``step`` to the run's ``balance.jsonl``: one row per expert group, pass, micro-batch and layer."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / FILE).open("ab") as file:
        for report in reports:
            file.writelines(orjson.dumps(row) + b"\n" for row in _rows(step, report))


def _rows(step: int, report: BalanceReport) -> Iterator[dict[str, object]]:
    for number, balance in enumerate(report.passes):
        key = {"step": step, "group": report.group, "pass": balance.kind, "number": number}
        for microbatch, column in np.ndindex(balance.borrowed.shape):
            figures = {
                name: round(float(getattr(balance, name)[microbatch, column]), 4)
                for name in ("imbalance_before", "imbalance_after", "link_before", "link_after", "borrowed")
            }
            yield {**key, "microbatch": microbatch, "layer": balance.layers[column], **figures}


def forget_balance(run_dir: Path, step: int) -> None:
    """Remove the rows of steps after ``step``, which will run again, and an incomplete last row."""
    path = run_dir / FILE
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and orjson.loads(line)["step"] <= step]
        write_atomic(path, b"".join(kept))
