"""What every environment is given: the backend that starts sandboxes, and the limits it works under."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from envs.scaffold import Scaffold
from envs.scaffolds.own import AGENT_RL
from sandbox import Sandbox, SandboxBackend, SandboxSpec, SandboxStartError
from tools import Style as ToolStyle


@dataclass(frozen=True)
class EnvContext:
    """The first argument of every environment's constructor: ``Env(context, **options)``.

    ``limits`` is the template of every sandbox (memory, processes, CPUs, output cap, and the image of tasks that name
    none). ``scaffold`` is how agents meet the tasks, where the environment has no tools of its own. ``tool_style``
    "concise" shortens the opening messages, the tool schemas and what tools answer, for models with a short context (in
    the interface ``agent-rl``). ``tool_timeout`` and ``grade_timeout`` are seconds a tool call and a run of the hidden
    tests may take. ``start_retries`` is how often a sandbox that did not start is tried again. ``pairs`` bounds the
    runs of tests in two sandboxes that wait for each other, for more than half as many as commands may run at once
    would stand still. ``agent_binds`` are directories of the host that agents' sandboxes see read-only, as in
    ``SandboxSpec.ro_binds``, and those that grade do not.
    """

    backend: SandboxBackend
    limits: SandboxSpec = field(default_factory=SandboxSpec)
    scaffold: Scaffold = AGENT_RL
    tool_style: ToolStyle = "full"
    tool_timeout: float = 90.0
    grade_timeout: float = 300.0
    start_retries: int = 2
    agent_binds: Mapping[str, str] = field(default_factory=dict)
    pairs: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))

    def for_agent(self, spec: SandboxSpec) -> SandboxSpec:
        """``spec`` as an agent's sandbox has it."""
        return replace(spec, ro_binds={**spec.ro_binds, **self.agent_binds}) if self.agent_binds else spec

    def without_agent(self, spec: SandboxSpec) -> SandboxSpec:
        """``spec`` of an agent's sandbox as other sandboxes of its task have it."""
        kept = {place: inside for place, inside in spec.ro_binds.items() if place not in self.agent_binds}
        return replace(spec, ro_binds=kept) if self.agent_binds else spec

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A started sandbox, closed on leaving, also when cancelled. Raises ``SandboxError`` once the retries are
        spent."""
        sandbox = await self._start(spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(SandboxStartError),
            stop=stop_after_attempt(self.start_retries + 1),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            reraise=True,
        )
        return await attempts(self.backend.start, spec)
