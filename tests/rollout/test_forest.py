"""Agent programs over the forest: whatever they do to their conversations, what is trained is what was sampled."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.config import R3Config
from agent_rl.errors import RoutesMissingError
from agent_rl.rollout.conversation_tree import ChatMessage, ConversationTree, Node
from agent_rl.types import Branch, BranchCause, Completion, FinishReason
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, Span, SpanKind
from tools import ParsedTurn, ToolCall

END = 1
ROLES = {"system": 2, "user": 3, "tool": 4, "assistant": 5}
EXPERTS = 251
THOUGHT = ord("a")


class LetterRendering:
    """A token a character, one before each message and one after it; with ``follow`` thoughts before the last message
    of a user are dropped."""

    stop_token_ids = (END,)
    history_fields = False

    def __init__(self, *, follow: bool = False) -> None:
        self.follow = follow

    def initial_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[object]) -> list[int]:
        shown = ChatMessage("system", f"{len(tools)} tools")
        whole = [token for m in (shown, *messages) for token in self._message(m)] + [ROLES["assistant"]]
        last = max((at for at, token in enumerate(whole) if token == ROLES["user"]), default=0)
        return [token for at, token in enumerate(whole) if at >= last or token != THOUGHT] if self.follow else whole

    def extension(self, messages: Sequence[ChatMessage], *, stop: int | None) -> list[int]:
        tail = [token for m in messages for token in self._message(m)]
        return ([END] if stop is None else []) + tail + [ROLES["assistant"]]

    def added_text(self, text: str) -> list[int]:
        return list(text.encode())

    def must_rerender(self, messages: Sequence[ChatMessage]) -> bool:
        return self.follow and any(message.role == "user" for message in messages)

    @staticmethod
    def _message(message: ChatMessage) -> list[int]:
        return [ROLES[message.role], *message.text.encode(), END]


def row_of(tokens: Sequence[int]) -> list[list[int]]:
    """The experts of the last token, which depend on all before it."""
    first = zlib.crc32(np.array(tokens, np.int32).tobytes()) % (EXPERTS - 1)
    return [[first, first + 1]]


def kept_row(name: float) -> list[int]:
    """The kept ids of a sampled token; every third one is drawn from the whole vocabulary."""
    return [-int(name)] * (int(name) % 3)


class Prefixes:
    """An engine whose rows tell the whole prefix, and whose log-probs tell one sampled token from another."""

    def __init__(self) -> None:
        self.count, self.rows, self.unmasked = 0, 0, set[float]()

    def sample(self, prompt: Any, sampled: Any, routes_from: int | None, finish: Any = FinishReason.STOP) -> Completion:
        whole = [*prompt, *sampled]
        routing = None
        if routes_from is not None:
            rows = [row_of(whole[: at + 1]) for at in range(routes_from, len(whole) - 1)]
            self.rows += len(rows)
            spans = (Span(0, len(rows), "0", "e", SpanKind.SAMPLED),) if rows else ()
            experts = np.array(rows, np.uint8).reshape(len(rows), 1, 2)
            routing = Routing(experts, np.ones(len(rows), np.bool_), spans, EXPERTS)
        names = tuple(-float(self.count + n + 1) for n in range(len(sampled)))
        self.count += len(sampled)
        kept = KeptTokens.from_rows([kept_row(name) for name in names]) if self.count % 4 else None
        self.unmasked |= set(names if kept is None else ())
        return Completion(tuple(sampled), names, finish, "0", "e", routing, kept)


@dataclass
class Program:
    """Conversations that grow, are edited, and are requested again, as ``rng`` decides."""

    rng: random.Random
    tree: ConversationTree = field(default_factory=lambda: ConversationTree(LetterRendering(), routes=R3Config()))
    engine: Prefixes = field(default_factory=Prefixes)
    talks: list[tuple[tuple[ChatMessage, ...], int]] = field(default_factory=list)
    pending: list[tuple[Node, tuple[ChatMessage, ...], int]] = field(default_factory=list)
    seen: dict[Node, list[int]] = field(default_factory=dict)

    def run(self, steps: int) -> None:
        self.talks.append(((ChatMessage("system", "s"), ChatMessage("user", "u")), 1))
        for _ in range(steps):
            if self.pending and self.rng.random() < 0.6:
                self.answer()
            else:
                self.ask()
        while self.pending:
            self.answer()

    def ask(self) -> None:
        messages, tools = self.rng.choice(self.talks[-4:])
        messages, tools = self.changed(messages, tools)
        plan = self.tree.plan_request(messages, [{}] * tools)
        late = [node for node in plan.undelivered if node.spoken is not None]
        if late and self.rng.random() < 0.8:
            self.deliver(late[0], messages, tools)
            return
        node = self.tree.begin(plan)
        assert self.tree.tokens(node).tolist() == plan.prompt.tolist()
        self.seen[node] = plan.prompt.tolist()
        self.pending.append((node, messages, tools))

    def answer(self) -> None:
        node, messages, tools = self.pending.pop(self.rng.randrange(len(self.pending)))
        letters = [self.rng.choice(b"ab") for _ in range(self.rng.randrange(4))] + [END] * (self.rng.random() < 0.8)
        cut = self.rng.randrange(len(letters) + 1) if self.rng.random() < 0.2 else 0
        if cut:
            self.sample(node, letters[:cut], FinishReason.ABORT)
        if self.rng.random() < 0.3:
            self.tree.insert(node, b"/>")
        self.sample(node, letters[cut:], FinishReason.STOP)
        text = bytes(token for token in letters if token != END).decode()
        calls = (ToolCall("bash", {"command": text}),) if self.rng.random() < 0.6 else ()
        self.tree.commit(node, text, ParsedTurn("", "" if calls else text, calls))
        if self.rng.random() < 0.85:
            self.deliver(node, messages, tools)
        else:
            self.talks.append((messages, tools))

    def sample(self, node: Node, letters: Sequence[int], finish: FinishReason) -> None:
        prompt = self.tree.tokens(node).tolist()
        assert prompt[: len(self.seen[node])] == self.seen[node]
        completion = self.engine.sample(prompt, letters, self.tree.routes_from(node), finish=finish)
        self.tree.sampled(node, completion)

    def deliver(self, node: Node, messages: tuple[ChatMessage, ...], tools: int) -> None:
        self.tree.deliver(node)
        reply = node.id if node.spoken.calls or self.rng.random() < 0.3 else ""
        echo = ChatMessage("assistant", node.spoken.text, node.spoken.calls, reply=reply)
        roles = self.rng.choice([("tool",), ("user",), ("tool", "tool"), ("tool", "user")])
        tail = tuple(ChatMessage(role, self.rng.choice("xy")) for role in roles)
        self.talks.append(((*messages, echo, *tail), tools))

    def changed(self, messages: tuple[ChatMessage, ...], tools: int) -> tuple[tuple[ChatMessage, ...], int]:
        kind, at = self.rng.random(), self.rng.randrange(len(messages))
        if kind < 0.6:
            return messages, tools
        if kind < 0.7:
            return (*messages[:at], messages[at]._replace(text=messages[at].text + "z"), *messages[at + 1 :]), tools
        if kind < 0.8 and at > 1:
            return (*messages[:at], *messages[at + 1 :]), tools
        if kind < 0.9:
            return (messages[0], ChatMessage("user", "so far: " + self.rng.choice("xy"))), tools
        return messages, self.rng.choice([1, 2])


def check(program: Program) -> tuple[Branch, ...]:
    tree, branches = program.tree, program.tree.branches()
    trained = Counter(value for branch in branches for value in branch.logprobs[branch.loss_mask].tolist())
    wanted = Counter(value for node in tree.nodes if node.trained for value in node.logprobs if value)
    assert trained == wanted
    assert all(count == 1 for count in trained.values())
    for number, branch in enumerate(branches):
        tokens = branch.tokens.tolist()
        assert branch.loss_mask.any()
        assert not branch.logprobs[~branch.loss_mask].any()
        names = branch.logprobs[branch.loss_mask].tolist()
        masks = [[] if name in program.engine.unmasked else kept_row(name) for name in names]
        kept = branch.kept or KeptTokens.from_rows([()] * len(names))
        assert (kept.counts.tolist(), kept.ids.tolist()) == ([len(row) for row in masks], [*chain(*masks)])
        rows = [row_of(tokens[: at + 1]) for at in range(len(tokens) - 1)]
        assert branch.routing.experts[:-1].tolist() == rows
        assert branch.routing.present.tolist() == [True] * (len(tokens) - 1) + [False]
        assert (branch.parent is None) or branch.parent < number
        if branch.parent is not None:
            assert tokens[: branch.shared] == branches[branch.parent].tokens[: branch.shared].tolist()
    names = {value: (node, place) for node in tree.nodes for place, value in enumerate(node.logprobs)}
    for branch in branches:
        for at in np.flatnonzero(branch.loss_mask).tolist():
            node, place = names[float(branch.logprobs[at])]
            assert branch.tokens[:at].tolist() == [*program.seen[node], *node.sampled[:place]]
            assert int(branch.tokens[at]) == node.sampled[place]
    return branches


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 25), st.booleans())
def test_what_is_trained_is_what_was_sampled(seed: int, steps: int, follow: bool) -> None:
    program = Program(random.Random(seed), ConversationTree(LetterRendering(follow=follow), routes=R3Config()))
    program.run(steps)
    check(program)


@pytest.mark.exhaustive
@settings(max_examples=2000, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 60), st.booleans())
def test_what_is_trained_is_what_was_sampled_exhaustively(seed: int, steps: int, follow: bool) -> None:
    program = Program(random.Random(seed), ConversationTree(LetterRendering(follow=follow), routes=R3Config()))
    program.run(steps)
    check(program)


class Talk:
    """A program's requests made by hand."""

    def __init__(self, routes: R3Config | None = None) -> None:
        self.tree, self.engine = ConversationTree(LetterRendering(), routes=routes or R3Config()), Prefixes()

    def begin(self, messages: Sequence[ChatMessage], tools: int = 1) -> Node:
        return self.tree.begin(self.tree.plan_request(messages, [{}] * tools))

    def finish(self, node: Node, said: str, *, calls: tuple[ToolCall, ...] = (), deliver: bool = True) -> ChatMessage:
        letters = [*said.encode(), END]
        completion = self.engine.sample(self.tree.tokens(node).tolist(), letters, self.tree.routes_from(node))
        self.tree.sampled(node, completion)
        self.tree.commit(node, said, ParsedTurn("thought", "" if calls else said, calls))
        if deliver:
            self.tree.deliver(node)
        return ChatMessage("assistant", "" if calls else said, calls, reply=node.id)

    def turn(self, messages: Sequence[ChatMessage], said: str, tools: int = 1, **options: Any) -> ChatMessage:
        return self.finish(self.begin(messages, tools), said, **options)


