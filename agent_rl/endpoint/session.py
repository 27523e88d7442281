"""One episode as seen by its endpoint: requests in, replies out, the conversation tree, and why the episode ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent_rl.config import RolloutConfig
from agent_rl.config.rollout import TrainIfConfig
from agent_rl.endpoint.constraints import Constraint, constraint_of, forced_opening
from agent_rl.endpoint.messages import ChatRequest, ChatResponse, Finish, RequestRejected, with_read_calls
from agent_rl.endpoint.stop_sequences import PIECE, find_stop, tokens_of, tokens_until_stop
from agent_rl.endpoint.training_rules import RequestKind, apply_training_rules
from agent_rl.engine.types import Engine
from agent_rl.errors import EngineAborted, EngineError, TemplateError
from agent_rl.rollout.conversation_tree import ChatMessage, ConversationTree, Node, RequestPlan, Tokens, Tools
from agent_rl.rollout.episode import MAX_ABORTS, EpisodeRules
from agent_rl.rollout.initial_prompt import Renderer, build_initial_prompt
from agent_rl.rollout.thought_limits import ThoughtLength, TurnBudget, measure_thoughts
from agent_rl.types import Completion, FinishReason, SamplingParams, StopReason, TokenIds, Turn
from tools import ParsedTurn, ToolCall, ToolCallFormat, ToolResult, ToolSet, parse_turn

_BYTES_A_TOKEN, _SPARE_BYTES = 16, 64 << 10
_BODIES_AT_ONCE = 8
"""Request bodies of a session that are read at once: each may have 32 MiB."""


class ExtendingRenderer(Renderer, Protocol):
    """A renderer that can append any messages to a turn: :class:`agent_rl.render.ChatRenderer`."""

    @property
    def history_fields(self) -> bool:
        """Whether the chat template reads the thoughts and calls of earlier turns from fields of their messages."""
        ...

    def extension(self, messages: Sequence[Mapping[str, Any]], *, stop: int | None) -> list[int]: ...

    def plain_text(self, text: str) -> list[int]: ...

    def written(self, text: str) -> list[int]: ...


class HarnessRenderer:
    """Implements :class:`agent_rl.rollout.conversation_tree.Rendering` with the run's renderer and tool format."""

    def __init__(
        self, renderer: ExtendingRenderer, fmt: ToolCallFormat, *, describe_tools: bool, follow: bool = False
    ) -> None:
        self.renderer, self.fmt, self._describe, self._follow = renderer, fmt, describe_tools, follow

    @classmethod
    def from_config(cls, renderer: ExtendingRenderer, fmt: ToolCallFormat, rollout: RolloutConfig) -> HarnessRenderer:
        """The renderer under ``rollout``. ``history`` is keep if no program is configured."""
        follow = rollout.harness is not None and rollout.harness.history == "follow"
        return cls(renderer, fmt, describe_tools=rollout.describe_tools, follow=follow)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.renderer.stop_token_ids

    @property
    def history_fields(self) -> bool:
        return self.renderer.history_fields

    def must_rerender(self, messages: Sequence[ChatMessage]) -> bool:
        """With ``follow``, after a user message: some templates then drop the reasoning of earlier turns."""
        return self._follow and any(message.role == "user" for message in messages)

    def initial_prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> Sequence[int]:
        rendered = [part for index, each in enumerate(messages) for part in self._as_dicts(each, first=index == 0)]
        if not tools:
            return self.renderer.initial_prompt(rendered, None)
        return build_initial_prompt(self.renderer, self.fmt, rendered, tools, describe_tools=self._describe)[1]

    def extension(self, messages: Sequence[ChatMessage], *, stop: int | None) -> Sequence[int]:
        rendered = [part for message in messages for part in self._as_dicts(message, first=False)]
        return self.renderer.extension(rendered, stop=stop)

    def added_text(self, text: str) -> Sequence[int]:
        return self.renderer.plain_text(text)

    def _as_dicts(self, message: ChatMessage, *, first: bool) -> list[dict[str, Any]]:
        """The message for the renderer. System messages inside a conversation become user messages: templates accept
        only one, at the start."""
        if message.role == "assistant" and self.history_fields:
            return self._as_fields(message)
        role = "user" if message.role == "system" and not first else message.role
        open_, close = self.renderer.reasoning.open, self.renderer.reasoning.close
        thoughts = f"{open_}\n{message.reasoning}\n{close}\n\n" if message.reasoning else ""
        calls = [self.fmt.render(call) for call in message.calls]
        return [{"role": role, "content": thoughts + _joined(message.text, *calls)}]

    def _as_fields(self, message: ChatMessage) -> list[dict[str, Any]]:
        """An assistant's message in gpt-oss's form: one call a message, and text before it is a thought. Calls in a
        format that the template does not write are text."""
        if self.fmt.name != self.renderer.tool_format or not message.calls:
            text = _joined(message.text, *map(self.fmt.render, message.calls))
            return [{"role": "assistant", "content": text, "thinking": message.reasoning}]
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.calls]
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            for function in functions
        ]
        messages[0]["thinking"] = _joined(message.reasoning, message.text)
        return messages


