"""One episode driven by an agent program over the endpoint.

The program is started beside its session and ends the episode by ending itself::

    it submitted by the sandbox API, or ended with 0         submitted
    a limit had ended the session before                 max_turns
    it ended after it was told that the context is full  context_full
    rollout.time_limit passed                            time_limit
    the engine or the sandbox failed                         as in the built-in loop
    it ended before any reply had reached it             harness_failure: infrastructure, run again
    it ended otherwise                                   program_failed: graded

A program that has a reply runs what the policy wrote, which may end the program by a signal, an exit code of its choice
or a full disk. Were such an episode run again, a policy could take back every attempt that it expects to lose.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import replace
from typing import Any

from agent_rl.config import HarnessConfig
from agent_rl.endpoint.host_process import LONGEST, run_on_host
from agent_rl.endpoint.server import BRIDGE, MODEL, SOCKET, Gateway
from agent_rl.endpoint.session import ExtendingRenderer, HarnessRenderer, Session
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.types import Engine
from agent_rl.errors import HarnessError
from agent_rl.rollout.episode import EpisodeRules, EpisodeRun
from agent_rl.types import StopReason, Trajectory
from envs import Dialogue, Environment, Episode, Grade, HasSandbox, Task
from sandbox import ExecResult, Sandbox, bounded, printable
from sandbox.pool import PooledSandbox
from sandbox.timeouts import PausableTimeout
from tools import ToolCallFormat, ToolSet

SANDBOX_GATEWAY = "/opt/agent-rl/gateway"
SANDBOX_HARNESS = "/opt/agent-rl/harness"
SANDBOX_PORT = 8377
_OUTPUT_SHOWN = 600


def agent_binds(gateway: Gateway, harness: HarnessConfig) -> dict[str, str]:
    """What the agents' sandboxes see of the host, so that a program in them reaches the endpoint."""
    if harness.location == "host":
        return {}
    own = {} if harness.directory is None else {str(harness.directory.resolve()): SANDBOX_HARNESS}
    return {str(gateway.directory): SANDBOX_GATEWAY, **own}