S, U = ChatMessage("system", "s"), ChatMessage("user", "u")
LS = (ToolCall("bash", {"command": "ls"}),)


def causes(talk: Talk) -> list[BranchCause]:
    return [branch.cause for branch in talk.tree.branches()]


def test_a_linear_program_has_one_branch_and_brings_each_row_once() -> None:
    talk, messages = Talk(), [S, U]
    for number in range(6):
        messages += [talk.turn(messages, f"say {number}"), ChatMessage("tool", f"seen {number}")]
    (branch,) = talk.tree.branches()
    assert branch.cause is BranchCause.START
    assert talk.engine.rows == len(branch.tokens) - 1


def test_an_echo_without_thoughts_or_with_other_blanks_continues_its_branch() -> None:
    talk = Talk()
    said = talk.turn([S, U], "yes")
    seen = ChatMessage("user", "go on")
    for echo in (said._replace(text=" yes\n"), said._replace(reasoning="thought"), said._replace(reply="")):
        assert talk.tree.plan_request([S, U, echo, seen], [{}]).parent is talk.tree.nodes[0]
    assert talk.tree.echo_differs == 0
    plan = talk.tree.plan_request([S, U, said._replace(text="no"), seen], [{}])
    assert (plan.shared, talk.tree.echo_differs) == (len(talk.tree.nodes[0].context), 1)


