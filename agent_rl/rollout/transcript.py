"""The tokens of one episode while it runs: append-only, sampled tokens kept exactly as sampled.

A worked example, two turns (``p`` opening, ``a`` sampled, ``o`` observation tokens)::

    opened           p p p
    sampled          p p p a a a
    observed         p p p a a a o o           tentative: nothing has been computed over ``o`` yet
    sampled          p p p a a a o o a a       now it is kept

What was observed after the last sampled token is dropped at the end: the policy never read it, it has no routes, and
nothing can be learned from it. So a transcript with any turn ends with a sampled token, and exactly its last row of
routes is absent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import RoutesMissingError
from agent_rl.types import Completion
from r3.routing import Routing, RoutingError
from r3.stitch import RouteStitcher


class Transcript:
    """Grows by :meth:`sampled` and :meth:`observed`; the list behind :attr:`tokens` is extended, never copied."""

    def __init__(self, opening: Sequence[int], *, max_tokens: int, routes: bool) -> None:
        self._tokens = list(opening)
        self._kept = len(self._tokens)
        self._max_tokens = max_tokens
        self._sampled: list[tuple[int, tuple[float, ...]]] = []
        self._versions: dict[str, None] = {}
        self._routes = routes
        self._stitcher: RouteStitcher | None = None

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
        """The first row of routes not yet held, or None where no routes are kept."""
        if not self._routes:
            return None
        return self._stitcher.next_row if self._stitcher else 0

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """The distinct weight versions that sampled, in order of first use."""
        return tuple(self._versions)

    def sampled(self, completion: Completion) -> None:
        """Keep what the engine sampled.

        Raises ValueError for tokens and log-probs that don't line up, RoutesMissingError for routes that don't.
        """
        if len(completion.tokens) != len(completion.logprobs):
            raise ValueError(
                f"engine {completion.engine} sampled {len(completion.tokens)} tokens "
                f"and gave {len(completion.logprobs)} log-probs"
            )
        if self._routes:
            self._stitch(completion)
        self._sampled.append((len(self._tokens), completion.logprobs))
        self._tokens.extend(completion.tokens)
        self._kept = len(self._tokens)
        self._versions[completion.weight_version] = None

    def _stitch(self, completion: Completion) -> None:
        delta = completion.routing
        if delta is None:
            raise RoutesMissingError(f"engine {completion.engine} sent no routes, and they were asked for")
        if self._stitcher is None:
            shape = {"moe_layers": delta.moe_layers, "top_k": delta.top_k, "num_experts": delta.num_experts}
            self._stitcher = RouteStitcher(**shape)
        try:
            self._stitcher.append(delta, sequence=len(self._tokens) + len(completion.tokens))
        except RoutingError as error:
            raise RoutesMissingError(f"engine {completion.engine}: {error}") from error

    def observed(self, tokens: Sequence[int]) -> None:
        """Append an observation, kept only if something is sampled after it."""
        self._tokens.extend(tokens)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], Routing | None]:
        """``(tokens, loss_mask, logprobs, routing)`` up to the last sampled token, one entry a token.

        ``routing`` is None where none were kept or nothing was sampled. Raises ValueError for a log-prob that is not
        finite.
        """
        tokens = np.array(self._tokens[: self._kept], np.int32)
        loss_mask = np.zeros(len(tokens), np.bool_)
        logprobs = np.zeros(len(tokens), np.float32)
        for start, values in self._sampled:
            loss_mask[start : start + len(values)] = True
            logprobs[start : start + len(values)] = values
        if not np.isfinite(logprobs).all():
            raise ValueError(f"the log-prob of token {int(np.argmin(np.isfinite(logprobs)))} is not finite")
        routing = self._stitcher.finish(len(tokens)) if self._stitcher else None
        return tokens, loss_mask, logprobs, routing
