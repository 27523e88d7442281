"""Concurrent conversations of the probe, and the check of their routes against a second pass.

A conversation requests routes as training does: each turn from the first row that no turn before it gave. Afterwards
the whole sequence is sent once more as one prompt that shares no cached prefix, on a server with data-parallel ranks to
another rank. Both passes must give the same experts, up to rounding. Turns decode, read cached prefixes and run in one
batch with the other conversations; the second pass does none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.engine.route_probe.requests import RawResponse, Rows

TURNS = 3
COMPLETION = 12
"""Tokens that each turn samples."""
OBSERVATION = 6
"""Tokens between two turns."""
TEMPERATURES = 0.0, 1.0
"""Temperatures of the conversations, in turn."""
PER_RANK = 2
"""Conversations for each data-parallel rank; at least four in all."""
MOST = 32

Tokens = Callable[[int], list[int]]
Generate = Callable[..., Awaitable[RawResponse]]


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """``turns``: the responses in order. ``again``: the response to all of their tokens as one prompt."""

    turns: tuple[RawResponse, ...]
    again: RawResponse

    @property
    def all(self) -> tuple[RawResponse, ...]:
        return (*self.turns, self.again)

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """The rows of the sequence by what their tokens are: ``(name, first, stop)``. Rows of the last token that a
        turn samples are computed by the turn after it, so they count as observations."""
        for number, turn in enumerate(self.turns):
            prompt, stop = len(turn.prompt), len(turn.prompt) + len(turn.tokens) - 1
            yield ("observations" if number else "prompts"), turn.start, prompt
            yield "sampled tokens", prompt, stop

    def stitched(self, moe: Sequence[int]) -> Rows:
        """The turns' rows ``[T, MoE layers, top_k]``, joined, each with its experts sorted."""
        rows = [turn.wire_TLK for turn in self.turns if turn.wire_TLK is not None]
        return np.sort(np.concatenate(rows)[:, moe], axis=2)

    def repeated(self, moe: Sequence[int]) -> Rows:
        """The second pass's rows, in the form of :meth:`stitched`."""
        assert self.again.wire_TLK is not None
        last = self.turns[-1]
        return np.sort(self.again.wire_TLK[: len(last.prompt) + len(last.tokens) - 1, moe], axis=2)


async def converse(
    generate: Generate, tokens: Tokens, lengths: Sequence[int], dp_ranks: int
) -> tuple[Conversation, ...]:
    """Hold one conversation for each of ``lengths``, the tokens of its first prompt, all at once; then the second
    passes. They alternate between the server's data-parallel ranks and between temperatures 0 and 1."""

    async def hold(number: int, length: int) -> list[RawResponse]:
        sequence, start, turns = tokens(length), 0, []
        for _ in range(TURNS):
            turn = await generate(
                sequence,
                start=start,
                new_tokens=COMPLETION,
                dp_rank=number % dp_ranks,
                temperature=TEMPERATURES[number // dp_ranks % 2],
            )
            turns.append(turn)
            start = len(sequence) + len(turn.tokens) - 1
            sequence = [*sequence, *turn.tokens, *tokens(OBSERVATION)]
        return turns

    held = await asyncio.gather(*(hold(number, length) for number, length in enumerate(lengths)))
    return tuple(
        [
            Conversation(
                tuple(turns),
                await generate(
                    [*turns[-1].prompt, *turns[-1].tokens], new_tokens=1, dp_rank=(number + 1) % dp_ranks, afresh=True
                ),
            )
            for number, turns in enumerate(held)
        ]
    )


def differences(conversation: Conversation, moe: Sequence[int]) -> dict[str, float]:
    """The share of choices that differ between the two passes, by part of the sequence."""
    differ_TL = differing_choices(conversation.stitched(moe), conversation.repeated(moe))
    shares: dict[str, list[float]] = {}
    for name, first, stop in conversation.parts():
        shares.setdefault(name, []).extend(differ_TL[first:stop].ravel().tolist())
    return {name: float(np.mean(share)) for name, share in shares.items() if share}


def differing_choices(first: Rows, second: Rows) -> NDArray[np.float64]:
    """The share of each set of ``first`` ``[T, layers, top_k]`` that is not in the same set of ``second``, as ``[T,
    layers]``."""
    return 1.0 - (first[..., :, None] == second[..., None, :]).any(axis=-1).mean(axis=-1)
