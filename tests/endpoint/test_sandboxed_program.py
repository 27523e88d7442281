"""A program in a task's own sandbox: it reaches the endpoint without a network, its files stay out of the patch, and
the sandbox that grades has neither them nor the socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.endpoint_sessions import RECORD, call, drive

from agent_rl.config import HarnessConfig
from agent_rl.endpoint.episode import SANDBOX_ENDPOINT, SANDBOX_HARNESS, relay_endpoint
from agent_rl.endpoint.server import serve_endpoint
from agent_rl.render import ChatRenderer
from agent_rl.types import StopReason
from envs.context import EnvContext
from envs.swe.sandboxes import sandbox_spec
from sandbox import ImagePolicy, Sandbox, SandboxBackend, SandboxPool, SandboxSpec, open_backend
from sandbox.ray.backend import ClusterBackend, SandboxNode
from sandbox.ray.node import RemoteNode, SandboxNodeActor
from sandbox.temp_dir import TempDirectory

pytestmark = pytest.mark.bubblewrap
PROGRAMS = Path(__file__).parent / "programs"


class Watched(SandboxPool):
    """Keeps the specs of the sandboxes that it starts."""

    def __init__(self, backend: SandboxBackend, **bounds: int) -> None:
        super().__init__(backend, **bounds)
        self.specs: list[SandboxSpec] = []

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.specs.append(spec)
        return await super().start(spec)


@pytest.fixture
async def pool() -> AsyncIterator[Watched]:
    watched = Watched(open_backend("bubblewrap", run_id="harness"), max_execs=1)
    yield watched
    await watched.close()


async def test_a_program_in_the_sandbox(say: Any, drive: Any, pool: Watched) -> None:
    # Commands of other sandboxes go on meanwhile, although the pool runs one at a time.
    other = await pool.start(sandbox_spec(EnvContext(backend=pool), RECORD, None))
    waiting, beside = asyncio.Event(), asyncio.Event()

    async def before(number: int) -> None:
        waiting.set()
        await beside.wait()

    engine = say(call("ls"), before=before)
    run = f"echo changed > new.txt; touch $HOME/.state; python3 {SANDBOX_HARNESS}/talk.py ends"
    harness = HarnessConfig(command=run, directory=PROGRAMS)
    driving = asyncio.create_task(drive(engine, harness, pool))
    await waiting.wait()
    assert (await other.exec("true", timeout=10)).ok
    beside.set()
    trajectory = await driving
    assert (trajectory.stop, trajectory.error) == (StopReason.SUBMITTED, "")
    assert len(trajectory.turns) == 3
    assert trajectory.patch.count("diff --git") == 1
    assert "b/new.txt" in trajectory.patch
    binds = [set(spec.ro_binds.values()) & {SANDBOX_ENDPOINT, SANDBOX_HARNESS} for spec in pool.specs[1:]]
    assert binds[0] == {SANDBOX_ENDPOINT, SANDBOX_HARNESS}
    assert len(binds) > 1
    assert not any(binds[1:])


async def test_a_sandbox_on_another_node_reaches_the_endpoint(say: Any, renderer: ChatRenderer, pool: Watched) -> None:
    node, short = SandboxNodeActor(), TempDirectory("node-")
    await node.open("bubblewrap", "node", ImagePolicy(), None)
    remote = RemoteNode("node", "bubblewrap", SimpleNamespace(call=SimpleNamespace(remote=node.call)))
    async with serve_endpoint(bind="127.0.0.1") as endpoint:
        endpoint.directory = short.path / "endpoint"  # another node does not have the controller's
        await relay_endpoint(endpoint, ClusterBackend([SandboxNode(remote, remote)], max_per_node=1))
        harness = HarnessConfig(command=f"python3 {SANDBOX_HARNESS}/talk.py ends", directory=PROGRAMS)
        trajectory = await drive(endpoint, renderer, say(call("ls")), harness, pool)
        assert (trajectory.stop, trajectory.error) == (StopReason.SUBMITTED, "")
        assert len(trajectory.turns) == 3
        await node.close()
        assert not endpoint.directory.exists()
    short.remove()


async def test_a_sandbox_without_python_is_a_harness_failure(say: Any, drive: Any, pool: Watched) -> None:
    harness = HarnessConfig(command="true", env={"PATH": "/nowhere"})
    trajectory = await drive(say("x"), harness, pool)
    assert (trajectory.stop, trajectory.reward) == (StopReason.HARNESS_FAILURE, None)
    assert "python3" in trajectory.error


@pytest.mark.parametrize("killing", ["kill -9 -1", "pkill -9 -f bridge.py"])
async def test_a_policy_that_kills_every_process_of_its_sandbox_is_graded(
    say: Any, drive: Any, pool: Watched, killing: str
) -> None:
    """It is no failure of the infrastructure, which would be repeated."""
    harness = HarnessConfig(command=f"python3 {SANDBOX_HARNESS}/talk.py obeys", directory=PROGRAMS)
    trajectory = await drive(say(call(killing)), harness, pool)
    assert (trajectory.stop, trajectory.reward) == (StopReason.PROGRAM_FAILED, 0.0)
