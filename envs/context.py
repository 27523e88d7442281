"""The context of every environment: the sandbox backend, the scaffold and the limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from envs.scaffold import Scaffold
from envs.scaffolds.default import AGENT_RL
from sandbox import Sandbox, SandboxBackend, SandboxError, SandboxSpec, SandboxStartError
from tools import Style as ToolStyle

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvContext:
    """The first argument of every environment's constructor: ``Env(context, **options)``.

    ``limits`` is the template of every sandbox: memory, processes, CPUs, output limit, and the image of tasks that name
    none. ``scaffold`` has the prompts and tools, unless the environment has its own. ``tool_style`` "concise" shortens
    the initial messages, tool schemas and tool results for models with a short context (scaffold ``agent-rl`` only).
    ``tool_timeout`` (a tool call) and ``grade_timeout`` (one run of the hidden tests) are in seconds. ``start_retries``
    is the number of further attempts to start a sandbox. ``agent_binds`` are host directories that are mounted
    read-only into agents' sandboxes, as in ``SandboxSpec.ro_binds``, but not into grading sandboxes.
    """

    backend: SandboxBackend
    limits: SandboxSpec = field(default_factory=SandboxSpec)
    scaffold: Scaffold = AGENT_RL
    tool_style: ToolStyle = "full"
    tool_timeout: float = 90.0
    grade_timeout: float = 300.0
    start_retries: int = 2
    agent_binds: Mapping[str, str] = field(default_factory=dict)

    def for_agent(self, spec: SandboxSpec) -> SandboxSpec:
        """``spec`` for an agent's sandbox: with ``agent_binds``."""
        return replace(spec, ro_binds={**spec.ro_binds, **self.agent_binds}) if self.agent_binds else spec

    def without_agent(self, spec: SandboxSpec) -> SandboxSpec:
        """The ``spec`` of an agent's sandbox for other sandboxes of its task: without ``agent_binds``."""
        ro_binds = {host: inside for host, inside in spec.ro_binds.items() if host not in self.agent_binds}
        return replace(spec, ro_binds=ro_binds) if self.agent_binds else spec

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A started sandbox, closed on exit, also on cancellation. Raises ``SandboxError`` after the last retry."""
        sandbox = await self._start(spec)
        try:
            yield sandbox
        finally:
            try:
                await sandbox.close()
            except SandboxError as error:  # what the block did is final; the reaper removes what is left
                _log.warning("sandbox %s could not be closed: %s", sandbox.id, error)

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(SandboxStartError),
            stop=stop_after_attempt(self.start_retries + 1),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            reraise=True,
        )
        return await attempts(self.backend.start, spec)
