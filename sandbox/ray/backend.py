"""One backend over the sandboxes of several nodes: chooses a node for each sandbox and survives lost nodes.

It prefers nodes that have the sandbox's image, and among these the node with the fewest sandboxes. A node has a maximum
number of sandboxes; a start waits while every node is full. A task that already has a sandbox does not wait: an episode
starts its grading sandbox while the agent's still exists, so waiting could deadlock all episodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sandbox.errors import ImageMissingError, SandboxNodeLostError, SandboxStartError, SandboxUnavailableError
from sandbox.ray.node import NodeProbe, NodeReport, RemoteNode, Response, SandboxNodeActor
from sandbox.shielded import shielded
from sandbox.timeouts import uncharged
from sandbox.types import ImagePolicy, Sandbox, SandboxBackend, SandboxSpec

_Inputs = tuple[str, tuple[str, ...]]
"""What a sandbox needs on its node: the image and the directories of ``ro_binds``."""

RESOURCE = "sandboxes"
"""Sandboxes run on the nodes that declare this Ray resource, or on all nodes if none declares it."""
OPEN_SECONDS = 300.0
_MAX_CALLS = 10_000
"""Concurrent calls of an actor; each running command is one."""


@dataclass(eq=False)
class SandboxNode:
    """One node: its client, the backend that starts sandboxes on it, and its number of sandboxes.

    ``fetching`` are the images that it is pulling.
    """

    remote: RemoteNode
    backend: SandboxBackend
    sandboxes: int = 0
    probes: dict[_Inputs, NodeProbe] = field(default_factory=dict)
    fetching: set[str] = field(default_factory=set)

    def has_image(self, inputs: _Inputs) -> bool:
        """Whether the node has the image or is pulling it, as far as known."""
        probe = self.probes.get(inputs)
        return (probe is not None and probe.image_id is not None) or inputs[0] in self.fetching


class ClusterBackend:
    """The sandboxes of all ``nodes``, at most ``max_per_node`` on each. ``pull``: nodes may pull missing images.

    ``on_note`` receives one line for every lost node.
    """

    def __init__(
        self,
        nodes: Sequence[SandboxNode],
        *,
        max_per_node: int,
        pull: bool = False,
        on_note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.nodes = tuple(nodes)
        self._max_per_node, self._pull, self._on_note = max_per_node, pull, on_note
        self._sandboxes: dict[str, tuple[SandboxNode, object]] = {}  # id -> its node and the task that started it
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        for node in self.nodes:
            node.remote.on_lost, node.remote.on_close = self._on_lost, self._on_close

    @property
    def name(self) -> str:
        return self.nodes[0].remote.name

    @property
    def sandboxes(self) -> int:
        """Number of open sandboxes."""
        return len(self._sandboxes)

    @property
    def lost(self) -> int:
        """Number of lost nodes."""
        return sum(bool(node.remote.lost) for node in self.nodes)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox on one of the nodes; on another one if that node is lost meanwhile.

        Raises the errors of a node's backend; ``ImageMissingError`` also if no node has the image or two nodes have
        different ones; ``SandboxUnavailableError`` if some nodes lack a directory of ``ro_binds``, or all are lost.
        """
        while True:
            node = await self._wait_for_node(spec)
            node.sandboxes += 1
            try:
                sandbox = await self._start(node, spec)
            except SandboxNodeLostError:
                self._release(node)
            except BaseException:
                self._release(node)
                raise
            else:
                self._sandboxes[sandbox.id] = node, asyncio.current_task()
                return sandbox

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs on every node; return how many."""
        return sum(await asyncio.gather(*(node.backend.reap() for node in self._alive())))

    async def report(self, node: SandboxNode) -> NodeReport:
        """Return the resources of a node. Raises ``SandboxNodeLostError``."""
        report: NodeReport = await node.remote.call("report")
        return report

    async def relay(self, path: str, proxy: str, host: str, port: int) -> None:
        """Make ``host`` and ``port`` reachable from sandboxes of every node; see :meth:`SandboxNodeActor.relay`."""
        await asyncio.gather(*(node.remote.call("relay", path, proxy, host, port) for node in self._alive()))

    async def image_ids(self, image: str) -> dict[str, str]:
        """Return the id of ``image`` by the name of each node that has it. Raises as :meth:`start` does."""
        inputs = await self._probe(SandboxSpec(image=image))
        probes = {node.remote.node_name: node.probes.get(inputs) for node in self._alive()}
        return {name: probe.image_id for name, probe in probes.items() if probe and probe.image_id is not None}

    async def close(self) -> None:
        """Close every sandbox on every node, and end the actors."""
        self._closed = True
        self._wake()
        await shielded(self._close())

    async def _start(self, node: SandboxNode, spec: SandboxSpec) -> Sandbox:
        image, inputs = spec.image, _inputs(spec)
        if self._pull and node.probes[inputs].image_id is None:
            node.fetching.add(image)
            try:
                with uncharged():
                    await node.remote.call("fetch", image)
                node.probes[inputs] = await node.remote.call("probe", *inputs)
            except BaseException:
                node.probes.pop(inputs, None)  # probed again at the next start
                raise
            finally:
                node.fetching.discard(image)
        return await node.backend.start(spec)

    async def _wait_for_node(self, spec: SandboxSpec) -> SandboxNode:
        """Wait until a node can take a sandbox of ``spec``."""
        may_wait = all(task is not asyncio.current_task() for _, task in self._sandboxes.values())
        while True:
            if self._closed:
                raise SandboxStartError("the backend is closed")
            inputs = await self._probe(spec)
            if (node := self._choose(inputs, may_wait=may_wait)) is not None:
                return node
            with uncharged():
                await self._wait_for_change()

    def _choose(self, inputs: _Inputs, *, may_wait: bool) -> SandboxNode | None:
        """Return the node for a sandbox, or None if all are full and the caller ``may_wait``."""
        alive = self._alive()
        with_image = [node for node in alive if node.has_image(inputs)]
        for candidates in (with_image, alive if self._pull else []):
            free = [node for node in candidates if not may_wait or node.sandboxes < self._max_per_node]
            if free:
                return min(free, key=lambda node: node.sandboxes)
        return None

    async def _probe(self, spec: SandboxSpec) -> _Inputs:
        """Probe every node once for the inputs of ``spec``. Raises if they are missing or differ between nodes."""
        inputs = _inputs(spec)
        unknown = [node for node in self._alive() if inputs not in node.probes]
        await asyncio.gather(*(self._probe_node(node, inputs) for node in unknown))
        probes = {node: node.probes[inputs] for node in self._alive() if inputs in node.probes}
        try:
            _check_image(inputs[0], probes, pull=self._pull)
            _check_directories(probes)
        except (ImageMissingError, SandboxUnavailableError):
            for node in probes:
                del node.probes[inputs]  # the user may fix it before the next start
            raise
        return inputs

    async def _probe_node(self, node: SandboxNode, inputs: _Inputs) -> None:
        with suppress(SandboxNodeLostError):
            probe = await node.remote.call("probe", *inputs)
            node.probes.setdefault(inputs, probe)  # a pull meanwhile has probed later

    def _alive(self) -> list[SandboxNode]:
        """Return the nodes that are not lost. Raises ``SandboxUnavailableError`` if there are none."""
        alive = [node for node in self.nodes if not node.remote.lost]
        if not alive:
            reasons = "; ".join(node.remote.lost for node in self.nodes)
            raise SandboxUnavailableError(f"every sandbox node is lost: {reasons}")
        return alive

    def _on_lost(self, remote: RemoteNode) -> None:
        sandboxes = sum(node.remote is remote for node, _ in self._sandboxes.values())
        self._on_note(f"{remote.lost}; the work of its {sandboxes} sandboxes is repeated on other nodes")
        self._wake()

    def _on_close(self, sandbox: str) -> None:
        node, _ = self._sandboxes.pop(sandbox, (None, None))
        if node is not None:
            self._release(node)

    def _release(self, node: SandboxNode) -> None:
        node.sandboxes -= 1
        self._wake()

    async def _wait_for_change(self) -> None:
        """Wait until a sandbox is closed or a node is lost."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for node in self.nodes:
                group.create_task(node.backend.close())


