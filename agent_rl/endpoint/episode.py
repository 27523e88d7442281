"""One episode driven by an agent program over the endpoint.

The program runs beside its session, and the episode ends when the program exits::

    submitted through the sandbox API, or exit code 0        submitted
    a limit had ended the session before                     max_turns
    it ended after the context was full                      context_full
    rollout.time_limit passed                                time_limit
    the engine or the sandbox failed                         as in the built-in loop
    it ended before any reply reached it                     harness_failure: infrastructure, run again
    it ended in another way                                  program_failed: graded

After a program has received a reply it executes what the policy wrote, which may end it by a signal, any exit code or a
full disk. Running such an episode again would let a policy discard attempts that it expects to lose.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_rl.config import HarnessConfig
from agent_rl.endpoint.server import BRIDGE, MODEL, SOCKET, EndpointServer
from agent_rl.endpoint.session import ExtendingRenderer, HarnessRenderer, Session
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.types import Engine
from agent_rl.errors import HarnessError
from agent_rl.rollout.episode import EpisodeRules, EpisodeRun
from agent_rl.types import StopReason, Trajectory
from envs import Dialogue, Environment, Episode, Grade, HasSandbox, Task, user_of
from sandbox import ExecResult, Sandbox, SandboxBackend, bounded, printable
from sandbox.pool import PooledSandbox
from sandbox.process import run_process
from sandbox.ray.backend import ClusterBackend
from sandbox.timeouts import PausableTimeout
from tools import ToolCallFormat, ToolSet

SANDBOX_ENDPOINT = "/opt/agent-rl/endpoint"
SANDBOX_HARNESS = "/opt/agent-rl/harness"
SANDBOX_PORT = 8377
_OUTPUT_CHARS = 600
_MAX_PROGRAM_SECONDS = 30 * 86400.0
"""Limit of the sandbox call. ``rollout.time_limit`` ends the program earlier, and pauses while weights change."""
_HOST_OUTPUT_BYTES = 1 << 20
_WATCHED = """(read -r -u "$0"; kill -KILL 0) < /dev/null > /dev/null 2>&1 & exec bash -c "$1\""""
"""Kills the program's process group once no process holds the write end of pipe ``$0``."""


def agent_binds(endpoint: EndpointServer, harness: HarnessConfig) -> dict[str, str]:
    """Host directories that are mounted in the agents' sandboxes, so that programs there reach the endpoint."""
    if harness.location == "host":
        return {}
    mounts = {} if harness.directory is None else {str(harness.directory.resolve()): SANDBOX_HARNESS}
    return {str(endpoint.directory): SANDBOX_ENDPOINT, **mounts}


async def relay_endpoint(endpoint: EndpointServer, backend: SandboxBackend) -> None:
    """Make the endpoint reachable from sandboxes on other nodes."""
    if endpoint.remote is not None and isinstance(backend, ClusterBackend):
        await backend.relay(str(endpoint.directory / SOCKET), str(endpoint.directory / BRIDGE), *endpoint.remote)


