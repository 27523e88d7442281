"""Rollout Routing Replay (R3, arXiv 2510.11370): brings routing tensors from the engine to the trainer.

Imports numpy only; ``megatron_replay`` imports torch and Megatron.
"""

from r3.payload import RouteLayout
from r3.routing import Routing, RoutingError, Span, SpanKind
from r3.stitch import RouteStitcher