class HarnessRun(EpisodeRun):
    """One running episode, driven by the program of ``rules.rollout.harness``. ``context``: the most tokens that the
    engine takes of one conversation."""

    def __init__(
        self,
        gateway: Gateway,
        context: int,
        env: Environment,
        task: Task,
        engine: Engine,
        renderer: ExtendingRenderer,
        fmt: ToolCallFormat,
        rules: EpisodeRules,
        gate: GenerationGate | None = None,
    ) -> None:
        super().__init__(env, task, engine, renderer, fmt, rules, gate)
        assert rules.rollout.harness is not None
        self.gateway, self.harness = gateway, rules.rollout.harness
        rendering = HarnessRenderer.of(renderer, fmt, self.limits)
        self.served = Session(self.session, engine, rendering, rules, min(context, self.limits.max_tokens))
        self.sandbox: Sandbox | None = None
        self.failed: HarnessError | None = None

    def _open(self, episode: Episode, tools: ToolSet) -> None:
        """Nothing is rendered before the program asks."""
        self.served.messages = episode.messages
        if self.harness.location == "host":
            self.served.tools = tools
        elif isinstance(episode, HasSandbox):
            self.sandbox = episode.sandbox
        else:
            raise HarnessError(
                f"environment {self.env.name} has no sandbox for rollout.harness.location sandbox: set location to host"
            )

    async def _act(self, partner: ToolSet | Dialogue) -> StopReason:
        stop = await self._driven()
        if isinstance(partner, Dialogue) and (turns := self.served.turns()):
            async with bounded(self.limits.time_limit, "hearing the program's last reply"):
                await partner.hear(turns[-1].text)
        return stop

    async def _driven(self) -> StopReason:
        """Run the program to its end, or to the episode's."""
        async with self.gateway.serving(self.served):
            program = asyncio.ensure_future(
                self._in_sandbox(self.sandbox) if self.sandbox is not None else self._on_host()
            )
            try:
                await self._until_either({program, self.served.broken})
            finally:
                broke = self.served.broken.done()
                if not program.done():
                    program.cancel()
                    await asyncio.wait({program})
            if broke:
                self.served.broken.result()
            return StopReason.TIME_LIMIT if program.cancelled() else self._ending(program.result())

    async def _until_either(self, ends: set[asyncio.Future[Any]]) -> None:
        """Wait for the first of ``ends``, or until the episode's time is over."""
        limit = PausableTimeout(self.limits.time_limit)
        try:
            async with limit:
                with self.gate.uncharged(limit):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            if not limit.expired():
                raise

    def _ending(self, result: ExecResult) -> StopReason:
        served = self.served
        if served.ended is not None:
            return served.ended
        if served.context_full:
            return StopReason.CONTEXT_FULL
        if not any(node.delivered for node in served.forest.nodes):
            raise HarnessError(f"the program ended before a reply reached it ({_account(result)})")
        if result.exit_code == 0:
            return StopReason.SUBMITTED
        self.failed = HarnessError(f"the program failed ({_account(result)})")
        return StopReason.PROGRAM_FAILED

    async def _in_sandbox(self, sandbox: Sandbox) -> ExecResult:
        bridge = ["python3", f"{SANDBOX_GATEWAY}/{BRIDGE}", f"{SANDBOX_GATEWAY}/{SOCKET}", str(SANDBOX_PORT)]
        argv = [*bridge, "bash", "-c", self.harness.command]
        run = sandbox.exec_beside if isinstance(sandbox, PooledSandbox) else sandbox.exec
        return await run(argv, timeout=LONGEST, env=self._env(SANDBOX_PORT), stdin=self._prompt())

    async def _on_host(self) -> ExecResult:
        directory = self.gateway.directory
        with tempfile.TemporaryDirectory(prefix="home-", dir=directory, ignore_cleanup_errors=True) as home:
            env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8"}
            return await run_on_host(self.harness.command, {**env, **self._env(self.gateway.port)}, self._prompt())

    def _env(self, port: int) -> dict[str, str]:
        return {**environment(self.served.key, port), "PYTHONDONTWRITEBYTECODE": "1", **self.harness.env}

    def _prompt(self) -> bytes:
        """The task as its user would put it."""
        texts = [message["content"] for message in self.served.messages if message["role"] == "user"]
        return "\n\n".join(texts).encode(errors="replace")

    def _trajectory(self, stop: StopReason, grade: Grade | None, error: Exception | None = None) -> Trajectory:
        served = self.served
        self.gateway.failures += stop in (StopReason.HARNESS_FAILURE, StopReason.PROGRAM_FAILED)
        plain = super()._trajectory(stop, grade, error or self.failed)
        plain = replace(plain, turns=served.turns(), messages=served.spoken_messages(), harness=served.counts())
        branches = served.forest.branches()
        if not branches:
            return plain
        first, *further = branches
        return replace(
            plain,
            tokens=first.tokens,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            routing=first.routing,
            versions=first.versions,
            further=tuple(further),
        )


def environment(key: str, port: int) -> dict[str, str]:
    """The variables by which the usual clients find the session of ``key`` on ``port`` of loopback."""
    base = f"http://127.0.0.1:{port}/s/{key}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "AGENT_RL_URL": base,
        "AGENT_RL_MODEL": MODEL,
        "NO_PROXY": "127.0.0.1",
    }


def _account(result: ExecResult) -> str:
    """How the program ended, in a line."""
    said = " ".join(printable(result.stderr.decode(errors="replace") or result.stdout.decode(errors="replace")).split())
    killed = ", out of memory" if result.oom_killed else ""
    return f"exit code {result.exit_code}{killed}: {said[-_OUTPUT_SHOWN:] or 'it printed nothing'}"