class HarnessRun(EpisodeRun):
    """One running episode, driven by the program of ``rules.rollout.harness``. ``context``: maximum tokens of a
    conversation that the engine accepts."""

    def __init__(
        self,
        endpoint: EndpointServer,
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
        self.endpoint, self.harness = endpoint, rules.rollout.harness
        rendering = HarnessRenderer.from_config(renderer, fmt, self.limits)
        self.endpoint_session = Session(self.session, engine, rendering, rules, min(context, self.limits.max_tokens))
        self.sandbox: Sandbox | None = None
        self.failed: HarnessError | None = None

    def _open(self, episode: Episode | Dialogue, target: ToolSet | Dialogue) -> None:
        """Nothing is rendered before the program's first request."""
        self.endpoint_session.messages = episode.messages
        if user_of(episode):
            raise HarnessError(f"environment {self.env.name} has a user beside its tools: omit rollout.harness")
        if self.harness.location == "host":
            self.endpoint_session.tools = None if isinstance(target, Dialogue) else target
        elif isinstance(episode, HasSandbox):
            self.sandbox = episode.sandbox
        else:
            raise HarnessError(f"environment {self.env.name} has no sandbox: set rollout.harness.location to host")

    async def _act(self, target: ToolSet | Dialogue) -> StopReason:
        stop = await self._run_program()
        if isinstance(target, Dialogue) and (turns := self.endpoint_session.turns()):
            async with bounded(self.limits.time_limit, "handling the program's last reply"):
                await target.respond(turns[-1].text)
        return stop

    async def _run_program(self) -> StopReason:
        """Run the program until it exits or the episode ends."""
        async with self.endpoint.serving(self.endpoint_session):
            program = asyncio.ensure_future(
                self._in_sandbox(self.sandbox) if self.sandbox is not None else self._on_host()
            )
            try:
                await self._wait_first({program, self.endpoint_session.broken})
            finally:
                failed = self.endpoint_session.broken.done()
                if not program.done():
                    program.cancel()
                    await asyncio.wait({program})
            if failed:
                self.endpoint_session.broken.result()
            return StopReason.TIME_LIMIT if program.cancelled() else self._ending(program.result())

    async def _wait_first(self, ends: set[asyncio.Future[Any]]) -> None:
        """Wait for the first of ``ends``, or for the episode's time limit."""
        limit = PausableTimeout(self.limits.time_limit)
        try:
            async with limit:
                with self.gate.uncharged(limit):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            if not limit.expired():
                raise

    def _ending(self, result: ExecResult) -> StopReason:
        endpoint_session = self.endpoint_session
        if endpoint_session.ended is not None:
            return endpoint_session.ended
        if endpoint_session.context_full:
            return StopReason.CONTEXT_FULL
        if not any(node.delivered for node in endpoint_session.tree.nodes):
            raise HarnessError(f"the program ended before a reply reached it ({_describe_exit(result)})")
        if result.exit_code == 0:
            return StopReason.SUBMITTED
        self.failed = HarnessError(f"the program failed ({_describe_exit(result)})")
        return StopReason.PROGRAM_FAILED

    async def _in_sandbox(self, sandbox: Sandbox) -> ExecResult:
        bridge = ["python3", f"{SANDBOX_ENDPOINT}/{BRIDGE}", f"{SANDBOX_ENDPOINT}/{SOCKET}", str(SANDBOX_PORT)]
        argv = [*bridge, "bash", "-c", self.harness.command]
        run = sandbox.exec_without_slot if isinstance(sandbox, PooledSandbox) else sandbox.exec
        return await run(argv, timeout=_MAX_PROGRAM_SECONDS, env=self._env(SANDBOX_PORT), stdin=self._prompt())

    async def _on_host(self) -> ExecResult:
        directory = self.endpoint.directory
        with tempfile.TemporaryDirectory(prefix="home-", dir=directory, ignore_cleanup_errors=True) as home:
            env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8"}
            return await run_on_host(self.harness.command, {**env, **self._env(self.endpoint.port)}, self._prompt())

    def _env(self, port: int) -> dict[str, str]:
        return {**environment(self.endpoint_session, port), "PYTHONDONTWRITEBYTECODE": "1", **self.harness.env}

    def _prompt(self) -> bytes:
        """The task as the user states it."""
        texts = [message["content"] for message in self.endpoint_session.messages if message["role"] == "user"]
        return "\n\n".join(texts).encode(errors="replace")

    def _trajectory(self, stop: StopReason, grade: Grade | None, error: Exception | None = None) -> Trajectory:
        self.endpoint.failures += stop in (StopReason.HARNESS_FAILURE, StopReason.PROGRAM_FAILED)
        return with_conversation(super()._trajectory(stop, grade, error or self.failed), self.endpoint_session)


def with_conversation(plain: Trajectory, session: Session) -> Trajectory:
    """``plain`` with the turns, messages and branches of ``session``."""
    session.apply_training_rules()
    plain = replace(plain, turns=session.turns(), messages=session.spoken_messages(), harness=session.counts())
    branches = session.tree.branches()
    if not branches:
        return plain
    first, *further = branches
    return replace(
        plain,
        tokens=first.tokens,
        loss_mask=first.loss_mask,
        logprobs=first.logprobs,
        routing=first.routing,
        kept=first.kept,
        versions=first.versions,
        further=tuple(further),
    )


async def run_on_host(command: str, env: Mapping[str, str], stdin: bytes) -> ExecResult:
    """Run a shell ``command`` on this machine with only the environment ``env``. Returns after all its processes have
    ended; they are killed when the calling process ends, however that ends."""
    read_end, write_end = os.pipe()
    try:
        done = await run_process(
            ["bash", "-c", _WATCHED, str(read_end), command],
            timeout=_MAX_PROGRAM_SECONDS,
            limit=_HOST_OUTPUT_BYTES,
            stdin=stdin,
            pass_fds=(read_end,),
            env=env,
        )
    finally:
        os.close(write_end)
        os.close(read_end)
    return ExecResult(done.returncode, done.stdout, done.stderr, done.seconds, done.timed_out, done.truncated)


def environment(session: Session, port: int) -> dict[str, str]:
    """The environment variables by which common clients find ``session`` on ``port`` of loopback."""
    base = f"http://127.0.0.1:{port}/s/{session.key}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.key,
        "AGENT_RL_URL": base,
        "AGENT_RL_MODEL": MODEL,
        "AGENT_RL_CONTEXT_WINDOW": str(session.context),
        "AGENT_RL_MAX_OUTPUT_TOKENS": str(session.max_output_tokens),
        "NO_PROXY": "127.0.0.1",
    }


def _describe_exit(result: ExecResult) -> str:
    """How the program ended, in one line."""
    output = " ".join(
        printable(result.stderr.decode(errors="replace") or result.stdout.decode(errors="replace")).split()
    )
    killed = ", out of memory" if result.oom_killed else ""
    return f"exit code {result.exit_code}{killed}: {output[-_OUTPUT_CHARS:] or 'it printed nothing'}"
