"""Episodes of a task that begin together send one request first, so that an engine computes their prompt once.

Engines keep the state of a hybrid model, and the keys of windows, where a request ended and not at each of its tokens.
Eight requests at once would therefore compute the same prompt eight times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agent_rl.engine.grammars import convert
from agent_rl.engine.types import Engine
from agent_rl.types import Completion, SamplingParams, TokenIds

WAIT_SECONDS = 120.0
"""Maximum wait for the first request. It counts towards ``rollout.time_limit``."""


@dataclass(slots=True)
class _Prompt:
    """A task with ``episodes`` running. ``led``: one of them sent the first request; ``ended``: it has a response or
    failed."""

    episodes: int = 0
    led: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SharedPrompts:
    """Gives each episode an engine whose first request waits for that of another episode of its task."""

    def __init__(self, engine: Engine, wait_seconds: float = WAIT_SECONDS) -> None:
        self.engine, self.wait_seconds = engine, wait_seconds
        self._prompts: dict[str, _Prompt] = {}

    @contextmanager
    def episode(self, task_id: str) -> Iterator[Engine]:
        """The engine of one episode of ``task_id``, which runs within the block."""
        prompt = self._prompts.setdefault(task_id, _Prompt())
        prompt.episodes += 1
        try:
            yield _EpisodeEngine(self, prompt)
        finally:
            prompt.episodes -= 1
            if not prompt.episodes:
                del self._prompts[task_id]


class _EpisodeEngine:
    """See :class:`SharedPrompts`."""

    def __init__(self, shared: SharedPrompts, prompt: _Prompt) -> None:
        self._shared, self._prompt = shared, prompt

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """See :meth:`agent_rl.engine.types.Engine.generate`."""
        prompt, generate = self._prompt, self._shared.engine.generate
        if prompt.led:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._shared.wait_seconds):
                    await prompt.ended.wait()
            return await generate(tokens, sampling, routes_from=routes_from, session=session)
        prompt.led = True
        try:
            return await generate(tokens, sampling, routes_from=routes_from, session=session)
        finally:
            prompt.ended.set()

    async def grammar(self, form: Mapping[str, Any]) -> str:
        """See :meth:`agent_rl.engine.types.Constraining.grammar`."""
        return await convert(self._shared.engine, form)
