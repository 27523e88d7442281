"""Searches the texts of trajectories. A search is bounded in seconds, characters and hits, and says where it ended."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from agent_rl.errors import AgentRlError, UserError
from agent_rl.viewer.index import Index, StepIndex
from agent_rl.viewer.trajectory import rows

Json = dict[str, Any]
SECONDS = 5.0
MAX_CHARS = 1 << 28
MAX_HITS = 200
_HITS_PER_TRAJECTORY = 5
_MAX_QUERY = 200
_AROUND = 80
"""Characters of an excerpt before and after the match."""


@dataclass(slots=True)
class _Search:
    pattern: re.Pattern[str]
    ends: float
    hits: list[Json] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trajectories: int = 0
    chars: int = 0

    def limit(self) -> str | None:
        """The limit that the search reached."""
        if len(self.hits) >= MAX_HITS:
            return f"{MAX_HITS} hits"
        if self.chars >= MAX_CHARS:
            return f"{MAX_CHARS >> 20} MiB of text"
        return f"{SECONDS:g} seconds" if time.monotonic() > self.ends else None

    def read(self, index: StepIndex) -> None:
        """Search ``index`` up to a limit. A damaged row becomes a note and ends it."""
        try:
            for number, row in enumerate(rows(index)):
                if self.limit():
                    return
                self.trajectories += 1
                found = self._hits(row)
                self.hits += ({"id": f"{index.n}-{number}", **hit} for hit in islice(found, _HITS_PER_TRAJECTORY))
        except (AgentRlError, OSError, KeyError, TypeError, AttributeError) as error:
            self.notes.append(f"{index.n}: searched up to a damaged row ({error})")

    def _hits(self, row: Mapping[str, Any]) -> Iterator[Json]:
        for turn, part, text in _texts(row):
            self.chars += len(text)
            if (match := self.pattern.search(text)) is not None:
                start, stop = match.span()
                around = {"before": text[max(0, start - _AROUND) : start], "after": text[stop : stop + _AROUND]}
                yield {"task": row["task_id"], "turn": turn, "part": part, "match": match[0], **around}


def search(index: Index, text: str, n: str) -> Json:
    """The places where ``text`` stands in the trajectories of ``n``; of all steps, newest first, if it is empty. Case
    is ignored. At most one hit for each text of a turn. Raises UserError for no text."""
    if not text.strip() or len(text) > _MAX_QUERY:
        raise UserError(f"search: {len(text)} characters; expected text= with 1 to {_MAX_QUERY}")
    chosen = [step for step in reversed(index.step_indexes.values()) if n in ("", step.n)]
    state = _Search(re.compile(re.escape(text), re.IGNORECASE), time.monotonic() + SECONDS)
    for step in chosen:
        state.read(step)
    total = sum(map(len, chosen))
    if (reached := state.limit()) is not None:
        state.notes.append(f"ended at {reached}, after {state.trajectories} of {total} trajectories")
    return {"hits": state.hits[:MAX_HITS], "searched": state.trajectories, "total": total, "notes": state.notes}


def _texts(row: Mapping[str, Any]) -> Iterator[tuple[int | None, str, str]]:
    """``(turn, part, text)``, without the messages that repeat a turn."""
    for message in row["messages"]:
        if message["role"] == "assistant":
            break
        if isinstance(message["content"], str):
            yield None, "prompt", message["content"]
    for number, turn in enumerate(row["turns"]):
        yield number, "turn", turn["text"]
        yield number, "observation", turn["observation"]
    for part in ("patch", "test_log", "error"):
        yield None, part, str(row.get(part) or "")
