"""``agent-rl r3 probe``: send requests to a server and check that its routes can be replayed.

Wrong routes train the wrong experts without an error: a server without capture, a router that strips the key, an
ignored start, or rows that are stale, shifted or of another request. The probe sends about forty short requests with
random prompts that no cache contains, some of them as concurrent conversations, and compares their responses
(:mod:`agent_rl.engine.route_probe.checks`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.table import Table

from agent_rl.engine.route_probe.checks import CAPTURE, KEY, Check, CheckStatus, ProbeResponses, check_all
from agent_rl.engine.route_probe.conversations import MOST, PER_RANK, converse
from agent_rl.engine.route_probe.requests import ProbeClient, RawResponse, ServerOptions
from agent_rl.errors import ConfigError, EngineUnreachable
from agent_rl.models.spec import ModelSpec, read_moe_spec
from agent_rl.monitoring.console import cell

PROMPT = 160
"""Tokens of a prompt: more than two cache pages of 64 tokens. At most a quarter of the model's context is used."""
COMPLETION = 8
LONG = 1024
"""Tokens of the request that the probe aborts as soon as it runs."""
RETRACTED = (32, 256)
"""Tokens of the request that the server retracts. The second is tried if the first ended before its retraction."""
VARIANTS = 8
CHUNK = 16384
"""Maximum chunk of a server's prefill for which the probe makes a conversation cross it."""
REQUEST_SECONDS = 60.0
PROBE_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The checks of the server at ``url``, with the number of requests and the time in seconds."""

    url: str
    checks: tuple[Check, ...]
    requests: int
    seconds: float

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is CheckStatus.FAILED)

    def spoils(self, *, missing_allowed: bool) -> tuple[Check, ...]:
        """The failed checks that make training on these routes wrong. ``missing_allowed`` (``r3.missing``) accepts
        responses without routes if other responses have them."""
        some = any(check.name == CAPTURE and check.status is CheckStatus.OK for check in self.checks)
        return tuple(check for check in self.failed if not (missing_allowed and some and check.name == KEY))

    def line(self) -> str:
        """The report in one line."""
        ok = sum(check.status is CheckStatus.OK for check in self.checks)
        skipped = [check.name for check in self.checks if check.status is CheckStatus.SKIPPED]
        parts = [f"{ok} checks passed"]
        if self.failed:
            parts.append(f"{len(self.failed)} failed ({'; '.join(f'{c.name}: {c.finding}' for c in self.failed)})")
        if skipped:
            parts.append(f"{len(skipped)} not made ({', '.join(skipped)})")
        return f"{', '.join(parts)}; {self.requests} requests, {self.seconds:.1f} s"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.failed}


def table(report: ProbeReport) -> Table:
    """The report as a table: check, status, finding, advice."""
    shown = Table(title=f"routes of {report.url}", title_justify="left")
    for column in ("check", "status", "finding", "advice"):
        shown.add_column(column)
    colours = {CheckStatus.OK: "green", CheckStatus.FAILED: "red", CheckStatus.SKIPPED: "yellow"}
    for check in report.checks:
        status = f"[{colours[check.status]}]{check.status}[/]"
        shown.add_row(check.name, status, cell(check.finding), cell(check.advice))
    return shown


async def probe(
    url: str, model_spec: ModelSpec | None = None, *, retract: bool = False, headers: Mapping[str, str] | None = None
) -> ProbeReport:
    """Probe the server at ``url``, which serves the model of ``model_spec`` (default: read from the server's model
    directory).

    Every request has ``headers``. ``retract`` makes the server retract all of its running requests once. Use it only
    for an engine that nobody else uses: it resumes the engine, which would break a weight update of another client.

    Raises EngineUnreachable if the server does not respond in time, another EngineError if it refuses a request,
    ConfigError if the model's config.json cannot be found.
    """
    started = perf_counter()
    client = ProbeClient(url, timeout=REQUEST_SECONDS, headers=headers)
    try:
        async with asyncio.timeout(PROBE_SECONDS), client as server:
            spec = model_spec or _read_spec(server.url, await server.model_path())
            responses = await _ProbeRequests(server, spec, retract).send()
            checks = check_all(responses, spec)
            return ProbeReport(server.url, checks, server.requests, perf_counter() - started)
    except TimeoutError:
        raise EngineUnreachable(f"{url}: the probe did not finish within {PROBE_SECONDS:g} s") from None


def _read_spec(url: str, directory: str) -> ModelSpec:
    if not directory or not Path(directory).is_dir():
        raise ConfigError(
            f"{url} serves {directory or 'a model without a name'}, which is not a directory of this machine: "
            "set --model to a directory with the model's config.json"
        )
    return read_moe_spec(Path(directory))


class _ProbeRequests:
    """The requests of one probe."""

    def __init__(self, server: ProbeClient, model_spec: ModelSpec, retract: bool) -> None:
        self._server, self._spec, self._may_retract = server, model_spec, retract
        self._rng = np.random.default_rng()
        self._length = min(PROMPT, model_spec.max_positions // 4)

    async def send(self) -> ProbeResponses:
        """Send all requests, one after the other except for the two siblings and the conversations."""
        options = await self._server.query_info()
        busy = await self._server.count_other_requests()
        prompt = self._tokens(self._length)
        cold = await self._generate(prompt)
        cached = await self._generate(prompt, new_tokens=1)
        offsets = np.linspace(self._length // 4, self._length * 3 // 4, VARIANTS).astype(int).tolist()
        variants = [await self._generate(self._changed(prompt, offset), new_tokens=1) for offset in offsets]
        siblings, repeats = await self._siblings()
        lengths = self._conversation_lengths(options)
        conversations = await converse(self._generate, self._tokens, lengths, options.dp_ranks)
        retracted, untried = await self._retract(busy)
        return ProbeResponses(
            captures=options.captures,
            cold=cold,
            cached=cached,
            late=await self._generate(prompt, start=self._length // 2, new_tokens=1),
            variants=tuple(variants),
            changed_at=tuple(offsets),
            stopped=await self._generate(prompt, stop=_late_token(cold.tokens)),
            siblings=siblings,
            repeats=repeats,
            conversations=conversations,
            aborted=await self._interrupted(LONG, self._server.abort),
            retracted=retracted,
            untried=untried,
        )

    async def _siblings(self) -> tuple[tuple[RawResponse, ...], tuple[RawResponse, ...]]:
        prompt = self._tokens(self._length)
        siblings = await asyncio.gather(*(self._generate(prompt, temperature=1.0) for _ in range(2)))
        repeats = [
            await self._generate([*prompt, *sibling.tokens], start=len(prompt) - 1, new_tokens=1)
            for sibling in siblings
        ]
        return tuple(siblings), tuple(repeats)

    def _conversation_lengths(self, options: ServerOptions) -> list[int]:
        """Tokens of each conversation's first prompt. The last one ends just before the server's chunk, if the model's
        context and the server's cache have room, so that its second pass is computed in two chunks."""
        lengths = [self._length] * min(MOST, max(4, PER_RANK * options.dp_ranks))
        if self._length < options.chunk <= min(CHUNK, self._spec.max_positions // 2, options.cache // 2):
            lengths[-1] = options.chunk - 1
        return lengths

    async def _retract(self, busy: int | None) -> tuple[RawResponse | None, str]:
        """A retraction affects all requests, so the probe skips it while other clients have requests running."""
        if not self._may_retract:
            return None, "not requested"
        if busy is None:
            return None, "the server does not report other clients"
        if busy:
            return None, f"{busy} requests of other clients are running"

        async def retract(rid: str) -> None:
            await self._server.retract()

        for new_tokens in RETRACTED:
            response = await self._interrupted(new_tokens, retract)
            if response.retractions:
                break
        return response, ""

    async def _interrupted(self, new_tokens: int, do: Callable[[str], Awaitable[None]]) -> RawResponse:
        limit = self._spec.max_positions - self._length
        prompt = self._tokens(self._length)
        return await self._server.interrupt(prompt, self._spec, new_tokens=min(new_tokens, limit - 1), do=do)

    async def _generate(
        self,
        prompt: Sequence[int],
        *,
        start: int = 0,
        new_tokens: int = COMPLETION,
        temperature: float = 0.0,
        stop: Sequence[int] = (),
        dp_rank: int = 0,
        afresh: bool = False,
    ) -> RawResponse:
        return await self._server.generate(
            prompt,
            self._spec,
            new_tokens=new_tokens,
            start=start,
            temperature=temperature,
            stop=stop,
            dp_rank=dp_rank,
            afresh=afresh,
        )

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._spec.vocab_size, count).tolist()

    def _changed(self, prompt: Sequence[int], offset: int) -> list[int]:
        """``prompt`` with other tokens from ``offset`` on."""
        shift = self._rng.integers(1, self._spec.vocab_size, len(prompt) - offset)
        return [*prompt[:offset], *((np.asarray(prompt[offset:]) + shift) % self._spec.vocab_size).tolist()]


def _late_token(tokens: Sequence[int]) -> tuple[int, ...]:
    """The stop token: the last token that has not occurred before it, so that tokens precede it if possible."""
    return (list(dict.fromkeys(tokens))[-1],) if tokens else ()
