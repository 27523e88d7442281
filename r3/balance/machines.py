"""The first level of transport: which tokens of each expert every machine computes.

Experts are named by their home slot (``rank * N + i``), so that a machine's own are neighbours. B instances at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r3.balance.plan import Ints


def home_demand(counts: Ints) -> Ints:
    """``[B, K, E]``: tokens of each expert that each machine computes when all stay on the expert's machine."""
    return np.where(own_experts(counts), counts.sum(axis=1, keepdims=True), 0).astype(np.int32)


def even_demand(counts: Ints, imports: int, most: int) -> Ints:
    """``[B, K, E]``: the same when each machine borrows, and computes for itself, the ``imports`` foreign experts that
    most of its own tokens go to, and when all machines then compute equally much. ``counts``: by source machine. A
    machine borrows at most ``most`` experts."""
    own, machines = own_experts(counts), counts.shape[1]
    reach = min(most * (machines - 1), counts.shape[2] - counts.shape[2] // machines)
    wanted = np.argsort(np.where(own, 1, -counts), axis=2, kind="stable")[..., :reach].astype(np.int32)
    demand = np.zeros_like(counts)
    chosen = wanted[..., : min(imports, most)]
    np.put_along_axis(demand, chosen, np.take_along_axis(counts, chosen, axis=2), axis=2)
    rest = counts.sum(axis=1, keepdims=True) - demand.sum(axis=1, keepdims=True)
    demand += np.where(own, rest, 0).astype(np.int32)
    _Machines(counts, demand, wanted, min(most, imports * 5 // 4), most).make_even()
    return demand


def own_experts(counts: Ints) -> NDArray[np.bool_]:
    """``[K, E]``: which machine is each expert's home."""
    machines, experts = counts.shape[1:]
    return np.arange(machines)[:, None] == np.arange(experts) * machines // experts


@dataclass(frozen=True, eq=False)
class _Pairs:
    """In each of ``rows`` a machine ``source`` that has too many tokens, and a ``target`` that has too few."""

    rows: Ints
    source: Ints
    target: Ints


@dataclass(frozen=True, eq=False)
class _Machines:
    """``demand`` ``[B, K, E]`` is changed in place; ``wanted`` ``[B, K, F]``: a machine's foreign experts, those first
    that most of its own tokens go to. A machine borrows up to ``spare`` experts for its own tokens alone, and up to
    ``most`` where that alone makes loads even."""

    counts: Ints
    demand: Ints
    wanted: Ints
    spare: int
    most: int

    def make_even(self) -> None:
        """Move tokens from the fullest machine to the emptiest until all have their share, or nothing moves.

        Half of what is too much leaves as new loans, which spares the link to the source, and half by ending the
        smallest loans of the source, which costs the other direction: so both stay alike, and the loans as many.
        """
        machines = self.demand.shape[1]
        share = (self.demand.sum(axis=(1, 2))[:, None] + np.arange(machines)[::-1]) // machines
        rows = np.arange(len(self.demand))
        while len(rows):
            over = self.demand[rows].sum(axis=2) - share[rows]
            source, target = over.argmax(axis=1), over.argmin(axis=1)
            at = np.arange(len(rows))
            amount = np.minimum(over[at, source], -over[at, target])
            pairs = _Pairs(rows, source, target)
            left = amount - amount // 2 + self._try(self._lend, pairs, amount // 2)
            for move in (self._end_loans, self._lend, self._lend_more):
                left = self._try(move, pairs, left)
            rows = rows[left < amount]

    def _try(self, move: Callable[[_Pairs, Ints], Ints], pairs: _Pairs, amount: Ints) -> Ints:
        """What is left of ``amount`` after ``move``, which is asked only about rows that have any."""
        busy = np.flatnonzero(amount)
        left = np.zeros_like(amount)
        left[busy] = move(_Pairs(pairs.rows[busy], pairs.source[busy], pairs.target[busy]), amount[busy])
        return left

    def _lend(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The target borrows more of the source's experts, for its own tokens alone."""
        expert, lent, sources = self._wanted_by_target(pairs)
        new = ~lent & self._at_home(expert, pairs.source)
        new &= new.cumsum(axis=1) <= self.spare - lent.sum(axis=1, keepdims=True)
        own = self.counts[pairs.rows[:, None], pairs.target[:, None], expert]
        return self._move(pairs, expert, np.where(new, np.minimum(sources, own), 0), amount)

    def _lend_more(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The target computes other machines' tokens too, with experts that it borrows already, then with more."""
        expert, lent, sources = self._wanted_by_target(pairs)
        left = self._move(pairs, expert, np.where(lent, sources, 0), amount)
        new = ~lent & (sources > 0)
        new &= new.cumsum(axis=1) <= self.most - lent.sum(axis=1, keepdims=True)
        return self._move(pairs, expert, np.where(new, sources, 0), left)

    def _end_loans(self, pairs: _Pairs, amount: Ints) -> Ints:
        """The source gives tokens back to experts of the target that it borrows, the smallest loans first."""
        expert = self.wanted[pairs.rows, pairs.source][:, ::-1]
        tokens = self.demand[pairs.rows[:, None], pairs.source[:, None], expert]
        return self._move(pairs, expert, np.where(self._at_home(expert, pairs.target), tokens, 0), amount)

    def _wanted_by_target(self, pairs: _Pairs) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """``[rows, F]``: the experts that the target wants, whether it borrows them, the source's tokens of them."""
        expert, rows = self.wanted[pairs.rows, pairs.target], pairs.rows[:, None]
        lent = self.demand[rows, pairs.target[:, None], expert] > 0
        return expert, lent, self.demand[rows, pairs.source[:, None], expert]

    def _at_home(self, expert: Ints, machine: Ints) -> NDArray[np.bool_]:
        return expert // (self.demand.shape[2] // self.demand.shape[1]) == machine[:, None]

    def _move(self, pairs: _Pairs, expert: Ints, tokens: Ints, amount: Ints) -> Ints:
        """Move up to ``amount`` of ``tokens``, the first experts first; returns how much of ``amount`` is left."""
        moved = np.clip(amount[:, None] - (tokens.cumsum(axis=1) - tokens), 0, tokens).astype(np.int32)
        at, place = np.nonzero(moved)
        self.demand[pairs.rows[at], pairs.source[at], expert[at, place]] -= moved[at, place]
        self.demand[pairs.rows[at], pairs.target[at], expert[at, place]] += moved[at, place]
        return amount - moved.sum(axis=1)
