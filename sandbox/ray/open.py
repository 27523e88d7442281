"""Opens the sandboxes of all machines of the Ray cluster that this process is connected to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandbox.errors import SandboxError, SandboxUnavailableError
from sandbox.ray.backend import ClusterBackend, Place
from sandbox.ray.host import Answer, SandboxHost
from sandbox.ray.remote import RemoteHost
from sandbox.shielded import shielded
from sandbox.types import ImagePolicy, SandboxBackend

RESOURCE = "sandboxes"
"""Nodes that declare this Ray resource are the sandbox hosts; where none does, all nodes are."""
OPEN_SECONDS = 300.0
_CALLS = 10_000
"""Calls that a host takes at once: each running command is one."""


async def open_cluster(
    backend: str = "auto",
    *,
    run_id: str,
    images: ImagePolicy | None = None,
    runtime: str | None = None,
    sandboxes_per_node: int = 64,
    pool: Callable[[SandboxBackend], SandboxBackend] = lambda host: host,
    tell: Callable[[str], None] = lambda line: None,
) -> ClusterBackend:
    """The backend ``backend`` on every host, as one; the arguments are :func:`sandbox.factory.open_backend`'s.

    ``pool`` wraps each host's sandboxes, in the limits that hold on one machine. Raises ``SandboxUnavailableError``, in
    one line that names the host, where a host lacks the backend, or two chose different ones.
    """
    policy = images or ImagePolicy()
    nodes = host_nodes(await asyncio.to_thread(ray_nodes))
    actors = await asyncio.to_thread(_start_actors, nodes)
    asked = {name: actor.ask.remote("open", backend, run_id, policy, runtime) for name, actor in actors.items()}
    try:
        opened = await asyncio.gather(*(_opened(name, nodes[name], call) for name, call in asked.items()))
        kinds = {name: kind for name, kind in zip(asked, opened, strict=True) if kind is not None}
        check_alike(kinds)
    except BaseException:
        await shielded(asyncio.to_thread(_kill, list(actors.values())))
        raise
    for name in actors.keys() - kinds.keys():
        tell(f"the sandbox host {name} is lost: its node died as it was opened")
    hosts = [RemoteHost(name, kind, actors[name]) for name, kind in kinds.items()]
    return ClusterBackend(
        [Place(host, pool(host)) for host in hosts], most=sandboxes_per_node, pull=policy.pull, tell=tell
    )


def host_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The nodes that sandboxes are on, of those that ``ray.nodes()`` gives: name -> node id, sorted."""
    declared = [node for node in nodes if node["Alive"] and node["Resources"].get(RESOURCE)]
    return {name: node["NodeID"] for name, node in named_nodes(declared or nodes).items()}


def named_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The nodes that live, of those that ``ray.nodes()`` gives, by their names, sorted. Those of one name get their ids
    added."""
    living = [node for node in nodes if node["Alive"]]
    times = Counter(node["NodeName"] for node in living)
    named = {
        node["NodeName"] if times[node["NodeName"]] == 1 else f"{node['NodeName']}/{node['NodeID'][:6]}": node
        for node in living
    }
    return dict(sorted(named.items()))


def ray_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster, as Ray tells of them. Blocking."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    return nodes


def _start_actors(nodes: Mapping[str, str]) -> dict[str, Any]:
    """An actor on every node (name -> node id), by its name. Blocking."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _CALLS}  # Ray's types lack the last
    actor_class: Any = ray.remote(**options)(SandboxHost)
    return {
        name: actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for name, node in nodes.items()
    }


async def _opened(name: str, node: str, call: Any) -> str | None:
    """The kind of the backend that a host opened; None where its node died: Ray notices that half a minute later."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(OPEN_SECONDS):
            answer: Answer = await call
    except TimeoutError:
        raise SandboxUnavailableError(f"sandbox host {name}: it did not open within {OPEN_SECONDS:g} s") from None
    except RayError as error:
        if not any(each["Alive"] for each in await asyncio.to_thread(ray_nodes) if each["NodeID"] == node):
            return None
        reason = str(error).strip().splitlines()[-1]
        raise SandboxUnavailableError(
            f"sandbox host {name}: {reason}; every node needs the same agent-rl as this one"
        ) from error
    if answer.error is not None:
        raise _of_host(answer.error, name)
    return str(answer.value)


def _of_host(error: SandboxError, name: str) -> SandboxError:
    return type(error)(f"sandbox host {name}: {error}")


def check_alike(kinds: Mapping[str, str]) -> None:
    """Raise ``SandboxUnavailableError`` where hosts chose different backends (host -> backend), or there are none."""
    if not kinds:
        raise SandboxUnavailableError("sandbox.placement: ray: no node of the Ray cluster is alive")
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise SandboxUnavailableError(
            f"sandbox.backend: the sandbox hosts have different ones ({found}): name the one that all are to use"
        )


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)