def _inputs(spec: SandboxSpec) -> _Inputs:
    return spec.image, tuple(sorted(spec.ro_binds))


def _check_image(image: str, probes: dict[SandboxNode, NodeProbe], *, pull: bool) -> None:
    """Raise ``ImageMissingError`` if nodes have different images, or none has ``image`` and none may pull it."""
    ids = {node.remote.node_name: probe.image_id for node, probe in probes.items() if probe.image_id is not None}
    if len(set(ids.values())) > 1:
        versions = ", ".join(f"{name}: {id[:19]}" for name, id in ids.items())
        raise ImageMissingError(
            f"image {image!r} is not the same on all sandbox nodes ({versions}): pull or load the same image on each, "
            "or name it by its digest"
        )
    if probes and not ids and not pull:
        names, reason = ", ".join(node.remote.node_name for node in probes), next(iter(probes.values())).reason
        raise ImageMissingError(f"{reason} (on each of the sandbox nodes {names})")


def _check_directories(probes: dict[SandboxNode, NodeProbe]) -> None:
    """Raise ``SandboxUnavailableError`` if some nodes lack a directory that others have. If all lack it, the start
    fails."""
    missing = {node.remote.node_name: p.missing_directories for node, p in probes.items() if p.missing_directories}
    if missing and len(missing) < len(probes):
        name, directories = next(iter(missing.items()))
        raise SandboxUnavailableError(
            f"ro_binds: {directories[0]}: no such file or directory on the sandbox node {name}, but other nodes have "
            "it; use a path that exists on every node, for example on a shared file system"
        )


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
    """Open ``backend`` on every node of the connected Ray cluster; the arguments are those of
    :func:`sandbox.factory.open_backend`.

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
