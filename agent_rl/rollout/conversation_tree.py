"""The conversations of an agent program as a tree of token sequences.

A program sends its whole conversation with every request. :meth:`ConversationTree.plan_request` finds the part that is
already in the tree by the ids issued with each reply, so sampled tokens are never rendered or tokenized again.
Example: a program compacts its conversation after two turns (``p`` rendered, ``a`` sampled)::

    node 0   p p p a a a                 initial prompt and first reply
    node 1               p p a a         tool results and second reply: only these four tokens are stored
    node 2   p p|p p p a a               rewritten conversation; its first two tokens are node 0's

    branch 0   node 0 + node 1           start
    branch 1   2 tokens of node 0, then node 2        rewrite; parent 0, shared 2

Invariants: each token and each row of routes is stored once, however many branches share it. A sampled token is trained
in the first branch that holds its whole node and is context in the others. A reply is not trained if it never reached
the program, or if the program repeated the request without continuing from the reply. Nothing here waits or does I/O.
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
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, RoutingError
from r3.stitch import RouteStitcher
from tools import ParsedTurn, ToolCall

Tokens = NDArray[np.int32]
Tools = Sequence[Mapping[str, Any]]


class ChatMessage(NamedTuple):
    """One message of a request. ``reply`` is the id of the node that an assistant message claims to repeat.

    A tuple, because every request carries its whole conversation and a frozen dataclass takes more than twice as long.
    """

    role: Literal["system", "user", "tool", "assistant"]
    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    reply: str = ""

    def echo_of(self, node: Node) -> Echo | None:
        """The message as a repetition of the reply ``node``; None if it says something else.

        Leading and trailing blanks are ignored and reasoning may be omitted. If the program returned the reply's id,
        its calls may have additional arguments (Claude Code adds defaults).
        """
        spoken = node.spoken
        if (
            spoken is None
            or not (self.calls == spoken.calls or (self.reply != "" and _has_calls(self.calls, spoken.calls)))
            or not (not self.reasoning or self.reasoning.strip() in ("", spoken.reasoning.strip()))
        ):
            return None
        added = "" if self.text == spoken.text else _added_text(self.text.strip(), spoken.text.strip(), node)
        return None if added is None else Echo(node, added)


class Echo(NamedTuple):
    """A message that repeats the reply ``node``. ``added``: the program's own text after the stop sequence that ended
    the reply, in the same message."""

    node: Node
    added: str


class Rendering(Protocol):
    """Renders messages to tokens."""

    def initial_prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> Sequence[int]:
        """A whole conversation, up to the start of the next reply."""
        ...

    def extension(self, messages: Sequence[ChatMessage], *, stop: int | None) -> Sequence[int]:
        """The tokens between a reply's last sampled token and the next reply."""
        ...

    def added_text(self, text: str) -> Sequence[int]:
        """The tokens of :attr:`Echo.added`."""
        ...

    def must_rerender(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether the whole conversation is rendered resent_from if ``messages`` follow a reply."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def history_fields(self) -> bool:
        """Whether earlier replies are rendered from their parsed parts; otherwise from their text."""
        ...


@dataclass(frozen=True, slots=True)
class _RouteRows:
    """Rows ``[start, sequence - 1)`` of routes from one response of the engine; ``routing`` is None if it sent none."""

    start: int
    sequence: int
    routing: Routing | None
    partial: bool
    version: str
    engine: str


@dataclass(slots=True, eq=False)
class Node:
    """One reply: the first ``shared`` tokens of its parent's path, its own ``context`` tokens, then the sampled tokens.

    ``id`` is issued with the reply. ``new_messages`` are the messages that ``context`` renders. ``text`` is the reply
    as sampled and ``spoken`` its parsed parts, set once it is complete. ``delivered``: it reached the program.
    ``followed``: a later request continued from it. ``inserted``: number of tokens in ``sampled`` with which the loop
    closed the thoughts; they end at token ``closed`` of ``sampled``. ``stops``: the request's stop sequences.
    ``stopped``: the one that ended the reply; "" if none did. ``left_out``: the rule that leaves it out of training.
    ``opening``: number of tokens at the end of ``context`` with which the endpoint began the reply.
    """

    id: str
    number: int
    key: bytes
    parent: Node | None
    shared: int
    context: Tokens
    cause: BranchCause
    new_messages: tuple[ChatMessage, ...]
    retried: tuple[Node, ...] = ()
    sampled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    inserted: int = 0
    closed: int = 0
    kept: list[tuple[int, KeptTokens | None]] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    route_rows: list[_RouteRows] = field(default_factory=list)
    text: str = ""
    spoken: ParsedTurn | None = None
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    delivered: bool = False
    followed: bool = False
    superseded: bool = False
    stops: tuple[str, ...] = ()
    stopped: str = ""
    left_out: str = ""
    opening: int = 0

    @property
    def prompt(self) -> int:
        """Number of tokens before the first sampled token."""
        return self.shared + len(self.context)

    @property
    def end(self) -> int:
        """Number of tokens of its path."""
        return self.prompt + len(self.sampled)

    @property
    def reply_tokens(self) -> list[int]:
        """The tokens of the reply so far, with its opening."""
        return [*self.context[len(self.context) - self.opening :].tolist(), *self.sampled]

    @property
    def trained(self) -> bool:
        return self.delivered and not self.superseded and not self.left_out and len(self.sampled) > self.inserted

    def own_tokens(self, stop: int) -> Tokens:
        """Its own tokens, up to token ``stop`` of its path."""
        return self.tokens[: stop - self.shared] if self.spoken is not None else self._joined()[: stop - self.shared]

    def close(self, text: str, spoken: ParsedTurn) -> None:
        """Mark the reply as complete."""
        self.tokens = self._joined()
        self.context = self.tokens[: len(self.context)]
        self.text, self.spoken = text, spoken

    def _joined(self) -> Tokens:
        sampled = np.frombuffer(self.sampled, np.int32) if self.sampled else np.zeros(0, np.int32)
        return np.concatenate([self.context, sampled])


@dataclass(frozen=True, slots=True, eq=False)
class RequestPlan:
    """How to answer a request: sample after ``prompt``, or return one of the nodes ``undelivered``, whose replies to
    the same request have reached nobody. ``tools_digest`` is a hash of the request's tools."""

    key: bytes
    tools_digest: bytes
    prompt: Tokens
    parent: Node | None
    shared: int
    cause: BranchCause
    new_messages: tuple[ChatMessage, ...]
    retried: tuple[Node, ...] = ()
    undelivered: tuple[Node, ...] = ()


class ConversationTree:
    """The nodes of one episode. ``routes``: which routes are kept and whether they may be missing; None keeps none."""

    def __init__(self, rendering: Rendering, *, routes: R3Config | None) -> None:
        self._rendering, self._routes = rendering, routes
        self.nodes: list[Node] = []
        self._by_key: dict[bytes, list[Node]] = {}
        self._by_id: dict[str, Node] = {}
        self._tools: set[bytes] = set()
        self._parents: set[Node] = set()
        self._differing: dict[bytes, tuple[Node, ChatMessage]] = {}

    @property
    def echo_differs(self) -> int:
        """Number of :attr:`differing` replies."""
        return len(self._differing)

    @property
    def differing(self) -> list[tuple[Node, ChatMessage]]:
        """The replies that the program returned in a changed form, with that form."""
        return list(self._differing.values())

    def plan_request(self, messages: Sequence[ChatMessage], tools: Tools) -> RequestPlan:
        """Match ``messages`` with the tree. Raises TemplateError for messages that cannot be rendered."""
        tools_digest = xxh3_128_digest(orjson.dumps(list(tools)))
        key, echo, start, echoed = self._match(tools_digest, messages)
        last = echo and echo.node
        same = self._by_key.get(key, ())
        undelivered = tuple(node for node in same if not node.delivered)
        new_messages = tuple(messages[start:])
        if echo is None or self._rendering.must_rerender(new_messages):
            rendered = [self._with_sampled_text(message, each) for message, each in zip(messages, echoed, strict=True)]
            prompt = np.array(self._rendering.initial_prompt(rendered, tools), np.int32)
            continues_last = last is not None and _common(self.tokens(last), prompt) == last.end
        else:
            prompt, continues_last = self._extend(echo, new_messages), True
        if last is None or not continues_last or last in self._parents:
            parent, shared = self._attach(prompt, last)
        else:
            parent, shared = last, last.end  # the usual case: the program continues from its last reply
        answered = tuple(node for node in same if node.delivered)
        cause = self._cause(parent, shared, tools_digest, is_retry=bool(answered))
        retried = tuple(node for node in answered if not node.followed)
        return RequestPlan(key, tools_digest, prompt, parent, shared, cause, new_messages, retried, undelivered)

    def begin(self, plan: RequestPlan, stops: tuple[str, ...] = (), opening: Sequence[int] = ()) -> Node:
        """Add a node whose reply begins with the tokens ``opening``, then is sampled until one of ``stops``."""
        node = Node(
            secrets.token_hex(8), len(self.nodes), plan.key, plan.parent, plan.shared,
            np.concatenate([plan.prompt[plan.shared :], np.array(opening, np.int32)]), plan.cause, plan.new_messages,
            plan.retried, stops=stops, opening=len(opening),
        )  # fmt: skip
        self.nodes.append(node)
        self._by_key.setdefault(plan.key, []).append(node)
        self._by_id[node.id] = node
        self._tools.add(plan.tools_digest)
        if plan.parent is not None:
            self._parents.add(plan.parent)
        return node

    def tokens(self, node: Node) -> Tokens:
        """All tokens of the node's path: the prompt of the next request."""
        return np.concatenate([step.own_tokens(stop) for step, stop in _path(node)])

    def routes_from(self, node: Node) -> int | None:
        """The first row of routes to request: the first row not stored yet."""
        if self._routes is None:
            return None
        if self._routes.source == "latest":
            return 0
        if node.route_rows:
            return node.route_rows[-1].sequence - 1
        stored = 0 if node.parent is None else min(node.shared, node.parent.end - 1)
        return max(0, min(stored, node.prompt - 1))

    def sampled(self, node: Node, completion: Completion) -> None:
        """Append what the engine sampled. An aborted completion is part of a reply; the next completion continues it.

        Raises ValueError if tokens and log-probs do not match, RoutesMissingError if the routes do not.
        """
        if len(completion.tokens) != len(completion.logprobs) or not np.isfinite(completion.logprobs).all():
            raise ValueError(
                f"engine {completion.engine} sampled {len(completion.tokens)} tokens "
                f"and sent {len(completion.logprobs)} log-probs, expected one finite log-prob per token"
            )
        if completion.finish is FinishReason.ABORT and not completion.tokens:
            return  # aborted before the first token: the request is sent again
        if self._routes is not None:
            node.route_rows.append(self._received_rows(node, completion))
        for span in completion.versions:
            append_version(node.versions, span, node.end)
        node.sampled.extend(completion.tokens)
        node.logprobs.extend(completion.logprobs)
        node.kept.append((len(completion.tokens), completion.kept))

    def insert(self, node: Node, tokens: Sequence[int]) -> None:
        """Append the tokens that close the thoughts of the reply. The next completion continues it."""
        node.sampled.extend(tokens)
        node.logprobs.extend([0.0] * len(tokens))
        node.inserted, node.closed = len(tokens), len(node.sampled)

    def commit(self, node: Node, text: str, spoken: ParsedTurn, stopped: str = "") -> None:
        """Mark the reply as complete, so that later requests can continue from it. ``stopped``: the stop sequence that
        ended it."""
        node.close(text, spoken)
        node.stopped = stopped

    def deliver(self, node: Node) -> None:
        """Mark the reply as received by the program. Earlier replies to the same request are no longer trained."""
        node.delivered = True
        for other in node.retried:
            other.superseded = not other.followed

    def branches(self) -> tuple[Branch, ...]:
        """The sequences to train on; empty if no sampled token reached the program."""
        claimed: dict[Node, int] = {}
        return tuple(self._branch(number, leaf, claimed) for number, leaf in enumerate(self._leaves()))

    def first_branch(self) -> list[Node]:
        """The nodes of the first branch, in order."""
        return [node for leaf in self._leaves()[:1] for node, _ in _path(leaf)]

    def _match(
        self, tools_digest: bytes, messages: Sequence[ChatMessage]
    ) -> tuple[bytes, Echo | None, int, list[Echo | None]]:
        """``(key of the request, last reply it continues, index of the first new message, echoed reply of each
        message)``."""
        key, last, start = tools_digest, None, 0
        echoed = list[Echo | None]()
        for index, message in enumerate(messages):
            echo = self._find_echoed(key, message) if message.role == "assistant" else None
            echoed.append(echo)
            if echo is not None:
                node = echo.node
                node.delivered = node.followed = True
                node.superseded = False
                repeated = (node.id + echo.added).encode(errors="surrogatepass")
                key, last, start = xxh3_128_digest(key + repeated), echo, index + 1
            else:
                key = xxh3_128_digest(key + _digest_input(message))
        return key, last, start, echoed

    def _find_echoed(self, key: bytes, message: ChatMessage) -> Echo | None:
        """The reply to request ``key`` that ``message`` repeats."""
        differing: Node | None = None
        for node in reversed(self._by_key.get(key, ())):
            if node.spoken is not None and message.reply in ("", node.id):
                if (echo := message.echo_of(node)) is not None:
                    return echo
                differing = node
        if differing is not None:
            self._differing.setdefault(xxh3_128_digest(key + _digest_input(message)), (differing, message))
        return None

    def _extend(self, echo: Echo, new_messages: Sequence[ChatMessage]) -> Tokens:
        """The tokens of the conversation that continues from ``echo`` with ``new_messages``."""
        last, added = echo.node, self._rendering.added_text(echo.added) if echo.added else ()
        ended = bool(last.sampled) and last.sampled[-1] in self._rendering.stop_token_ids
        rendered = [self._with_sampled_text(message) for message in new_messages]
        tail = self._rendering.extension(rendered, stop=last.sampled[-1] if ended else None)
        return np.concatenate([self.tokens(last), np.array([*added, *tail], np.int32)])

    def _with_sampled_text(self, message: ChatMessage, echo: Echo | None = None) -> ChatMessage:
        """``message`` as rendered. A message that repeats a reply, also one of another branch, gets the sampled text
        or its parts."""
        if echo is None and (named := self._by_id.get(message.reply)) is not None:
            echo = message.echo_of(named)
        if echo is None or (spoken := echo.node.spoken) is None:
            return message
        if self._rendering.history_fields:
            return ChatMessage(
                "assistant", spoken.text + echo.node.stopped + echo.added, spoken.calls, spoken.reasoning
            )
        return ChatMessage("assistant", echo.node.text + echo.added)

    def _attach(self, prompt: Tokens, last: Node | None) -> tuple[Node | None, int]:
        """``(node, length)``: the complete node whose path shares the longest prefix with ``prompt``. Ties go to
        ``last``, then to the earliest node."""
        shared_with: dict[Node | None, int] = {None: 0}
        best: tuple[int, bool, Node | None] = (0, False, None)
        for node in self.nodes:
            if node.spoken is None:
                continue
            shared_with[node] = shared_with[node.parent]
            if shared_with[node] < node.shared:
                continue  # the common prefix ends before this node's own tokens
            shared_with[node] = common = node.shared + _common(node.own_tokens(node.end), prompt[node.shared :])
            if (common, node is last) > best[:2]:
                best = common, node is last, node
        return best[2], best[0]

    def _cause(self, parent: Node | None, shared: int, tools_digest: bytes, *, is_retry: bool) -> BranchCause:
        """Why this node starts a branch, or the parent's cause if it continues the parent's branch."""
        if not self.nodes:
            return BranchCause.START
        if parent is not None and shared == parent.end and parent not in self._parents:
            return parent.cause
        if tools_digest not in self._tools:
            return BranchCause.TOOLS
        if is_retry:
            return BranchCause.RETRY
        in_flight = any(node.spoken is None for node in self.nodes)
        return BranchCause.PARALLEL if in_flight else BranchCause.REWRITE

    def _received_rows(self, node: Node, completion: Completion) -> _RouteRows:
        start, sequence = self.routes_from(node) or 0, node.end + len(completion.tokens)
        delta, expected = completion.routing, sequence - 1 - start
        if delta is None and not (self._routes and self._routes.allows_missing):
            raise RoutesMissingError(
                f"engine {completion.engine}: expected rows [{start}, {sequence - 1}) of routes, received none: "
                "run `agent-rl r3 probe URL` to find out why, or set r3.missing to allow missing routes"
            )
        if delta is not None and delta.tokens != expected:
            raise RoutesMissingError(
                f"engine {completion.engine}: expected {expected} rows [{start}, {sequence - 1}), "
                f"received {delta.tokens}"
            )
        partial = completion.finish is FinishReason.ABORT
        return _RouteRows(start, sequence, delta, partial, completion.weight_version, completion.engine)

    def _leaves(self) -> list[Node]:
        """The last node of each branch, in the order in which the branches began. A branch that holds a whole node
        precedes branches that hold a part of it."""
        alive: set[Node] = set()
        with_child: set[Node] = set()
        for node in reversed(self.nodes):
            if node in alive or node.trained:
                alive.add(node)
                if node.parent is not None and node.shared == node.parent.end:
                    alive.add(node.parent)
                    with_child.add(node.parent)
        return sorted(
            alive - with_child, key=lambda leaf: [(node.number, stop < node.end) for node, stop in _path(leaf)]
        )

    def _branch(self, number: int, leaf: Node, claimed: dict[Node, int]) -> Branch:
        path = _path(leaf)
        tokens = self.tokens(leaf)
        loss_mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
        first = next(node for node, _ in path if node not in claimed)
        spans, kept = list[VersionSpan](), list[tuple[int, KeptTokens | None]]()
        for node, stop in path:
            if node in claimed or stop < node.end:
                continue
            if node.trained:
                loss_mask[node.prompt : node.end] = True
                closed = node.prompt + node.closed
                loss_mask[closed - node.inserted : closed] = False
                logprobs[node.prompt : node.end] = node.logprobs
                kept += node.kept
                for span in node.versions:
                    append_version(spans, span)
        parent = None if first.parent is None else claimed.get(first.parent)
        claimed |= {node: number for node, stop in path if node not in claimed and stop == node.end}
        shared = 0 if parent is None else first.shared
        cause = first.cause if number else BranchCause.START  # an earlier request may have been left out
        return Branch(
            tokens, loss_mask, logprobs, _routing(path, len(tokens)), tuple(spans), parent, shared, cause,
            KeptTokens.join(kept),
        )  # fmt: skip


def _added_text(text: str, spoken: str, node: Node) -> str | None:
    """What ``text`` adds to the text ``spoken`` of ``node``, without stop sequence; None if it does not repeat it."""
    if not text.startswith(spoken):
        return None
    rest = text[len(spoken) :].strip()
    if rest in ("", *node.stops):
        return ""
    return rest.removeprefix(node.stopped) if node.stopped and rest.startswith(node.stopped) else None


def _has_calls(calls: Sequence[ToolCall], sampled: Sequence[ToolCall]) -> bool:
    """Whether ``calls`` equal ``sampled``, possibly with additional arguments."""
    return len(calls) == len(sampled) and all(
        call.name == before.name and before.arguments.items() <= call.arguments.items()
        for call, before in zip(calls, sampled, strict=True)
    )


def _path(leaf: Node) -> list[tuple[Node, int]]:
    """``(node, stop)`` from the root to ``leaf``: each node with the number of tokens of its path that the next node
    shares."""
    path: list[tuple[Node, int]] = []
    node: Node | None = leaf
    stop = leaf.end
    while node is not None:
        path.append((node, stop))
        stop = node.shared
        node = node.parent
    return path[::-1]


def _routing(path: Sequence[tuple[Node, int]], tokens: int) -> Routing | None:
    """The rows of routes of a path; None if none were kept or received. Raises RoutesMissingError if they do not
    align."""
    route_rows = list(_needed_rows(path))
    first = next((rows.routing for rows in route_rows if rows.routing is not None), None)
    if first is None:
        return None
    stitcher = RouteStitcher(
        moe_layers=first.moe_layers, top_k=first.top_k, num_experts=first.num_experts, capacity=tokens
    )
    try:
        for rows in route_rows:
            stitcher.truncate(rows.start)
            if rows.routing is not None:
                stitcher.append(rows.routing, sequence=rows.sequence, partial=rows.partial)
            else:
                stitcher.append_missing(
                    sequence=rows.sequence, version=rows.version, engine=rows.engine, partial=rows.partial
                )
        return stitcher.finish(tokens)
    except RoutingError as error:
        raise RoutesMissingError(f"engine {route_rows[-1].engine}: {error}") from error


def _needed_rows(path: Sequence[tuple[Node, int]]) -> Iterator[_RouteRows]:
    """The responses that hold the rows of a path, without responses whose rows a later node received again."""
    starts = [min((rows.start for rows in node.route_rows), default=1 << 62) for node, _ in path]
    for index, (node, _) in enumerate(path):
        resent_from = min(starts[index + 1 :], default=1 << 62)
        yield from (rows for rows in node.route_rows if rows.start < resent_from)


def _common(first: Tokens, second: Tokens) -> int:
    """Length of the common prefix of two token arrays."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    first_difference = int(differ.argmax()) if length else 0
    return first_difference if length and differ[first_difference] else length


def _digest_input(message: ChatMessage) -> bytes:
    words = message.text + message.reasoning
    if not message.calls:  # the usual case: one text, encoded at once
        return f"{message.role} 0 {len(message.text)} {words}".encode(errors="surrogatepass")
    calls = [(call.name, dict(call.arguments)) for call in message.calls]
    written = orjson.dumps(calls, option=orjson.OPT_SORT_KEYS)
    head = f"{message.role} {len(written)} {len(message.text)} ".encode()
    return head + written + words.encode(errors="surrogatepass")
