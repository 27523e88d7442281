"""The tokens of a running episode: append-only, sampled tokens kept exactly as sampled.

Example of two turns (``p`` initial prompt, ``a`` sampled, ``o`` observation tokens)::

    created          p p p
    sampled          p p p a a a
    observed         p p p a a a o o           tentative: nothing has been computed over ``o`` yet
    sampled          p p p a a a o o a a       now it is kept

At the end, tokens observed after the last sampled token are dropped: the policy never read them and they have no
routes. So a transcript that holds any sampled token ends with one, and only its last row of routes is absent (unless
rows may be missing).

Special cases:

- A request that the engine aborted is part of a turn: its tokens and rows are kept and the turn continues, possibly
  with other weights. A request aborted without tokens is sent again.
- A completion without tokens is a turn that sampled nothing.

Here the history only grows. :mod:`agent_rl.rollout.compaction` begins another transcript for each branch, and
:mod:`agent_rl.rollout.conversation_tree` handles programs that rewrite their history.
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
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, RoutingError
from r3.stitch import RouteStitcher


class Transcript:
    """Grows by :meth:`sampled` and :meth:`observed`. The array behind :attr:`tokens` is extended in place.

    ``routes`` says which routes are kept and whether they may be missing; None keeps none.
    """

    def __init__(self, prompt: Sequence[int], *, max_tokens: int, routes: R3Config | None) -> None:
        # An array: the garbage collector visits every entry of a list, 0.2 s for 1,024 prompts of 8,000 tokens.
        self._tokens = array("i", prompt)
        self._kept = len(self._tokens)
        self._sampled_end = 0
        self._max_tokens = max_tokens
        self._sampled: list[slice] = []
        self._logprobs = array("f")  # of the sampled tokens
        self._kept_tokens: list[tuple[int, KeptTokens | None]] = []
        self._trained_end: int | None = None
        self._versions: list[VersionSpan] = []
        self._routes = routes
        self._stitcher: RouteStitcher | None = None
        self._missing: list[dict[str, Any]] = []  # until the first routes arrive, which define the shape

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens so far: the prompt of the next request. A view; do not change it or keep it across turns."""
        return self._tokens

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be added."""
        return self._max_tokens - len(self._tokens)

    @property
    def routes_from(self) -> int | None:
        """The first row of routes to request; None if no routes are kept. Row 0 if ``r3.source`` is ``latest``, else
        the first row not stored yet."""
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

    @property
    def kept_tokens(self) -> KeptTokens | None:
        """The kept tokens of all trained tokens; None if all were drawn from the whole vocabulary."""
        kept = KeptTokens.join(self._kept_tokens)
        if kept is None or self._trained_end is None:
            return kept
        positions = np.concatenate([np.arange(part.start, part.stop) for part in self._sampled])
        return kept.take(np.flatnonzero(positions < self._trained_end))

    def fork(self, prompt: Sequence[int], max_tokens: int) -> tuple[Transcript, int]:
        """A transcript that begins with ``prompt``, and how many leading tokens both share. It takes over the rows of
        routes of these tokens."""
        given = np.array(prompt, np.int32)
        length = min(len(given), self._sampled_end)
        differing = np.flatnonzero(given[:length] != np.array(self._tokens[:length], np.int32))
        shared = int(differing[0]) if len(differing) else length
        other = Transcript(prompt, max_tokens=max_tokens, routes=self._routes)
        if self._stitcher is not None:
            other._stitcher = self._stitcher.fork(min(shared, len(given) - 1, self._stitcher.next_row))
        return other, shared

    def leave_out_from(self, start: int) -> None:
        """Train no token from ``start`` on. It must be called after the last sampled token."""
        self._trained_end = start

    def sampled(self, completion: Completion) -> None:
        """Append what the engine sampled. An aborted completion is part of a turn; the next completion continues it.

        Raises ValueError if tokens and log-probs do not match, RoutesMissingError if the routes do not.
        """
        if len(completion.tokens) != len(completion.logprobs):
            raise ValueError(
                f"engine {completion.engine} sampled {len(completion.tokens)} tokens "
                f"and sent {len(completion.logprobs)} log-probs"
            )
        if completion.finish is FinishReason.ABORT and not completion.tokens:
            return  # aborted before the first token: the request is sent again
        if self._routes is not None:
            self._stitch(completion, self._routes)
        before = len(self._tokens)
        self._sampled_end = before + len(completion.tokens)
        if completion.tokens:
            for span in completion.versions:
                append_version(self._versions, span, before)
            self._sampled.append(slice(before, self._sampled_end))
            self._logprobs.extend(array("f", completion.logprobs))
            self._kept_tokens.append((len(completion.tokens), completion.kept))
            self._tokens.extend(array("i", completion.tokens))
            self._kept = self._sampled_end

    def _stitch(self, completion: Completion, policy: R3Config) -> None:
        delta, start = completion.routing, self.routes_from
        sequence, partial = len(self._tokens) + len(completion.tokens), completion.finish is FinishReason.ABORT
        try:
            if delta is not None:
                self._stitcher_for(delta).append(delta, sequence=sequence, start=start, partial=partial)
            elif policy.allows_missing:
                source = {"version": completion.weight_version, "engine": completion.engine}
                self._append_missing({"sequence": sequence, "partial": partial, **source})
            else:
                number = self._stitcher.turns if self._stitcher else 0
                raise RoutingError(
                    f"turn {number}: expected rows [{start}, {sequence - 1}) of routes, received none: "
                    "run `agent-rl r3 probe URL` to find out why, or set r3.missing to allow missing routes"
                )
        except RoutingError as error:
            raise RoutesMissingError(f"engine {completion.engine}: {error}") from error

    def _stitcher_for(self, delta: Routing) -> RouteStitcher:
        """The stitcher, created from the shape of the first routes."""
        if self._stitcher is None:
            self._stitcher = RouteStitcher(
                moe_layers=delta.moe_layers, top_k=delta.top_k, num_experts=delta.num_experts, capacity=self._max_tokens
            )
            for missed in self._missing:
                self._stitcher.append_missing(**missed)
        return self._stitcher

    def _append_missing(self, missed: dict[str, Any]) -> None:
        if self._stitcher:
            self._stitcher.append_missing(**missed)
        else:
            self._missing.append(missed)

    def observed(self, tokens: Sequence[int]) -> None:
        """Append an observation, or the tokens that close a turn's thoughts. They are kept only if a token is sampled
        after them."""
        self._tokens.extend(array("i", tokens))

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], Routing | None]:
        """``(tokens, loss_mask, logprobs, routing)`` up to the last sampled token, each ``[tokens]``.

        ``routing`` is None if no routes were kept or received, or nothing was sampled. Raises ValueError for a log-prob
        that is not finite.
        """
        tokens = np.array(self._tokens[: self._kept], np.int32)
        loss_mask = np.zeros(len(tokens), np.bool_)
        logprobs = np.zeros(len(tokens), np.float32)
        for sampled in self._sampled:
            loss_mask[sampled] = True
        logprobs[loss_mask] = self._logprobs
        if not np.isfinite(logprobs).all():
            raise ValueError(f"the log-prob of token {int(np.argmin(np.isfinite(logprobs)))} is not finite")
        if self._trained_end is not None:
            loss_mask[self._trained_end :] = False
            logprobs[self._trained_end :] = 0
        return tokens, loss_mask, logprobs, self._routing()

    def _routing(self) -> Routing | None:
        if self._stitcher is None or not self._sampled:
            return None
        if self._sampled_end > self._kept:  # the last turn sampled nothing: drop the rows of its prompt
            self._stitcher.truncate(self._kept - 1)
        return self._stitcher.finish(self._kept)
