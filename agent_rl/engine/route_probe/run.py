"""``agent-rl r3 probe``: whether the routes that a server sends can be replayed, found out by asking.

A server that does not capture, a router that strips the key, a start that is ignored, rows that are stale, shifted or
another request's: all of it trains without an error, on the wrong experts. So a few short requests are made whose
answers must fit each other (:mod:`agent_rl.engine.route_probe.checks` says how), on random prompts that no cache can
hold.
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
from agent_rl.engine.route_probe.requests import ProbeClient, RawResponse
from agent_rl.errors import ConfigError, EngineUnreachable
from agent_rl.models.spec import ModelSpec, read_moe_spec
from agent_rl.monitoring.console import cell

PROMPT = 160
"""Tokens of a prompt: more than two pages of a cache that keeps pages of 64. A short context takes a quarter of it."""
COMPLETION = 8
LONG = 1024
"""Tokens of the request that is aborted as soon as it runs."""
RETRACTED = (32, 256)
"""Tokens of the request that is retracted, and of another where the first had ended before it was told."""
VARIANTS = 8
REQUEST_SECONDS = 60.0
PROBE_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found at ``url``; ``seconds`` and ``requests`` are what finding it cost."""

    url: str
    checks: tuple[Check, ...]
    requests: int
    seconds: float

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is CheckStatus.FAILED)

    def spoils(self, *, missing_allowed: bool) -> tuple[Check, ...]:
        """The failed checks that make training on these routes wrong. Answers without routes are a policy's matter
        where some answers have them (``r3.missing``)."""
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
    """The report as a table: check, status, what was found, what to do."""
    shown = Table(title=f"routes of {report.url}", title_justify="left")
    for column in ("check", "status", "found", "what to do"):
        shown.add_column(column)
    colours = {CheckStatus.OK: "green", CheckStatus.FAILED: "red", CheckStatus.SKIPPED: "yellow"}
    for check in report.checks:
        status = f"[{colours[check.status]}]{check.status}[/]"
        shown.add_row(check.name, status, cell(check.finding), cell(check.advice))
    return shown


async def probe(
    url: str, model_spec: ModelSpec | None = None, *, retract: bool = False, headers: Mapping[str, str] | None = None
) -> ProbeReport:
    """Probe the server at ``url``, which serves the model of ``model_spec`` (by default what its own directory says).

    ``headers`` go with every request.
    With ``retract`` every running request of the server is put back once: only for an engine that is the caller's
    alone, since resuming it in the middle of another's weight update would spoil that.

    Raises EngineUnreachable where nobody answers or the answers take too long, another engine error for one that is
    refused, ConfigError where the model's facts can't be found.
    """
    started = perf_counter()
    server_at = ProbeClient(url, timeout=REQUEST_SECONDS, headers=headers)
    try:
        async with asyncio.timeout(PROBE_SECONDS), server_at as server:
            known = model_spec or _facts_of(server.url, await server.model_path())
            answers = await _Questions(server, known, retract).ask()
            checks = check_all(answers, known)
            return ProbeReport(server.url, checks, server.requests, perf_counter() - started)
    except TimeoutError:
        raise EngineUnreachable(f"{url}: the probe was not answered within {PROBE_SECONDS:g} s") from None


def _facts_of(url: str, directory: str) -> ModelSpec:
    if not directory or not Path(directory).is_dir():
        raise ConfigError(
            f"{url} serves {directory or 'a model it does not name'}, which is no directory of this machine: "
            "name one that has the model's config.json by --model"
        )
    return read_moe_spec(Path(directory))


class _Questions:
    """The requests of one probe."""

    def __init__(self, server: ProbeClient, model_spec: ModelSpec, retract: bool) -> None:
        self._server, self._facts, self._may_retract = server, model_spec, retract
        self._rng = np.random.default_rng()
        self._length = min(PROMPT, model_spec.max_positions // 4)

    async def ask(self) -> ProbeResponses:
        """Ask them all: one after the other, but for the siblings."""
        captures = await self._server.reports_route_capture()
        busy = await self._server.count_other_requests()
        prompt = self._tokens(self._length)
        cold = await self._ask(prompt)
        cached = await self._ask(prompt, new_tokens=1)
        changed_at = np.linspace(self._length // 4, self._length * 3 // 4, VARIANTS).astype(int).tolist()
        variants = [await self._ask(self._changed(prompt, at), new_tokens=1) for at in changed_at]
        siblings, repeats = await self._siblings()
        retracted, untried = await self._retract(busy)
        return ProbeResponses(
            captures=captures,
            cold=cold,
            cached=cached,
            late=await self._ask(prompt, start=self._length // 2, new_tokens=1),
            variants=tuple(variants),
            changed_at=tuple(changed_at),
            stopped=await self._ask(prompt, stop=_late_token(cold.tokens)),
            siblings=siblings,
            repeats=repeats,
            aborted=await self._interrupted(LONG, self._server.abort),
            retracted=retracted,
            untried=untried,
        )

    async def _siblings(self) -> tuple[tuple[RawResponse, ...], tuple[RawResponse, ...]]:
        prompt = self._tokens(self._length)
        siblings = await asyncio.gather(*(self._ask(prompt, temperature=1.0) for _ in range(2)))
        repeats = [await self._ask([*prompt, *each.tokens], start=len(prompt) - 1, new_tokens=1) for each in siblings]
        return tuple(siblings), tuple(repeats)

    async def _retract(self, busy: int | None) -> tuple[RawResponse | None, str]:
        """Retraction is of all requests at once, so it is only tried where there is none of others'."""
        if not self._may_retract:
            return None, "only done where asked for"
        if busy is None:
            return None, "the server does not say whether others use it"
        if busy:
            return None, f"{busy} requests of others are running"

        async def retract(rid: str) -> None:
            await self._server.retract()

        for new_tokens in RETRACTED:
            answer = await self._interrupted(new_tokens, retract)
            if answer.retractions:
                break
        return answer, ""

    async def _interrupted(self, new_tokens: int, do: Callable[[str], Awaitable[None]]) -> RawResponse:
        room = self._facts.max_positions - self._length
        prompt = self._tokens(self._length)
        return await self._server.interrupt(prompt, self._facts, new_tokens=min(new_tokens, room - 1), do=do)

    async def _ask(
        self,
        prompt: Sequence[int],
        *,
        start: int = 0,
        new_tokens: int = COMPLETION,
        temperature: float = 0.0,
        stop: Sequence[int] = (),
    ) -> RawResponse:
        return await self._server.generate(
            prompt, self._facts, new_tokens=new_tokens, start=start, temperature=temperature, stop=stop
        )

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._facts.vocab_size, count).tolist()

    def _changed(self, prompt: Sequence[int], at: int) -> list[int]:
        """``prompt`` with every token from ``at`` on replaced by another."""
        shift = self._rng.integers(1, self._facts.vocab_size, len(prompt) - at)
        return [*prompt[:at], *((np.asarray(prompt[at:]) + shift) % self._facts.vocab_size).tolist()]


def _late_token(tokens: Sequence[int]) -> tuple[int, ...]:
    """A token to stop at: the last to occur for the first time, so that something comes before it where it can."""
    return (list(dict.fromkeys(tokens))[-1],) if tokens else ()
