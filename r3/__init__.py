"""Rollout Routing Replay (R3, arXiv 2510.11370): routing tensors from the engine to the trainer.

numpy at its core; torch and Megatron only in the modules named for them.
"""

from r3.payload import RouteLayout
from r3.routing import Routing, RoutingError, Span, SpanKind
from r3.stitch import RouteStitcher

__all__ = ["RouteLayout", "RouteStitcher", "Routing", "RoutingError", "Span", "SpanKind"]
