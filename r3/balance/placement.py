"""Which rank owns each expert, chosen for the load of nodes and the traffic between them."""

from __future__ import annotations

import numpy as np

from r3.balance.plan import ExpertLayout, Ints

EVENNESS = 7.0
"""How much of the fullest node's load a unit of the variance between nodes counts for: near a deviation of 0.1, the
fullest of some nodes has 1 + 1.4 deviations of the mean."""

_SWAPS_PER_EXPERT = 2


def joint_placement(sources: Ints, layout: ExpertLayout, link_weight: float) -> Ints:
    """Returns an expert placement ``[L, E]``, better than that of ``layout`` for ``sources`` ``[M, L, K, E]``, the
    tokens of M micro-batches by source node.

    Two experts of different nodes change places while the joint cost falls: the variance of the nodes' loads within
    micro-batches, and ``link_weight`` times the share of tokens that leave their node. Then the heaviest remaining
    expert of a node goes to its rank with the lowest load that has capacity. The experts of a rank ascend.
    """
    layers = sources.shape[1]
    slots = np.argsort(np.broadcast_to(layout.placement, (layers, layout.experts)), axis=1, kind="stable")
    node = slots // (layout.experts // layout.nodes)
    if layout.nodes > 1:
        node = np.stack([_swapped(sources[:, layer], node[layer], link_weight) for layer in range(layers)])
    return _onto_ranks(sources.sum(axis=(0, 2), dtype=np.int64), node, layout)


def _swapped(sources: Ints, node: Ints, link_weight: float) -> Ints:
    """Returns ``[E]``, the node of each expert, from ``sources`` ``[M, K, E]`` of one layer."""
    batches, nodes, experts = sources.shape
    share = sources / sources.sum(axis=(1, 2), keepdims=True).clip(1)
    weight = nodes * share.sum(axis=1)  # [M, E]; the nodes' mean is 1
    gram = weight.T @ weight
    pair = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    local = link_weight * share.sum(axis=0).T  # [E, K]
    node, index = node.copy(), np.arange(experts)
    for _ in range(_SWAPS_PER_EXPERT * experts):
        load = weight @ (node[:, None] == np.arange(nodes))  # [M, K]
        pull = 2 * weight.T @ load  # [E, K]
        here, there = pull[index, node], pull[:, node]
        load_change = there - here[:, None] + there.T - here
        link_change = local[index, node][:, None] + local[index, node] - local[:, node] - local[:, node].T
        change = EVENNESS / nodes * (load_change + 2 * pair) + link_change
        change[node[:, None] == node] = 0
        first, second = divmod(int(change.argmin()), experts)
        if change[first, second] >= -1e-9 * batches:
            break
        node[first], node[second] = node[second], node[first]
    return node


def _onto_ranks(loads: Ints, node: Ints, layout: ExpertLayout) -> Ints:
    """Returns the placement ``[L, E]`` from the ``loads`` of the experts and their ``node``, ``[L, E]``."""
    layers, each = len(loads), layout.ranks // layout.nodes
    by_node = np.argsort(node, axis=1, kind="stable").reshape(layers * layout.nodes, -1)
    inside = np.take_along_axis(loads, by_node.reshape(layers, -1), axis=1).reshape(by_node.shape)
    order = np.argsort(_greedy_bins(inside, each), axis=1, kind="stable")
    return np.take_along_axis(by_node, order, axis=1).reshape(layers, -1).astype(np.int32)


def _greedy_bins(loads: Ints, bins: int) -> Ints:
    """Returns ``[B, E]``: the bin of each item of ``loads`` ``[B, E]``; all bins get the same number of items."""
    rows, capacity = np.arange(len(loads)), loads.shape[1] // bins
    bin_of = np.zeros(loads.shape, np.int64)
    bin_load, count = np.zeros((len(loads), bins), np.int64), np.zeros((len(loads), bins), np.int64)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        best = np.where(count < capacity, bin_load, np.iinfo(np.int64).max).argmin(axis=1)
        bin_of[rows, item] = best
        bin_load[rows, best] += loads[rows, item]
        count[rows, best] += 1
    return bin_of
