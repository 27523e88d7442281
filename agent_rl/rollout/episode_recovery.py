"""Logs an episode turn by turn, so that it can continue in a new sandbox after its sandbox or the run was lost.

Between two tool calls a sandbox runs no process, so its files and the transcript are its whole state. The episode
continues by replay: completions are taken from the log with their log-probs, routes and weight versions, and the tools
are called again. The tools must return the same text as before; otherwise the episode starts over.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from agent_rl.errors import AgentRlError
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds, Trajectory, Turn, VersionSpan
from envs import Task
from r3 import archive
from r3.kept_tokens import KeptTokens


class ReplayDiffers(AgentRlError):
    """A replayed turn had another result than the logged one."""


@dataclass(frozen=True, slots=True, eq=False)
class LoggedTurn:
    """One complete turn. ``prompt_hash`` is the hash of the episode's initial prompt.

    ``completions``: the engine's responses, more than one if requests were aborted. ``seconds_left``: seconds of
    ``rollout.time_limit`` that remained after the turn.
    """

    prompt_hash: str
    completions: tuple[Completion, ...]
    turn: Turn
    seconds_left: float


class TurnLog(Protocol):
    """Stores the turns of one episode."""

    async def kept(self) -> Sequence[LoggedTurn]:
        """The turns to replay, in order; empty for a new episode."""
        ...

    async def keep(self, turn: LoggedTurn) -> None:
        """Append a turn."""
        ...

    async def start_over(self) -> None:
        """Discard the logged turns, because a replayed turn had another result."""
        ...


class LoggedRunner(Protocol):
    """Runs one episode of ``task``. With ``log`` it replays the logged turns and appends its own."""

    def __call__(self, task: Task, log: TurnLog | None = None) -> Awaitable[Trajectory]: ...


class ReplayEngine:
    """Returns logged completions; implements ``agent_rl.engine.types.Engine``."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._remaining = list(completions)

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The next logged completion. Raises ReplayDiffers if none is left."""
        if not self._remaining:
            raise ReplayDiffers("a replayed turn sends more engine requests than were logged")
        return self._remaining.pop(0)


def encode_turn(logged: LoggedTurn) -> bytes:
    """``logged`` as bytes: a safetensors file with the arrays, and the other fields in its metadata."""
    arrays: dict[str, NDArray[Any]] = {}
    for number, completion in enumerate(logged.completions):
        arrays[f"{number}/tokens"] = np.array(completion.tokens, np.int32)
        arrays[f"{number}/logprobs"] = np.array(completion.logprobs, np.float64)
        if completion.kept is not None:
            arrays |= {f"{number}/kept_counts": completion.kept.counts, f"{number}/kept_ids": completion.kept.ids}
        if completion.routing is not None:
            arrays[f"{number}/routes"] = np.frombuffer(archive.encode(completion.routing, keep_order=True), np.uint8)
    row = {
        "opening": logged.prompt_hash,
        "left": logged.seconds_left,
        "turn": asdict(logged.turn),
        "completions": [_completion_fields(completion) for completion in logged.completions],
    }
    return save(arrays, metadata={"row": json.dumps(row)})


def decode_turn(data: bytes, where: str) -> LoggedTurn:
    """The turn in ``data`` (see :func:`encode_turn`). Raises AgentRlError that names ``where`` if it is not a turn."""
    try:
        length = int.from_bytes(data[:8], "little")
        row = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["row"])
        arrays = load(data)
        completions = tuple(_completion(number, each, arrays) for number, each in enumerate(row["completions"]))
        return LoggedTurn(row["opening"], completions, Turn(**row["turn"]), row["left"])
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise AgentRlError(f"{where}: not a turn: {error}") from error


_PLAIN = ("weight_version", "engine", "retractions", "interrupted", "cached_tokens", "wire_bytes", "seconds")


def _completion_fields(completion: Completion) -> dict[str, Any]:
    plain = {name: getattr(completion, name) for name in _PLAIN}
    return {**plain, "finish": completion.finish.value, "earlier": [asdict(span) for span in completion.earlier]}


def _completion(number: int, row: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Completion:
    routes, counts = arrays.get(f"{number}/routes"), arrays.get(f"{number}/kept_counts")
    return Completion(
        tokens=tuple(arrays[f"{number}/tokens"].tolist()),
        logprobs=tuple(arrays[f"{number}/logprobs"].tolist()),
        finish=FinishReason(row["finish"]),
        routing=None if routes is None else archive.decode(routes.data, where=f"routes of completion {number}"),
        kept=None if counts is None else KeptTokens(counts, arrays[f"{number}/kept_ids"]),
        earlier=tuple(VersionSpan(**span) for span in row["earlier"]),
        **{name: row[name] for name in _PLAIN},
    )
