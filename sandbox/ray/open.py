"""Opens the sandbox backend on all nodes of the connected Ray cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandbox.errors import SandboxUnavailableError
from sandbox.ray.backend import ClusterBackend, SandboxNode
from sandbox.ray.node import RemoteNode, Response, SandboxNodeActor
from sandbox.shielded import shielded
from sandbox.types import ImagePolicy, SandboxBackend

RESOURCE = "sandboxes"
"""Sandboxes run on the nodes that declare this Ray resource, or on all nodes if none declares it."""
OPEN_SECONDS = 300.0
_MAX_CALLS = 10_000
"""Concurrent calls of an actor; each running command is one."""


async def open_cluster(
    backend: str = "auto",
    *,
    run_id: str,
    images: ImagePolicy | None = None,
    runtime: str | None = None,
    sandboxes_per_node: int = 64,
    pool: Callable[[SandboxBackend], SandboxBackend] = lambda backend: backend,
    on_note: Callable[[str], None] = lambda line: None,
) -> ClusterBackend:
    """Open ``backend`` on every node; the arguments are those of :func:`sandbox.factory.open_backend`.

    ``pool`` wraps the backend of each node, for the limits of one machine. ``on_note`` receives one line for every lost
    node. Raises ``SandboxUnavailableError`` with one line that names the node if it lacks the backend, or if two nodes
    chose different ones.
    """
    policy = images or ImagePolicy()
    nodes = sandbox_nodes(await asyncio.to_thread(ray_nodes))
    actors = await asyncio.to_thread(_start_actors, nodes)
    calls = {name: actor.call.remote("open", backend, run_id, policy, runtime) for name, actor in actors.items()}
    try:
        opened = await asyncio.gather(*(_await_open(name, nodes[name], call) for name, call in calls.items()))
        backends = {name: opened_name for name, opened_name in zip(calls, opened, strict=True) if opened_name}
        check_same_backend(backends)
    except BaseException:
        await shielded(asyncio.to_thread(_kill, list(actors.values())))
        raise
    for name in actors.keys() - backends.keys():
        on_note(f"the sandbox node {name} is lost: it died while its backend was opened")
    remotes = [RemoteNode(name, opened_name, actors[name]) for name, opened_name in backends.items()]
    return ClusterBackend(
        [SandboxNode(remote, pool(remote)) for remote in remotes],
        max_per_node=sandboxes_per_node,
        pull=policy.pull,
        on_note=on_note,
    )


def sandbox_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Select the sandbox nodes from ``ray.nodes()``; return name -> node id, sorted by name."""
    declared = [node for node in nodes if node["Alive"] and node["Resources"].get(RESOURCE)]
    return {name: node["NodeID"] for name, node in named_nodes(declared or nodes).items()}


def named_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the living nodes of ``ray.nodes()`` by name, sorted; nodes of equal name get a part of their id added."""
    alive = [node for node in nodes if node["Alive"]]
    counts = Counter(node["NodeName"] for node in alive)
    named = {
        node["NodeName"] if counts[node["NodeName"]] == 1 else f"{node['NodeName']}/{node['NodeID'][:6]}": node
        for node in alive
    }
    return dict(sorted(named.items()))


def ray_nodes() -> list[dict[str, Any]]:
    """Return ``ray.nodes()``. Blocking."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    return nodes


def _start_actors(nodes: Mapping[str, str]) -> dict[str, Any]:
    """Start an actor on every node (name -> node id); return the handles by name. Blocking."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _MAX_CALLS}  # untyped in Ray
    actor_class: Any = ray.remote(**options)(SandboxNodeActor)
    return {
        name: actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for name, node in nodes.items()
    }


async def _await_open(name: str, node_id: str, call: Any) -> str | None:
    """Return the name of the backend that a node opened, or None if the node died (Ray notices after ~30 seconds)."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(OPEN_SECONDS):
            response: Response = await call
    except TimeoutError:
        raise SandboxUnavailableError(f"sandbox node {name}: it did not open within {OPEN_SECONDS:g} s") from None
    except RayError as error:
        if not any(each["Alive"] for each in await asyncio.to_thread(ray_nodes) if each["NodeID"] == node_id):
            return None
        reason = str(error).strip().splitlines()[-1]
        raise SandboxUnavailableError(
            f"sandbox node {name}: {reason}; every node needs the same agent-rl as this one"
        ) from error
    if (failure := response.error) is not None:
        raise type(failure)(f"sandbox node {name}: {failure}")
    return str(response.value)


def check_same_backend(backends: Mapping[str, str]) -> None:
    """Raise ``SandboxUnavailableError`` if nodes chose different backends (node -> backend), or if there are none."""
    if not backends:
        raise SandboxUnavailableError("sandbox.placement=ray: no node of the Ray cluster is alive")
    if len(set(backends.values())) > 1:
        chosen = ", ".join(f"{node}: {backend}" for node, backend in backends.items())
        raise SandboxUnavailableError(
            f"sandbox.backend: the sandbox nodes have different ones ({chosen}); name one that all of them have"
        )


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)
