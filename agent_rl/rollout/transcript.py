"""The tokens of one episode while it runs: append-only, sampled tokens kept exactly as sampled.

A worked example, two turns (``p`` opening, ``a`` sampled, ``o`` observation tokens)::

    opened           p p p
    sampled          p p p a a a
    observed         p p p a a a o o           tentative: nothing has been computed over ``o`` yet
    sampled          p p p a a a o o a a       now it is kept

What was observed after the last sampled token is dropped at the end: the policy never read it, it has no routes, and
nothing can be learned from it. So a transcript with any sampled token ends with one, and exactly its last row of routes
is absent (unless rows may be missing).

Some turns differ:

- a request that the engine aborted is part of a turn: what came is kept with its rows, and the turn goes on by asking
  from there, perhaps with other weights; what came without a token is asked for again;
- a completion without tokens is a turn that sampled nothing.

A history that is rewritten is a matter of :mod:`agent_rl.rollout.conversation_tree`: the built-in loop's only grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import R3Config
from agent_rl.errors import RoutesMissingError
from agent_rl.types import Completion, FinishReason, VersionSpan, append_version
from r3.routing import Routing, RoutingError
from r3.stitch import RouteStitcher


class Transcript:
    """Grows by :meth:`sampled` and :meth:`observed`; the array behind :attr:`tokens` is extended, never copied.

    ``routes`` says which routes are kept and whether they may be missing; None keeps none.
    """

    def __init__(self, opening: Sequence[int], *, max_tokens: int, routes: R3Config | None) -> None:
        # An array: the garbage collector goes through every entry of a list, 0.2 s at 1,024 prompts of 8,000 tokens.
        self._tokens = array("i", opening)
        self._kept = len(self._tokens)
        self._shown = 0
        self._max_tokens = max_tokens
        self._sampled: list[slice] = []
        self._logprobs = array("f")  # of the sampled tokens
        self._versions: list[VersionSpan] = []
        self._routes = routes
        self._stitcher: RouteStitcher | None = None
        self._missing: list[dict[str, Any]] = []  # until the first routes tell their shape

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens so far, the next request's prompt. A view: don't change it, and don't keep it over a turn."""
        return self._tokens

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - len(self._tokens)

    @property
    def routes_from(self) -> int | None:
        """The first row of routes to ask for, or None where no routes are kept: all from row 0 on where the source is
        ``latest``, else those not yet held."""
        if self._routes is None:
            return None
        if self._routes.source == "latest":
            return 0
        if self._stitcher:
            return self._stitcher.next_row
        return int(self._missing[-1]["sequence"]) - 1 if self._missing else 0

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which tokens; see :class:`agent_rl.types.Trajectory`."""
        return tuple(self._versions)

    def sampled(self, completion: Completion) -> None:
        """Keep what the engine sampled.

        A completion that was aborted is part of a turn: what came is kept, and the turn goes on with the next one.
        Raises ValueError for tokens and log-probs that don't line up, RoutesMissingError for routes that don't.
        """
        if len(completion.tokens) != len(completion.logprobs):
            raise ValueError(
                f"engine {completion.engine} sampled {len(completion.tokens)} tokens "
                f"and gave {len(completion.logprobs)} log-probs"
            )
        if completion.finish is FinishReason.ABORT and not completion.tokens:
            return  # aborted before it sampled: whatever it computed will be asked for again
        if self._routes is not None:
            self._stitch(completion, self._routes)
        before = len(self._tokens)
        self._shown = before + len(completion.tokens)
        if completion.tokens:
            for span in completion.versions:
                append_version(self._versions, span, before)
            self._sampled.append(slice(before, self._shown))
            self._logprobs.extend(array("f", completion.logprobs))
            self._tokens.extend(array("i", completion.tokens))
            self._kept = self._shown

    def _stitch(self, completion: Completion, policy: R3Config) -> None:
        delta, start = completion.routing, self.routes_from
        sequence, partial = len(self._tokens) + len(completion.tokens), completion.finish is FinishReason.ABORT
        try:
            if delta is not None:
                self._stitcher_of(delta).append(delta, sequence=sequence, start=start, partial=partial)
            elif policy.allows_missing:
                source = {"version": completion.weight_version, "engine": completion.engine}
                self._miss({"sequence": sequence, "partial": partial, **source})
            else:
                number = self._stitcher.turns if self._stitcher else 0
                raise RoutingError(
                    f"turn {number}: expected rows [{start}, {sequence - 1}) of routes, received none: "
                    "`agent-rl r3 probe URL` says why, r3.missing what is done then"
                )
        except RoutingError as error:
            raise RoutesMissingError(f"engine {completion.engine}: {error}") from error

    def _stitcher_of(self, delta: Routing) -> RouteStitcher:
        """The stitcher, made by the first routes that come: they tell its shape."""
        if self._stitcher is None:
            self._stitcher = RouteStitcher(
                moe_layers=delta.moe_layers,
                top_k=delta.top_k,
                num_experts=delta.num_experts,
                capacity=self._max_tokens,
            )
            for missed in self._missing:
                self._stitcher.append_missing(**missed)
        return self._stitcher

    def _miss(self, missed: dict[str, Any]) -> None:
        if self._stitcher:
            self._stitcher.append_missing(**missed)
        else:
            self._missing.append(missed)

    def observed(self, tokens: Sequence[int]) -> None:
        """Append an observation, kept only if something is sampled after it."""
        self._tokens.extend(array("i", tokens))

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], Routing | None]:
        """``(tokens, loss_mask, logprobs, routing)`` up to the last sampled token, one entry a token.

        ``routing`` is None where none were kept, none ever came, or nothing was sampled. Raises ValueError for a
        log-prob that is not finite.
        """
        tokens = np.array(self._tokens[: self._kept], np.int32)
        loss_mask = np.zeros(len(tokens), np.bool_)
        logprobs = np.zeros(len(tokens), np.float32)
        for sampled in self._sampled:
            loss_mask[sampled] = True
        logprobs[loss_mask] = self._logprobs
        if not np.isfinite(logprobs).all():
            raise ValueError(f"the log-prob of token {int(np.argmin(np.isfinite(logprobs)))} is not finite")
        return tokens, loss_mask, logprobs, self._routing()

    def _routing(self) -> Routing | None:
        if self._stitcher is None or not self._sampled:
            return None
        if self._shown > self._kept:  # the last turn sampled nothing: rows came of what is dropped here
            self._stitcher.truncate(self._kept - 1)
        return self._stitcher.finish(self._kept)
