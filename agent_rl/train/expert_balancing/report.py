"""What balancing did in a step: a rank's report, and the reports merged into metrics and ``balance.jsonl``. numpy only;
merged in the driver."""

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
    """A pass of an expert group, ``[M, C]`` each: its micro-batches by this stage's MoE layers, numbered ``layers``.

    ``imbalance``: the fullest rank's tokens over the mean. ``link``: tokens over the fullest link between machines.
    ``before``: with every token at its expert's home, ``after``: as planned. ``borrowed``: experts a rank, in the mean.
    """

    kind: BalancedPass
    layers: tuple[int, ...]
    imbalance_before: NDArray[np.float64]
    imbalance_after: NDArray[np.float64]
    link_before: NDArray[np.int32]
    link_after: NDArray[np.int32]
    borrowed: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class BalanceReport:
    """One rank's part in a step. ``passes``, in order, come from the first rank of each expert ``group`` (its number).

    ``rows``: (token, layer) pairs in passes with plans, ``unforeseen`` of them routed natively. Bytes of weights that
    were fetched and of gradients that were returned. Milliseconds: of processor time in planning, and those that the
    passes waited for plans, for experts, and for the pool's refresh.
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


def balance_metrics(reports: Sequence[BalanceReport]) -> dict[str, float]:
    """``balance/*`` of all ranks' reports: figures over all micro-batches and layers, sums of bytes, slowest ranks."""
    passes = [one for report in reports for one in report.passes]
    if not passes:
        return {}
    values = {f"balance/{name}": float(_all(passes, name).mean()) for name in ("link_before", "link_after")}
    for name in ("imbalance_before", "imbalance_after"):
        found = _all(passes, name)
        values |= {f"balance/{name}_mean": float(found.mean()), f"balance/{name}_p95": float(np.quantile(found, 0.95))}
    rows, unforeseen = (sum(getattr(report, name) for report in reports) for name in ("rows", "unforeseen"))
    values["balance/unforeseen_fraction"] = unforeseen / max(1, rows)
    for field in (field.name for field in fields(BalanceReport)):
        if field.startswith("bytes_"):
            values[f"balance/{field}"] = float(sum(getattr(report, field) for report in reports))
        elif field.endswith("_ms"):
            values[f"balance/{field}"] = max(getattr(report, field) for report in reports)
    return values


def _all(passes: Sequence[PassBalance], name: str) -> NDArray[np.float64]:
    return np.concatenate([getattr(one, name).ravel() for one in passes]).astype(np.float64)


def write_balance(run_dir: Path, step: int, reports: Sequence[BalanceReport]) -> None:
    """Append ``step`` to the run's ``balance.jsonl``: a row a layer, micro-batch and pass of each expert group."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / FILE).open("ab") as file:
        for report in reports:
            file.writelines(orjson.dumps(row) + b"\n" for row in _rows(step, report))


def _rows(step: int, report: BalanceReport) -> Iterator[dict[str, object]]:
    for at, one in enumerate(report.passes):
        place = {"step": step, "group": report.group, "pass": one.kind, "number": at}
        for microbatch, column in np.ndindex(one.borrowed.shape):
            figures = {
                name: round(float(getattr(one, name)[microbatch, column]), 4)
                for name in ("imbalance_before", "imbalance_after", "link_before", "link_after", "borrowed")
            }
            yield {**place, "microbatch": microbatch, "layer": one.layers[column], **figures}


def forget_balance(run_dir: Path, step: int) -> None:
    """Drop the rows of steps later than ``step``, which are about to be done again, and one that a kill cut short."""
    path = run_dir / FILE
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and orjson.loads(line)["step"] <= step]
        write_atomic(path, b"".join(kept))
