"""Decides which replies to an agent program are trained (``rollout.harness.train_if``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_rl.config.rollout import TrainIfConfig
from agent_rl.endpoint.messages import ChatRequest
from agent_rl.rollout.conversation_tree import ConversationTree, Node


@dataclass(frozen=True, slots=True)
class RequestKind:
    """What the rules use of a request. ``first``: it contains no earlier reply."""

    model: str
    has_tools: bool
    first: bool

    @classmethod
    def of(cls, request: ChatRequest) -> RequestKind:
        replies = any(message.role == "assistant" for message in request.messages)
        return cls(request.model, bool(request.tools or request.deferred_tools), not replies)


def apply_training_rules(rules: TrainIfConfig, tree: ConversationTree, kinds: Mapping[Node, RequestKind]) -> None:
    """Set the rule that leaves each node of ``tree`` out of training."""
    any_tools = any(kind.has_tools for kind in kinds.values())
    for node, kind in kinds.items():
        node.left_out = _rule_against(rules, kind, any_tools)
    if rules.branches == "first":
        first = set(tree.first_branch())
        for node in tree.nodes:
            node.left_out = node.left_out or ("" if node in first else "branches: first")


def _rule_against(rules: TrainIfConfig, kind: RequestKind, any_tools: bool) -> str:
    """The rule that leaves out the reply to a request of ``kind``; "" if none does."""
    if rules.models is not None and kind.model not in rules.models:
        return f"models: the request names {kind.model!r}"
    if rules.requests == "with-tools" and not kind.has_tools:
        return "requests: with-tools"
    if rules.requests == "main" and any_tools and kind.first and not kind.has_tools:
        return "requests: a side request"
    return ""
