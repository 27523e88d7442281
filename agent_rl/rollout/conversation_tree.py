"""What an agent program's requests say and what was sampled for them, as a forest of token sequences.

A program sends its whole conversation with every request. :meth:`Forest.plan` finds how much of that is here already,
by the ids that were given out with each reply; what was sampled is then never rendered or encoded again. A worked
example, a program that compacts its conversation after two turns (``p`` rendered, ``a`` sampled)::

    node 0   p p p a a a                 the opening, and the first reply
    node 1               p p a a         what tools answered, and the second reply: holds only these four tokens
    node 2   p p|p p p a a               a rewritten conversation, which begins with two tokens of node 0's

    branch 0   node 0 + node 1           start
    branch 1   2 tokens of node 0, then node 2        rewrite; parent 0, shared 2

What holds: each node's tokens and rows of routes are held once, whatever branches go through it; a sampled token is
trained in the first branch that holds its node whole, and is context in the others; replies that never reached the
program, or that it asked for again without going on from them, are not trained. Nothing here waits or does I/O.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from agent_rl.config import R3Config
from agent_rl.errors import RoutesMissingError
from agent_rl.types import Branch, BranchCause, Completion, FinishReason, VersionSpan, append_version
from r3.routing import Routing, RoutingError
from r3.stitch import RouteStitcher
from tools import Spoken, ToolCall

Tokens = NDArray[np.int32]
Tools = Sequence[Mapping[str, Any]]


class ChatMessage(NamedTuple):
    """One message of a request. ``reply`` is the id of the node whose reply an assistant's message says it is.

    A tuple, for each request brings all of its conversation, and a frozen dataclass takes more than twice as long.
    """

    role: Literal["system", "user", "tool", "assistant"]
    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    reply: str = ""

    def echoes(self, spoken: Spoken) -> bool:
        """Whether it says what was ``spoken``; outer blanks don't matter, and thoughts may be left out. A program that
        brings the reply's id back may have given its calls further arguments, as Claude Code does with defaults."""
        return (
            (self.text == spoken.text or self.text.strip() == spoken.text.strip())
            and (self.calls == spoken.calls or (self.reply != "" and _extend(self.calls, spoken.calls)))
            and (not self.reasoning or self.reasoning.strip() in ("", spoken.reasoning.strip()))
        )


