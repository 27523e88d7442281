"""Which tensors share a bucket of a weight sync: one rule for the publisher and the plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import layer_parameters

Item = TypeVar("Item")


def joined_tensors(spec: ModelSpec) -> frozenset[str]:
    """The tensors after which a bucket must not end: an engine loads some tensors only in one call
    (:attr:`agent_rl.models.families.Family.together`)."""
    joined: set[str] = set()
    for layer in range(spec.num_layers) if spec.family.together else ():
        names = [tensor.name for parameter in layer_parameters(spec, layer) for tensor in parameter.tensors]
        for endings in spec.family.together:
            places = [place for place, name in enumerate(names) if name.endswith(endings)]
            joined.update(names[places[0] : places[-1]] if places else ())
    return frozenset(joined)


def fill_buckets(
    items: Iterable[Item],
    name: Callable[[Item], str],
    size: Callable[[Item], int],
    *,
    limit: int,
    joined: Collection[str],
) -> Iterator[tuple[list[Item], bool]]:
    """Buckets of items with at most ``limit`` bytes, in order, and whether each is the last. No bucket ends after a
    name in ``joined``; items that belong together and are larger than ``limit`` have a bucket of their own. A single
    empty bucket where there are no items."""
    bucket: list[Item] = []
    unit: list[Item] = []
    filled = added = 0
    for item in items:
        unit.append(item)
        added += size(item)
        if name(item) in joined:
            continue
        if bucket and filled + added > limit:
            yield bucket, False
            bucket, filled = [], 0
        bucket, filled = bucket + unit, filled + added
        unit, added = [], 0
    yield bucket + unit, True
