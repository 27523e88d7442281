"""What is kept of an episode turn by turn, so that it goes on in a new sandbox after its own, or the whole run, was
lost.

Between two tool calls a sandbox holds no process: its files and the transcript are the whole state. So an episode
goes on by taking its turns again: what was sampled is taken as it was sampled, with log-probs, routes and versions,
and the tools are called anew. That the new sandbox is where the old one was is shown by what the tools answer, which
must be the same text; else the episode starts over.
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


class ReplayDiffers(AgentRlError):
    """A turn taken again was answered otherwise than the first time."""


@dataclass(frozen=True, slots=True, eq=False)
class LoggedTurn:
    """One whole turn of an episode that began with tokens whose hash is ``opening``.

    ``completions``: what the engine answered to its requests, several where some were aborted. ``left``: the seconds of
    ``rollout.time_limit`` that were left after it.
    """

    opening: str
    completions: tuple[Completion, ...]
    turn: Turn
    left: float


class TurnLog(Protocol):
    """Keeps the turns of one episode."""

    async def kept(self) -> Sequence[LoggedTurn]:
        """Those to take again, in order; none where the episode begins."""
        ...

    async def keep(self, turn: LoggedTurn) -> None:
        """Keep the turn that follows those kept."""
        ...

    async def start_over(self) -> None:
        """Give up what was kept: taken again it was answered otherwise."""
        ...


class LoggedRunner(Protocol):
    """Runs one episode of ``task``; with ``log`` it goes on from the turns that are kept there, and keeps its own."""

    def __call__(self, task: Task, log: TurnLog | None = None) -> Awaitable[Trajectory]: ...


class Answered:
    """An engine that answers once more what was answered before; implements ``agent_rl.engine.types.Engine``."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._left = list(completions)

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        """The next of the answers. Raises ReplayDiffers where there is none left."""
        if not self._left:
            raise ReplayDiffers("a turn taken again asks the engine more often than it did")
        return self._left.pop(0)


def encode_turn(logged: LoggedTurn) -> bytes:
    """``logged`` with all arrays, for :func:`decode_turn`: a safetensors file whose metadata has the rest."""
    arrays: dict[str, NDArray[Any]] = {}
    for number, completion in enumerate(logged.completions):
        arrays[f"{number}/tokens"] = np.array(completion.tokens, np.int32)
        arrays[f"{number}/logprobs"] = np.array(completion.logprobs, np.float64)
        if completion.routing is not None:
            arrays[f"{number}/routes"] = np.frombuffer(archive.encode(completion.routing, keep_order=True), np.uint8)
    row = {
        "opening": logged.opening,
        "left": logged.left,
        "turn": asdict(logged.turn),
        "completions": [_described(completion) for completion in logged.completions],
    }
    return save(arrays, metadata={"row": json.dumps(row)})


def decode_turn(data: bytes, where: str) -> LoggedTurn:
    """What :func:`encode_turn` made ``data`` of. Raises AgentRlError naming ``where`` on anything else."""
    try:
        length = int.from_bytes(data[:8], "little")
        row = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["row"])
        arrays = load(data)
        completions = tuple(_completion(number, each, arrays) for number, each in enumerate(row["completions"]))
        return LoggedTurn(row["opening"], completions, Turn(**row["turn"]), row["left"])
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise AgentRlError(f"{where}: not a turn: {error}") from error


_PLAIN = ("weight_version", "engine", "retractions", "cut", "cached_tokens", "wire_bytes", "seconds")


def _described(completion: Completion) -> dict[str, Any]:
    plain = {name: getattr(completion, name) for name in _PLAIN}
    return {**plain, "finish": completion.finish.value, "earlier": [asdict(span) for span in completion.earlier]}


def _completion(number: int, row: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Completion:
    routes = arrays.get(f"{number}/routes")
    return Completion(
        tokens=tuple(arrays[f"{number}/tokens"].tolist()),
        logprobs=tuple(arrays[f"{number}/logprobs"].tolist()),
        finish=FinishReason(row["finish"]),
        routing=None if routes is None else archive.decode(routes.data, where=f"routes of completion {number}"),
        earlier=tuple(VersionSpan(**span) for span in row["earlier"]),
        **{name: row[name] for name in _PLAIN},
    )