class Rendering(Protocol):
    """Messages to tokens."""

    def opening(self, messages: Sequence[ChatMessage], tools: Tools) -> Sequence[int]:
        """A whole conversation, up to where the next reply begins."""
        ...

    def extension(self, messages: Sequence[ChatMessage], *, stop_included: bool) -> Sequence[int]:
        """What stands between a reply's last sampled token and the next reply."""
        ...

    def begins_anew(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether a conversation is rendered as a whole again where ``messages`` follow a reply."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows ``[start, sequence - 1)`` as one answer of the engine brought them, or did not."""

    start: int
    sequence: int
    routing: Routing | None
    partial: bool
    version: str
    engine: str


@dataclass(slots=True, eq=False)
class Node:
    """One reply: the first ``shared`` tokens of its parent's path, its own ``context``, then what was sampled.

    ``id`` goes out with the reply. ``asked`` are the messages that its context renders, ``text`` the reply as sampled
    and ``spoken`` the same in parts, once all of it is there. ``delivered``: it has reached the program; ``followed``:
    a later request went on from it.
    """

    id: str
    number: int
    key: bytes
    parent: Node | None
    shared: int
    context: Tokens
    cause: BranchCause
    asked: tuple[ChatMessage, ...]
    replaces: tuple[Node, ...] = ()
    sampled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: list[VersionSpan] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)
    text: str = ""
    spoken: Spoken | None = None
    whole: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    delivered: bool = False
    followed: bool = False
    superseded: bool = False

    @property
    def prompt(self) -> int:
        """Tokens before the first sampled one."""
        return self.shared + len(self.context)

    @property
    def end(self) -> int:
        """Tokens of its path."""
        return self.prompt + len(self.sampled)

    @property
    def trained(self) -> bool:
        return self.delivered and not self.superseded and len(self.sampled) > 0

    def own(self, stop: int) -> Tokens:
        """Its own tokens, up to ``stop`` tokens of its path."""
        return self.whole[: stop - self.shared] if self.spoken is not None else self._joined()[: stop - self.shared]

    def close(self, text: str, spoken: Spoken) -> None:
        """All of the reply is there."""
        self.whole = self._joined()
        self.context = self.whole[: len(self.context)]
        self.text, self.spoken = text, spoken

    def _joined(self) -> Tokens:
        sampled = np.frombuffer(self.sampled, np.int32) if self.sampled else np.zeros(0, np.int32)
        return np.concatenate([self.context, sampled])


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a request is answered: by what is sampled after ``prompt``, or by one of the nodes ``waiting``, whose replies
    to this very request have reached nobody yet. ``offered`` stands for the tools that it offers."""

    key: bytes
    offered: bytes
    prompt: Tokens
    parent: Node | None
    shared: int
    cause: BranchCause
    asked: tuple[ChatMessage, ...]
    replaces: tuple[Node, ...] = ()
    waiting: tuple[Node, ...] = ()


class ConversationTree:
    """The nodes of one episode. ``routes`` says which routes are kept and whether they may be missing; None: none."""

    def __init__(self, rendering: Rendering, *, routes: R3Config | None) -> None:
        self._rendering, self._routes = rendering, routes
        self.nodes: list[Node] = []
        self._by_key: dict[bytes, list[Node]] = {}
        self._by_id: dict[str, Node] = {}
        self._tools: set[bytes] = set()
        self._parents: set[Node] = set()
        self._differing: set[bytes] = set()

    @property
    def echo_differs(self) -> int:
        """Replies that came back otherwise than they were given, each counted once however often it comes."""
        return len(self._differing)

    def plan(self, messages: Sequence[ChatMessage], tools: Tools) -> Plan:
        """What ``messages`` add to what is here. Raises TemplateError for messages that cannot be rendered."""
        offered = xxh3_128_digest(orjson.dumps(list(tools)))
        key, last, start, echoed = self._match(offered, messages)
        same = self._by_key.get(key, ())
        waiting = tuple(node for node in same if not node.delivered)
        asked = tuple(messages[start:])
        if last is None or self._rendering.begins_anew(asked):
            shown = [self._shown(message, node) for message, node in zip(messages, echoed, strict=True)]
            prompt = np.array(self._rendering.opening(shown, tools), np.int32)
            goes_on = last is not None and _common(self.tokens(last), prompt) == last.end
        else:
            prompt, goes_on = self._extended(last, asked), True
        if last is None or not goes_on or last in self._parents:
            parent, shared = self._attach(prompt, last)
        else:
            parent, shared = last, last.end  # as nearly always: a program that goes on from its last reply
        done = tuple(node for node in same if node.delivered)
        cause = self._cause(parent, shared, offered, retried=bool(done))
        replaces = tuple(node for node in done if not node.followed)
        return Plan(key, offered, prompt, parent, shared, cause, asked, replaces, waiting)

    def begin(self, plan: Plan) -> Node:
        """A node that is to be sampled."""
        node = Node(
            secrets.token_hex(8), len(self.nodes), plan.key, plan.parent, plan.shared,
            plan.prompt[plan.shared :].copy(), plan.cause, plan.asked, plan.replaces,
        )  # fmt: skip
        self.nodes.append(node)
        self._by_key.setdefault(plan.key, []).append(node)
        self._by_id[node.id] = node
        self._tools.add(plan.offered)
        if plan.parent is not None:
            self._parents.add(plan.parent)
        return node

    def tokens(self, node: Node) -> Tokens:
        """All tokens of the node's path, the next request's prompt."""
        return np.concatenate([step.own(stop) for step, stop in _path(node)])

    def routes_from(self, node: Node) -> int | None:
        """The first row of routes to ask for: the first that is not held yet."""
        if self._routes is None:
            return None
        if self._routes.source == "latest":
            return 0
        if node.parts:
            return node.parts[-1].sequence - 1
        held = 0 if node.parent is None else min(node.shared, node.parent.end - 1)
        return max(0, min(held, node.prompt - 1))

    def sampled(self, node: Node, completion: Completion) -> None:
        """Keep what the engine sampled; a completion that was aborted is part of a reply, which goes on with the next.

        Raises ValueError for tokens and log-probs that don't line up, RoutesMissingError for routes that don't.
        """
        if len(completion.tokens) != len(completion.logprobs) or not np.isfinite(completion.logprobs).all():
            raise ValueError(
                f"engine {completion.engine} sampled {len(completion.tokens)} tokens "
                f"and gave {len(completion.logprobs)} log-probs, which must be as many, and finite"
            )
        if completion.finish is FinishReason.ABORT and not completion.tokens:
            return  # aborted before it sampled: whatever it computed will be asked for again
        if self._routes is not None:
            node.parts.append(self._part(node, completion))
        for span in completion.versions:
            append_version(node.versions, span, node.end)
        node.sampled.extend(completion.tokens)
        node.logprobs.extend(completion.logprobs)

    def commit(self, node: Node, text: str, spoken: Spoken) -> None:
        """The reply is whole: later requests may go on from it."""
        node.close(text, spoken)

    def deliver(self, node: Node) -> None:
        """The reply has reached the program; of those that it was asked for instead of, none is trained."""
        node.delivered = True
        for other in node.replaces:
            other.superseded = not other.followed

    def branches(self) -> tuple[Branch, ...]:
        """The sequences to train on; none where nothing was sampled that reached the program."""
        claimed: dict[Node, int] = {}
        return tuple(self._branch(number, leaf, claimed) for number, leaf in enumerate(self._leaves()))

    def line(self) -> list[Node]:
        """The nodes of the first branch, in order."""
        return [node for leaf in self._leaves()[:1] for node, _ in _path(leaf)]

    def _match(
        self, offered: bytes, messages: Sequence[ChatMessage]
    ) -> tuple[bytes, Node | None, int, list[Node | None]]:
        """The request's key, the last reply that it goes on from, where the messages after that begin, and of each of
        the messages the reply that it repeats."""
        key, last, start = offered, None, 0
        echoed = list[Node | None]()
        for at, message in enumerate(messages):
            node = self._echoed(key, message) if message.role == "assistant" else None
            echoed.append(node)
            if node is not None:
                node.delivered = node.followed = True
                node.superseded = False
                key, last, start = xxh3_128_digest(key + node.id.encode()), node, at + 1
            else:
                key = xxh3_128_digest(key + _digestible(message))
        return key, last, start, echoed

    def _echoed(self, key: bytes, message: ChatMessage) -> Node | None:
        """The reply to the request of ``key`` that ``message`` repeats."""
        differs = False
        for node in reversed(self._by_key.get(key, ())):
            if node.spoken is not None and message.reply in ("", node.id):
                if message.echoes(node.spoken):
                    return node
                differs = True
        if differs:
            self._differing.add(xxh3_128_digest(key + _digestible(message)))
        return None

    def _extended(self, last: Node, asked: Sequence[ChatMessage]) -> Tokens:
        """The tokens of a conversation that goes on from ``last`` with the messages ``asked``."""
        stopped = bool(last.sampled) and last.sampled[-1] in self._rendering.stop_token_ids
        shown = [self._shown(message) for message in asked]
        tail = self._rendering.extension(shown, stop_included=stopped)
        return np.concatenate([self.tokens(last), np.array(tail, np.int32)])

    def _shown(self, message: ChatMessage, echoed: Node | None = None) -> ChatMessage:
        """A message as it is rendered: one that repeats a reply, be it in another conversation, with the text that was
        sampled."""
        node = echoed or self._by_id.get(message.reply)
        if node is None or node.spoken is None or not (echoed or message.echoes(node.spoken)):
            return message
        return ChatMessage("assistant", node.text)

    def _attach(self, prompt: Tokens, last: Node | None) -> tuple[Node | None, int]:
        """The finished node whose path has the longest beginning in common with ``prompt``, and how long that is;
        among equals ``last``, else the earliest."""
        held: dict[Node | None, int] = {None: 0}
        best: tuple[int, bool, Node | None] = (0, False, None)
        for node in self.nodes:
            if node.spoken is None:
                continue
            held[node] = held[node.parent]
            if held[node] < node.shared:
                continue  # what is in common ends before its own tokens begin: that is its parent's
            held[node] = common = node.shared + _common(node.own(node.end), prompt[node.shared :])
            if (common, node is last) > best[:2]:
                best = common, node is last, node
        return best[2], best[0]

    def _cause(self, parent: Node | None, shared: int, offered: bytes, *, retried: bool) -> BranchCause:
        """Why a branch begins here, if one does."""
        if not self.nodes:
            return BranchCause.START
        if parent is not None and shared == parent.end and parent not in self._parents:
            return parent.cause
        if offered not in self._tools:
            return BranchCause.TOOLS
        if retried:
            return BranchCause.RETRY
        in_flight = any(node.spoken is None for node in self.nodes)
        return BranchCause.PARALLEL if in_flight else BranchCause.REWRITE

    def _part(self, node: Node, completion: Completion) -> _Part:
        start, sequence = self.routes_from(node) or 0, node.end + len(completion.tokens)
        delta, expected = completion.routing, sequence - 1 - start
        if delta is None and not (self._routes and self._routes.allows_missing):
            raise RoutesMissingError(
                f"engine {completion.engine}: expected rows [{start}, {sequence - 1}) of routes, received none: "
                "`agent-rl r3 probe URL` says why, r3.missing what is done then"
            )
        if delta is not None and delta.tokens != expected:
            raise RoutesMissingError(
                f"engine {completion.engine}: expected {expected} rows [{start}, {sequence - 1}), "
                f"received {delta.tokens}"
            )
        partial = completion.finish is FinishReason.ABORT
        return _Part(start, sequence, delta, partial, completion.weight_version, completion.engine)

    def _leaves(self) -> list[Node]:
        """The last nodes of the branches, in the order in which the branches began; one that holds a node whole comes
        before those that hold a part of it."""
        alive: set[Node] = set()
        inner: set[Node] = set()
        for node in reversed(self.nodes):
            if node in alive or node.trained:
                alive.add(node)
                if node.parent is not None and node.shared == node.parent.end:
                    alive.add(node.parent)
                    inner.add(node.parent)
        return sorted(alive - inner, key=lambda leaf: [(node.number, stop < node.end) for node, stop in _path(leaf)])

    def _branch(self, number: int, leaf: Node, claimed: dict[Node, int]) -> Branch:
        path = _path(leaf)
        tokens = self.tokens(leaf)
        loss_mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
        first = next(node for node, _ in path if node not in claimed)
        versions = list[VersionSpan]()
        for node, stop in path:
            if node in claimed or stop < node.end:
                continue
            if node.trained:
                loss_mask[node.prompt : node.end] = True
                logprobs[node.prompt : node.end] = node.logprobs
                for span in node.versions:
                    append_version(versions, span)
        parent = None if first.parent is None else claimed.get(first.parent)
        claimed |= {node: number for node, stop in path if node not in claimed and stop == node.end}
        shared = 0 if parent is None else first.shared
        return Branch(
            tokens, loss_mask, logprobs, _routing(path, len(tokens)), tuple(versions), parent, shared, first.cause
        )


def _extend(calls: Sequence[ToolCall], sampled: Sequence[ToolCall]) -> bool:
    """Whether ``calls`` are those that were sampled, with all their arguments or more."""
    return len(calls) == len(sampled) and all(
        call.name == before.name and before.arguments.items() <= call.arguments.items()
        for call, before in zip(calls, sampled, strict=True)
    )


def _path(leaf: Node) -> list[tuple[Node, int]]:
    """The nodes from the root to ``leaf``, each with the tokens of its path up to where it is gone on from."""
    path: list[tuple[Node, int]] = []
    node: Node | None = leaf
    stop = leaf.end
    while node is not None:
        path.append((node, stop))
        stop = node.shared
        node = node.parent
    return path[::-1]


def _routing(path: Sequence[tuple[Node, int]], tokens: int) -> Routing | None:
    """The rows of a path; None where none were kept, or none ever came. Raises RoutesMissingError where they don't
    line up."""
    parts = list(_parts(path))
    like = next((part.routing for part in parts if part.routing is not None), None)
    if like is None:
        return None
    stitcher = RouteStitcher(
        moe_layers=like.moe_layers, top_k=like.top_k, num_experts=like.num_experts, capacity=tokens
    )
    try:
        for part in parts:
            stitcher.truncate(part.start)
            if part.routing is not None:
                stitcher.append(part.routing, sequence=part.sequence, partial=part.partial)
            else:
                stitcher.append_missing(
                    sequence=part.sequence, version=part.version, engine=part.engine, partial=part.partial
                )
        return stitcher.finish(tokens)
    except RoutingError as error:
        raise RoutesMissingError(f"engine {parts[-1].engine}: {error}") from error


def _parts(path: Sequence[tuple[Node, int]]) -> Iterator[_Part]:
    """The answers that brought the rows of a path, without those whose rows a later node brought again."""
    starts = [min((part.start for part in node.parts), default=1 << 62) for node, _ in path]
    for place, (node, _) in enumerate(path):
        again = min(starts[place + 1 :], default=1 << 62)
        yield from (part for part in node.parts if part.start < again)


def _common(first: Tokens, second: Tokens) -> int:
    """How many tokens the two begin with in common."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def _digestible(message: ChatMessage) -> bytes:
    words = message.text + message.reasoning
    if not message.calls:  # as nearly all: one text, encoded at once
        return f"{message.role} 0 {len(message.text)} {words}".encode(errors="surrogatepass")
    calls = [(call.name, dict(call.arguments)) for call in message.calls]
    written = orjson.dumps(calls, option=orjson.OPT_SORT_KEYS)
    head = f"{message.role} {len(written)} {len(message.text)} ".encode()
    return head + written + words.encode(errors="surrogatepass")
