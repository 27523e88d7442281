"""Records what judges and simulated users (:mod:`envs.chat_model`) were sent and answered, for the trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

RECORDED_CHARS = 8192
"""Characters of each text that are kept."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request to a model of others: ``client`` is Judge or another class, ``messages`` the last two."""

    client: str
    model: str
    messages: tuple[Mapping[str, str], ...]
    response: str
    seconds: float
    cached: bool = False


_recorded: ContextVar[list[ModelCall] | None] = ContextVar("recorded_calls", default=None)


@contextmanager
def recorded_calls() -> Iterator[list[ModelCall]]:
    """The calls that are made within the block, in order."""
    calls = list[ModelCall]()
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def record_call(
    client: str, model: str, messages: Sequence[Mapping[str, str]], response: str, seconds: float, *, cached: bool
) -> None:
    """Add a call to those of the running episode."""
    if (calls := _recorded.get()) is not None:
        last = tuple({"role": m["role"], "content": m["content"][:RECORDED_CHARS]} for m in messages[-2:])
        calls.append(ModelCall(client, model, last, response[:RECORDED_CHARS], round(seconds, 3), cached))
