"""The mismatch of many sequences, in total, by turn and by weight version.

A forward pass at position i takes token i, uses row i's experts and gives token i + 1 its log-prob. So row i and the
log-prob of token i + 1 have the same labels: the turn that token i + 1 belongs to, and the weights that row i was
computed with. A worked example (``p`` prompt, ``a`` sampled, ``o`` observed)::

    token         p p p a a o o a a
    turn          1 1 1 1 1 2 2 2 2       of the token: an observation opens its turn
    row's turn    1 1 1 1 2 2 2 2 -       row 4 was computed by turn 2, when token 4 was first fed back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r3.mismatch.report import (
    TAUS,
    Floats,
    LogprobMismatch,
    RouteMismatch,
    differing_experts,
    log_ratios,
    logprob_mismatch,
    route_mismatch,
)
from r3.routing import Routing


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One sequence of S tokens in two passes: a reference (such as the engine) and another (the trainer).

    ``logprobs`` and ``reference_logprobs`` ``[S]``: of each token given those before it; used where ``sampled`` bool
    ``[S]`` is true. ``turns`` int ``[S]``: each token's turn. ``routes`` and ``reference_routes``: S rows each; the
    spans of the reference have the weight versions.
    """

    logprobs: Floats
    reference_logprobs: Floats
    sampled: NDArray[np.bool_]
    turns: NDArray[np.integer]
    routes: Routing
    reference_routes: Routing


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """The mismatch of log-probs and routes; None without sampled tokens, or without rows present in both."""

    logprobs: LogprobMismatch | None
    routes: RouteMismatch | None


@dataclass(frozen=True, slots=True, eq=False)
class MismatchReport:
    """The mismatch of all positions, and of those of each turn and each weight version, in their order."""

    total: Mismatch
    by_turn: Mapping[int, Mismatch]
    by_weight_version: Mapping[str, Mismatch]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values: lists for arrays, strings for keys, None for values that are not finite. The parts omit
        ``by_sequence``, which would be most of the bytes."""
        plain = _plain(asdict(self))
        for part in (*plain["by_turn"].values(), *plain["by_weight_version"].values()):
            if part["routes"] is not None:
                del part["routes"]["by_sequence"]
        return plain


@dataclass(frozen=True, slots=True, eq=False)
class _Labeled:
    """``values`` ``[n, ...]`` with the sequence, turn and weight version of each."""

    values: NDArray
    sequence: NDArray[np.int64]
    turn: NDArray[np.integer]
    version: NDArray[np.str_]

    def select(self, keep: NDArray[np.bool_]) -> _Labeled:
        return _Labeled(self.values[keep], self.sequence[keep], self.turn[keep], self.version[keep])


def mismatch_report(pairs: Sequence[Pair]) -> MismatchReport:
    """Compare the two passes of all ``pairs``.

    Raises ValueError for log-probs that are not finite or of the wrong shape, RoutingError for routes of different
    shapes.
    """
    log_r = _joined([_logprobs(index, pair) for index, pair in enumerate(pairs)])
    differ = _joined([_rows(index, pair) for index, pair in enumerate(pairs)])
    top_k = pairs[0].routes.top_k

    def mismatch(tokens: _Labeled, rows: _Labeled) -> Mismatch:
        return Mismatch(
            logprob_mismatch(tokens.values, tokens.sequence, TAUS) if len(tokens.values) else None,
            route_mismatch(rows.values, rows.sequence, top_k) if len(rows.values) else None,
        )

    turns = sorted({*log_r.turn.tolist(), *differ.turn.tolist()})
    versions = sorted({*log_r.version.tolist(), *differ.version.tolist()}, key=lambda name: (len(name), name))
    return MismatchReport(
        total=mismatch(log_r, differ),
        by_turn={n: mismatch(log_r.select(log_r.turn == n), differ.select(differ.turn == n)) for n in turns},
        by_weight_version={
            name: mismatch(log_r.select(log_r.version == name), differ.select(differ.version == name))
            for name in versions
        },
    )


def _logprobs(index: int, pair: Pair) -> _Labeled:
    """Log-ratios of the sampled tokens; the first token of a sequence is never sampled."""
    sampled = pair.sampled.copy()
    sampled[0] = False
    values = log_ratios(pair.logprobs, pair.reference_logprobs, sampled) if sampled.any() else np.zeros(0)
    version = np.roll(_versions(pair.reference_routes), 1)
    return _Labeled(values, np.full(len(values), index), pair.turns[sampled], version[sampled])


def _rows(index: int, pair: Pair) -> _Labeled:
    """Differing experts of the rows present in both that predict a token: all but the last."""
    both = pair.routes.present & pair.reference_routes.present
    values = differing_experts(pair.routes, pair.reference_routes)
    rows = np.flatnonzero(both)
    predicts = rows < pair.routes.tokens - 1
    rows, values = rows[predicts], values[predicts]
    version = _versions(pair.reference_routes)
    return _Labeled(values, np.full(len(rows), index), pair.turns[rows + 1], version[rows])


def _versions(routing: Routing) -> NDArray[np.str_]:
    """The weight version of every row, ``[S]``."""
    names = [span.weight_version for span in routing.spans]
    return np.repeat(np.array(names, dtype=np.str_), [span.stop - span.start for span in routing.spans])


def _joined(parts: Sequence[_Labeled]) -> _Labeled:
    return _Labeled(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.sequence for part in parts]),
        np.concatenate([part.turn for part in parts]),
        np.concatenate([part.version for part in parts]),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
