"""``agent-rl serve``: the endpoint for agent programs without a run, to try a program before it is trained.

::

    config's model, launched ─┐
    --upstream URL, no model ─┴─▶ endpoint ─▶ conversation tree ── --record DIR ─▶ trajectories/, for view and show
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from agent_rl.config import RunConfig
from agent_rl.controller import preflight
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.controller.run_state import keep_tokenizer
from agent_rl.endpoint.episode import environment, with_conversation
from agent_rl.endpoint.server import serve_endpoint
from agent_rl.endpoint.session import HarnessRenderer, Session
from agent_rl.engine.types import Engine
from agent_rl.errors import UserError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.chat_tokens import ChatTextRenderer, NativeToolCalls
from agent_rl.rollout.conversation_tree import ChatMessage, Node
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.metrics import harness_metrics
from agent_rl.rollout.openai_policy import BYTES_A_TOKEN, ChatEndpoint, ChatEngine
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import Group, StopReason, Trajectory
from agent_rl.utils.directory_lock import lock_directory

_ENDLESS = 1 << 30
_RECORD_SECONDS = 0.5
_EXCERPT = 60


def upstream_endpoint(url: str | None, model: str | None) -> ChatEndpoint | None:
    """The chat endpoint of ``--upstream``. Raises UserError if only one of its options is given."""
    if (url is None) != (model is None):
        raise UserError(
            "--upstream and --model go together: the address of a chat endpoint, and a model that it serves"
        )
    return ChatEndpoint(url, model, native_tools=True) if url and model else None


async def run_serve(config: RunConfig, *, port: int, record: Path | None, upstream: ChatEndpoint | None) -> None:
    """Serve the config's model, or the one at ``upstream``, on ``port`` of loopback (0: a free one) until interrupted.
    Prints the environment variables that a program needs. ``record``: directory of the trajectory so far."""
    display = Display(f"serve {config.name}")
    opening = _own_model(config, display) if upstream is None else _upstream(config, upstream)
    with display:
        async with serve_endpoint(port=port) as endpoint, opening as session, endpoint.serving(session):
            for name, value in environment(session, endpoint.port).items():
                display.note(f"export {name}={value}")
            display.stage("serving, until it is interrupted")
            if record is None:
                await asyncio.Event().wait()
            else:
                with lock_directory(record):
                    if upstream is None:
                        keep_tokenizer(config.model, record)
                    await _record(session, record, display)


@asynccontextmanager
async def _own_model(config: RunConfig, display: Display) -> AsyncIterator[Session]:
    checked = preflight.run(config)
    logs = config.runs_dir / f"{config.name}-serve" / "logs"
    async with open_rollout_runtime(checked, logs, display, routes=False) as runtime:
        runtime.renderer.check_tails()
        rendering = HarnessRenderer.from_config(runtime.renderer, runtime.format, config.rollout)
        context = min(checked.model_spec.max_positions, config.rollout.max_tokens)
        yield _session(runtime.engine, rendering, EpisodeRules.from_config(config), context)


@asynccontextmanager
async def _upstream(config: RunConfig, upstream: ChatEndpoint) -> AsyncIterator[Session]:
    """A session whose tokens are bytes, as in an evaluation of a chat endpoint."""
    async with ChatEngine(upstream, timeout=config.engine.request_timeout, retries=config.engine.retries) as engine:
        await engine.check_ready()
        rendering = HarnessRenderer(ChatTextRenderer(native_tools=True), NativeToolCalls(), describe_tools=True)
        limits = {key: getattr(config.rollout, key) * BYTES_A_TOKEN for key in ("max_tokens", "max_new_tokens")}
        rules = EpisodeRules.from_config(config).override(**limits, max_thinking_tokens=None)
        yield _session(engine, rendering, rules, rules.rollout.max_tokens, resumable=False)


def _session(
    engine: Engine, rendering: HarnessRenderer, rules: EpisodeRules, context: int, *, resumable: bool = True
) -> Session:
    """A session without an episode: any number of replies, in conversations of at most ``context`` tokens."""
    endless = replace(rules.override(max_turns=_ENDLESS), routes=None, masks=False)
    return Session("serve", engine, rendering, endless, context, resumable=resumable)


async def _record(session: Session, directory: Path, display: Display) -> None:
    """Write the trajectory after each reply, and print its branches and the replies that came back changed."""
    recorded = reported = 0
    while True:
        await asyncio.sleep(_RECORD_SECONDS)
        turns = len(session.turns())
        if turns == recorded:
            continue
        recorded, trajectory = turns, _trajectory(session)
        await asyncio.to_thread(write_trajectories, directory, 0, [Group("serve", (trajectory,))])
        metrics = harness_metrics([trajectory])
        display.note(f"{turns} replies: " + ", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
        for node, message in itertools.islice(session.tree.differing, reported, None):
            display.note(f"reply {node.number + 1} came back changed: {_describe_change(node, message)}")
        reported = len(session.tree.differing)


def _trajectory(session: Session) -> Trajectory:
    tokens, mask, logprobs = np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32)
    plain = Trajectory(
        "serve", "serve", tokens, mask, logprobs, None, StopReason.CANCELLED, None, False, (), (), ()
    )  # fmt: skip
    return with_conversation(plain, session)


def _describe_change(node: Node, message: ChatMessage) -> str:
    """The first place where ``message`` differs from the reply ``node`` that it seems to repeat."""
    assert node.spoken is not None
    for name in ("text", "reasoning", "calls"):
        said, returned = (str(getattr(each, name)).strip() for each in (node.spoken, message))
        if said != returned:
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, returned, strict=False))
            at = max(0, sum(1 for _ in equal) - _EXCERPT // 2)
            return f"{name} {said[at : at + _EXCERPT]!r} as {returned[at : at + _EXCERPT]!r}"
    return "the identifier names another reply"
