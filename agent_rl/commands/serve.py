"""``agent-rl serve``: the harness endpoint without a run, to try an agent program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agent_rl.config import RunConfig
from agent_rl.controller.preflight import Checked
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.endpoint.episode import environment
from agent_rl.endpoint.server import EndpointServer, serve_endpoint
from agent_rl.endpoint.session import HarnessRenderer, Session
from agent_rl.engine.types import Engine
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules

_ENDLESS = 1 << 30


async def run_serve(checked: Checked, *, port: int) -> None:
    """Serve the config's model on ``port`` of loopback (0: a free one) until interrupted, and print the environment
    variables that a program needs. Nothing is trained or kept."""
    config, display = checked.config, Display(f"serve {checked.config.name}")
    logs = config.runs_dir / f"{config.name}-serve" / "logs"
    with display:
        async with (
            serve_endpoint(port=port) as endpoint,
            open_rollout_runtime(checked, logs, display, routes=False) as runtime,
        ):
            runtime.renderer.check_tails()
            rendering = HarnessRenderer.from_config(runtime.renderer, runtime.format, config.rollout)
            async with served(endpoint, runtime.engine, rendering, config, checked.model_spec.max_positions) as session:
                for name, value in environment(session, endpoint.port).items():
                    display.note(f"export {name}={value}")
                display.stage("serving, until it is interrupted")
                await asyncio.Event().wait()


@asynccontextmanager
async def served(
    endpoint: EndpointServer, engine: Engine, rendering: HarnessRenderer, config: RunConfig, context: int
) -> AsyncIterator[Session]:
    """A session without an episode: any number of replies, in conversations of at most ``context`` tokens."""
    rules = replace(EpisodeRules.from_config(config).override(max_turns=_ENDLESS), routes=None)
    max_tokens = min(context, config.rollout.max_tokens)
    async with endpoint.serving(Session("serve", engine, rendering, rules, max_tokens)) as session:
        yield session