def test_arguments_that_a_program_adds_to_a_call_which_it_names_begin_no_branch() -> None:
    """Claude Code gives its editing tool's calls their defaults."""
    talk = Talk()
    call = ToolCall("edit", {"old": ["a"]})
    said = talk.turn([S, U], "<raw>", calls=(call,))
    seen = ChatMessage("tool", "x")

    def shared(echo: ChatMessage, **arguments: Any) -> int:
        calls = (replace(call, arguments=arguments),)
        return talk.tree.plan_request([S, U, echo._replace(calls=calls), seen], [{}]).shared

    whole = talk.tree.nodes[0].end
    assert shared(said, old=["a"], everywhere=False) == whole
    assert shared(said._replace(reply=""), old=["a"]) == whole
    for other in (shared(said, old=["b"], everywhere=False), shared(said._replace(reply=""), old=["a"], new="b")):
        assert other < whole
    assert shared(said) < whole


def test_a_program_continues_after_messages_that_were_not_sampled() -> None:
    """An example in its prompt, or one edited reply: what was sampled later is found, not encoded again."""
    talk, messages = Talk(), [S, U, ChatMessage("assistant", "an example"), U]

    def go_on() -> None:
        for number in range(3):
            said = talk.turn(messages, f"<raw {number}>", calls=LS)
            messages.extend([said._replace(reply=""), ChatMessage("tool", f"seen {number}")])

    go_on()
    (branch,) = talk.tree.branches()
    assert talk.engine.rows == len(branch.tokens) - 1
    messages[4] = ChatMessage("assistant", "edited")
    go_on()
    assert causes(talk) == [BranchCause.START, BranchCause.REWRITE]
    assert talk.tree.echo_differs == 1