def _joined(*parts: str) -> str:
    return "\n".join(filter(None, parts))


@dataclass(slots=True)
class _ReplyStats:
    """Measurements of a reply. ``began``: seconds after the session's start. ``seconds``: sampling time. ``cached``:
    prompt tokens that the engine had cached. ``clients``: open requests for the reply."""

    began: float
    seconds: float = 0.0
    cached: int = 0
    retractions: int = 0
    version: str = ""
    finish: FinishReason = FinishReason.STOP
    clients: int = 0


@dataclass(eq=False)
class Session:
    """Answers the requests of one episode with what ``engine`` samples.

    ``context``: maximum tokens of a conversation. ``key``: the secret that requests carry. ``tools``: the task's tools,
    for a program that runs on the host. ``resumable``: the engine can continue a part of a reply.
    """

    name: str
    engine: Engine
    rendering: HarnessRenderer
    rules: EpisodeRules
    context: int
    tools: ToolSet | None = None
    messages: Sequence[Mapping[str, str]] = ()
    resumable: bool = True
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        self.tree = ConversationTree(self.rendering, routes=self.rules.routes)
        self.ended: StopReason | None = None
        self.context_full = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stats: dict[Node, _ReplyStats] = {}
        self._kinds: dict[Node, RequestKind] = {}
        self._constraints: dict[Node, Constraint | None] = {}
        self._constrained_from: dict[Node, int] = {}  # the first token of the reply under its grammar
        self._sampling: dict[Node, asyncio.Task[None]] = {}
        self._started = time.perf_counter()
        self.reading = asyncio.Semaphore(_BODIES_AT_ONCE)  # held while a request's body is read

    @property
    def max_output_tokens(self) -> int:
        """Maximum sampled tokens of a reply."""
        return min(self.rules.rollout.max_new_tokens, self.context)

    def check_size(self, size: int) -> None:
        """Reject a request whose ``size`` in bytes no conversation within the context has: its tokenization would stop
        all episodes for seconds."""
        if size > _SPARE_BYTES + _BYTES_A_TOKEN * self.context:
            self.context_full = True
            raise RequestRejected(
                "full", "the conversation fills the context", tokens=size // _BYTES_A_TOKEN, limit=self.context
            )

    async def constraint(self, request: ChatRequest) -> Constraint | None:
        """That of the reply to ``request``, for :meth:`begin`; None if it has none. Raises RequestRejected."""
        try:
            return await constraint_of(self.engine, self.rendering.fmt, request)
        except EngineError as error:
            self._fail(error)
            raise RequestRejected("ended", f"the episode is over: {error}") from error

    def begin(self, request: ChatRequest, constraint: Constraint | None = None) -> Node:
        """Start to sample a reply, or return the undelivered reply to an identical earlier request. Then await
        :meth:`sampling`, and call :meth:`leave` in any case. Raises RequestRejected."""
        self._check_open()
        node = self._find_or_start(request, constraint)
        self._stats[node].clients += 1
        return node

    def _find_or_start(self, request: ChatRequest, constraint: Constraint | None) -> Node:
        plan = self._plan_request(request)
        for node in plan.undelivered:
            if not self._stats[node].clients:
                return node
        renderer, opening = self.rendering.renderer, list[int]()
        at_once = constraint is not None and not constraint.heads
        if self.resumable:
            opening = forced_opening(renderer, self.rendering.fmt, request, constrained=at_once)
        if (tokens := len(plan.prompt) + len(opening)) >= self.context:
            self.context_full = True
            raise RequestRejected("full", "the conversation fills the context", tokens=tokens, limit=self.context)
        if len(self.tree.nodes) >= self.rules.rollout.max_turns:
            self.end(StopReason.MAX_TURNS)
            self._check_open()
        self.context_full = False
        node = self.tree.begin(plan, request.stops, opening)
        self._stats[node] = _ReplyStats(time.perf_counter() - self._started)
        self._kinds[node] = RequestKind.of(request)
        self._constraints[node] = constraint
        if at_once:
            self._constrained_from[node] = len(renderer.end_of_thoughts) if renderer.reasoning.prompt_opens else 0
        self._sampling[node] = asyncio.create_task(
            self._sample(node, request, self.tree.tokens(node)), name=f"reply-{self.name}-{node.number}"
        )
        return node

    def sampling(self, node: Node) -> asyncio.Task[None]:
        """Done once the reply is complete or has failed. Waiting for it does not cancel it."""
        return self._sampling[node]

    def reply(self, node: Node, request: ChatRequest) -> ChatResponse:
        """The response to ``request`` once :meth:`sampling` is done. Raises RequestRejected if sampling failed."""
        sampling = self._sampling[node]
        if sampling.cancelled():
            raise RequestRejected("ended", "the episode is over")
        if (error := sampling.exception()) is not None:
            raise RequestRejected("ended", f"the episode is over: {error}") from error
        assert node.spoken is not None
        return self._response(node, request, node.spoken)

    def leave(self, node: Node) -> None:
        """The reply's client received it or disconnected. Another client with the same request may now get it."""
        self._stats[node].clients -= 1

    async def call(self, call: ToolCall) -> ToolResult:
        """Call one of the task's tools. Raises RequestRejected, and SandboxError if the sandbox failed, which ends
        the session."""
        self._check_open()
        if self.tools is None:
            raise RequestRejected(
                "bad", "this session has no tools: its program runs in the sandbox, or its episode is text"
            )
        try:
            result = await self.tools.call(call)
        except Exception as error:
            self._fail(error)
            raise
        if result.submitted:
            self.end(StopReason.SUBMITTED)
        return result

    def count_tokens(self, request: ChatRequest) -> int:
        """Number of tokens of the request's conversation. Raises RequestRejected."""
        return len(self._plan_request(request).prompt)

    def end(self, reason: StopReason) -> None:
        """Reject further requests. The first reason is kept."""
        self.ended = self.ended or reason

    async def close(self) -> None:
        """End the session and cancel replies that are being sampled."""
        self.end(StopReason.CANCELLED)
        running = [task for task in self._sampling.values() if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task in self._sampling.values():
            if not task.cancelled():
                task.exception()  # reported by ``broken``
        if self.broken.done():
            self.broken.exception()

    def apply_training_rules(self) -> None:
        """Decide which replies are trained. Call it before the tree's branches, :meth:`turns` and :meth:`counts`."""
        harness = self.rules.rollout.harness
        apply_training_rules(harness.train_if if harness else TrainIfConfig(), self.tree, self._kinds)

    def counts(self) -> dict[str, int]:
        """Counts for the metrics harness/*."""
        nodes = [node for node in self.tree.nodes if not node.left_out][1:]
        causes = [node.cause for node in nodes if node.parent is None or node.shared < node.parent.end]
        return {
            "rewrites": sum(cause in ("rewrite", "tools") for cause in causes),
            "retries": sum(bool(node.retried) for node in self.tree.nodes),
            "echo_differs": self.tree.echo_differs,
        }

    def turns(self) -> tuple[Turn, ...]:
        """The complete replies, in the order of their requests."""
        return tuple(self._turn(node, node.spoken) for node in self.tree.nodes if node.spoken is not None)

    def spoken_messages(self) -> tuple[Mapping[str, str], ...]:
        """The messages of the first branch."""
        messages: list[Mapping[str, str]] = []
        for node in self.tree.first_branch():
            messages += [{"role": message.role, "content": message.text} for message in node.new_messages]
            messages.append({"role": "assistant", "content": node.text})
        return tuple(messages)

    def _plan_request(self, request: ChatRequest) -> RequestPlan:
        if not request.messages or request.messages[-1].role == "assistant":
            raise RequestRejected("bad", "messages: the last message must have role user or tool")
        try:
            return self.tree.plan_request([*map(with_read_calls, request.messages)], request.tools)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestRejected("bad", f"messages: cannot be rendered: {error}") from error

    def _check_open(self) -> None:
        if self.ended is not None:
            raise RequestRejected("ended", f"the episode is over: {self.ended.value}")

    async def _sample(self, node: Node, request: ChatRequest, prompt: Tokens) -> None:
        """Sample the whole reply. A failure ends the session and is reported by ``broken``."""
        started = time.perf_counter()
        try:
            await self._sample_until_complete(node, request, prompt)
            renderer = self.rendering.renderer
            text = renderer.decode(node.reply_tokens)
            found = find_stop(text, request.stops, renderer.reasoning)
            shown = text[: found.start] if found else text
            tools = [] if request.tool_choice == "none" else [*request.tools, *request.deferred_tools]
            spoken = parse_turn(self.rendering.fmt, shown, tools, renderer.reasoning)
            if request.response_schema is not None and not spoken.calls:  # JSON is no malformed call
                spoken = parse_turn(self.rendering.fmt, shown, [], renderer.reasoning)
            self.tree.commit(node, text, spoken, found.text if found else "")
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._stats[node].seconds = time.perf_counter() - started

    def _fail(self, error: Exception) -> None:
        self.end(StopReason.ENGINE_FAILURE)
        if not self.broken.done():
            self.broken.set_exception(error)

    async def _sample_until_complete(self, node: Node, request: ChatRequest, prompt: Tokens) -> None:
        """After an abort the reply continues from the tokens received so far: without limit if new weights
        interrupted it, at most :data:`MAX_ABORTS` times if the engine aborted it on its own."""
        stats, limits, aborts = self._stats[node], self.rules.rollout, 0
        new_tokens = min(request.max_tokens or limits.max_new_tokens, limits.max_new_tokens)
        renderer, context = self.rendering.renderer, self.context - node.prompt
        constrained = bool(node.opening) or node in self._constrained_from
        budget = TurnBudget(renderer, None if constrained else limits.max_thinking_tokens, new_tokens, context)
        while aborts <= MAX_ABORTS:
            if closing := budget.close_thoughts(node.sampled):
                self.tree.insert(node, closing)
                prompt = self.tree.tokens(node)
            heads = self._awaited_heads(node)
            if (request.stops or heads) and self.resumable:
                budget.request = min(budget.request, PIECE)
            completion = await self.engine.generate(
                array("i", prompt.tobytes()),
                self._sampling_params(node, budget.request),
                routes_from=self.tree.routes_from(node),
                session=self.name,
            )
            before = node.reply_tokens
            completion = self._until_strict_call(node, [*before, *completion.tokens], heads, completion)
            if request.stops and (kept := tokens_until_stop(renderer, [*before, *completion.tokens], request.stops)):
                completion = completion.stopped_after(kept - len(before))
            stats.cached = stats.cached or completion.cached_tokens
            stats.retractions += completion.retractions
            stats.version, stats.finish = completion.weight_version, completion.finish
            self.tree.sampled(node, completion)
            aborts += completion.finish is FinishReason.ABORT and not completion.interrupted
            if budget.ends(completion):
                return
            prompt = self.tree.tokens(node)
        raise EngineAborted(f"the engine aborted a reply of {self.name} {aborts} times")

    def _sampling_params(self, node: Node, new_tokens: int) -> SamplingParams:
        """Those of the next request of the reply. Its grammar continues after the tokens that the reply has."""
        params = self.rules.sampling(new_tokens, self.rendering.stop_token_ids)
        if (constraint := self._constraints[node]) is None or node not in self._constrained_from:
            return params
        mask = self.rules.masks and params.temperature > 0
        prefix = len(node.reply_tokens) - self._constrained_from[node]
        return replace(params, keep_mask=mask, grammar=constraint.grammar, grammar_prefix=prefix)

    def _awaited_heads(self, node: Node) -> tuple[str, ...]:
        """The texts after which the rest of the reply has a grammar; empty if it has none, or has it already."""
        constraint = self._constraints[node]
        return constraint.heads if constraint and self.resumable and node not in self._constrained_from else ()

    def _until_strict_call(
        self, node: Node, tokens: TokenIds, heads: tuple[str, ...], completion: Completion
    ) -> Completion:
        """``completion``, the end of the reply's ``tokens``, up to the beginning of a call with one of ``heads``; from
        there on the reply has its grammar."""
        renderer = self.rendering.renderer
        if not heads or (found := find_stop(renderer.decode(tokens), heads, renderer.reasoning)) is None:
            return completion
        self._constrained_from[node], kept = tokens_of(renderer, tokens, found)
        cut = completion.stopped_after(kept - len(tokens) + len(completion.tokens))
        return replace(cut, finish=FinishReason.ABORT, interrupted=True)

    def _response(self, node: Node, request: ChatRequest, spoken: ParsedTurn) -> ChatResponse:
        stats = self._stats[node]
        finish: Finish = "tool_calls" if spoken.calls else "stop"
        if stats.finish is FinishReason.LENGTH and not spoken.calls:
            finish = "length"
        return ChatResponse(
            node.id, spoken, finish, node.prompt, len(node.sampled), self._thoughts(node).thinking_tokens,
            min(stats.cached, node.prompt), int(time.time()), request.model, node.stopped,
            self._logprobs(node) if request.logprobs else None,
        )  # fmt: skip

    def _logprobs(self, node: Node) -> list[tuple[str, float]]:
        decode = self.rendering.renderer.decode
        return [(decode([token]), value) for token, value in zip(node.sampled, node.logprobs, strict=True)]

    def _thoughts(self, node: Node) -> ThoughtLength:
        if node.opening:
            return ThoughtLength(0, 0)  # a forced call has no thoughts
        return measure_thoughts(self.rendering.renderer, node.sampled, node.text, node.closed)

    def _turn(self, node: Node, spoken: ParsedTurn) -> Turn:
        stats, call = self._stats[node], spoken.calls[0] if spoken.calls else None
        after = next((n for n in self.tree.nodes if n.parent is node and n.shared == node.end), None)
        return Turn(
            text=node.text,
            tool=call.name if call else None,
            arguments=dict(call.arguments) if call else {},
            parse_failure=spoken.failure,
            observation="\n".join(message.text for message in after.new_messages) if after else "",
            prompt_tokens=node.prompt,
            completion_tokens=len(node.sampled) - node.inserted,
            inserted_tokens=node.inserted,
            observation_tokens=len(after.context) if after else 0,
            cached_tokens=stats.cached,
            weight_version=stats.version,
            generate_seconds=stats.seconds,
            tool_seconds=0.0,
            began=stats.began,
            retractions=stats.retractions,
            left_out=node.left_out,
            **self._thoughts(node)._asdict(),
        )
