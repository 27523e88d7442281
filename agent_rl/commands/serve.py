"""``agent-rl serve``: the harness endpoint by itself, to try an agent program on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.endpoint.episode import environment
from agent_rl.endpoint.server import Gateway, open_gateway
from agent_rl.endpoint.session import HarnessRenderer, Session
from agent_rl.engine.types import Engine
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules

_ENDLESS = 1 << 30


async def run_serve(config: RunConfig, *, port: int) -> None:
    """Serve the config's model on ``port`` of loopback (0: a free one) until interrupted, and print the environment
    that a program needs. Nothing is trained or kept."""
    display, facts = Display(f"serve {config.name}"), preflight.check(config)
    logs = config.runs_dir / f"{config.name}-serve" / "logs"
    with display:
        async with (
            open_gateway(port=port) as gateway,
            open_rollout_runtime(config, facts, logs, display, routes=False) as runtime,
        ):
            runtime.renderer.check_tails()
            rendering = HarnessRenderer.of(runtime.renderer, runtime.format, config.rollout)
            async with served(gateway, runtime.engine, rendering, config, facts.max_positions) as session:
                for name, value in environment(session.key, gateway.port).items():
                    display.note(f"export {name}={value}")
                display.stage("serving, until it is interrupted")
                await asyncio.Event().wait()


@asynccontextmanager
async def served(
    gateway: Gateway, engine: Engine, rendering: HarnessRenderer, config: RunConfig, context: int
) -> AsyncIterator[Session]:
    """A session without an episode: replies without number, of conversations of at most ``context`` tokens."""
    rules = replace(EpisodeRules.of(config).limited(max_turns=_ENDLESS), routes=None)
    most = min(context, config.rollout.max_tokens)
    async with gateway.serving(Session("serve", engine, rendering, rules, most)) as session:
        yield session