def test_a_retry_of_an_undelivered_reply_is_the_same_node() -> None:
    talk = Talk()
    node = talk.begin([S, U])
    assert talk.tree.plan_request([S, U], [{}]).undelivered == (node,)
    talk.finish(node, "late", deliver=False)
    assert talk.tree.plan_request([S, U], [{}]).undelivered == (node,)
    assert talk.tree.branches() == ()
    talk.tree.deliver(node)
    assert talk.tree.plan_request([S, U], [{}]).undelivered == ()


def test_a_replaced_reply_is_trained_only_if_the_program_continues_it() -> None:
    talk = Talk()
    first = talk.turn([S, U], "first")
    talk.turn([S, U], "second")
    (branch,) = talk.tree.branches()
    assert bytes(branch.tokens[branch.loss_mask].tolist()[:-1]) == b"second"
    talk.turn([S, U, first, U], "third")
    assert causes(talk) == [BranchCause.START, BranchCause.RETRY]


def test_two_calls_at_once_are_two_branches_that_share_their_prompt() -> None:
    talk = Talk()
    first = talk.begin([S, U])
    second = talk.begin([S, U, ChatMessage("user", "other")])
    talk.finish(second, "b")
    talk.finish(first, "a")
    branches = talk.tree.branches()
    assert [(branch.parent, branch.cause) for branch in branches] == [(None, "start"), (None, "parallel")]
    assert [int(branch.loss_mask.sum()) for branch in branches] == [2, 2]


def test_other_tools_and_rewritten_messages_name_their_cause() -> None:
    talk = Talk()
    said = talk.turn([S, U], "a")
    talk.turn([S, U, said, U], "b", tools=2)
    talk.turn([S, ChatMessage("user", "so far: a")], "c")
    assert causes(talk) == [BranchCause.START, BranchCause.TOOLS, BranchCause.REWRITE]


def test_a_reply_repeated_in_a_rewritten_conversation_has_the_text_that_was_sampled() -> None:
    talk = Talk()
    said = talk.turn([S, U], "<raw ls>", calls=LS)
    plan = talk.tree.plan_request([S, ChatMessage("user", "other"), said, ChatMessage("tool", "x")], [{}])
    assert b"<raw ls>" in bytes(plan.prompt.tolist())


def test_missing_rows_are_refused_or_recorded() -> None:
    talk = Talk()
    node = talk.begin([S, U])
    strip = Completion((65, END), (-1.0, -1.0), FinishReason.STOP, "0", "e")
    with pytest.raises(RoutesMissingError, match="received none"):
        talk.tree.sampled(node, strip)
    talk = Talk(R3Config(missing="without_replay"))
    node = talk.begin([S, U])
    talk.tree.sampled(node, strip)
    talk.tree.commit(node, "A", ParsedTurn(text="A"))
    talk.tree.deliver(node)
    said = ChatMessage("assistant", "A", reply=node.id)
    talk.turn([S, U, said, U], "b")
    (branch,) = talk.tree.branches()
    assert branch.routing is not None
    assert branch.routes_missing == node.end - 1
