"""One episode as its endpoint sees it: requests in, replies out, the forest between, and why it ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent_rl.config import RolloutConfig
from agent_rl.endpoint.messages import Ask, Finish, Refusal, Reply
from agent_rl.engine.types import Engine
from agent_rl.errors import EngineAborted, TemplateError
from agent_rl.rollout.conversation_tree import ChatMessage, ConversationTree, Node, Plan, Tokens, Tools
from agent_rl.rollout.episode import MAX_ABORTS, EpisodeRules
from agent_rl.rollout.initial_prompt import Renderer, open_conversation
from agent_rl.types import FinishReason, StopReason, Turn
from tools import Spoken, ToolCall, ToolCallFormat, ToolResult, ToolSet, parse_turn


class ExtendingRenderer(Renderer, Protocol):
    """A renderer that appends any messages to a turn: :class:`agent_rl.render.ChatRenderer`."""

    def extension(self, messages: Sequence[Mapping[str, str]], *, stop_included: bool) -> list[int]: ...


class HarnessRenderer:
    """:class:`agent_rl.rollout.conversation_tree.Rendering`: messages as the run's renderer and tool format write
    them."""

    def __init__(
        self, renderer: ExtendingRenderer, fmt: ToolCallFormat, *, describe_tools: bool, follow: bool = False
    ) -> None:
        self.renderer, self.fmt, self._describe, self._follow = renderer, fmt, describe_tools, follow

    @classmethod
    def of(cls, renderer: ExtendingRenderer, fmt: ToolCallFormat, rollout: RolloutConfig) -> HarnessRenderer:
        """As ``rollout`` says; where no program is named there, ``history`` is keep."""
        follow = rollout.harness is not None and rollout.harness.history == "follow"
        return cls(renderer, fmt, describe_tools=rollout.describe_tools, follow=follow)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.renderer.stop_token_ids

    def begins_anew(self, messages: Sequence[ChatMessage]) -> bool:
        """With ``follow`` after a user's message: some templates then drop the thoughts of turns before."""
        return self._follow and any(message.role == "user" for message in messages)

    def opening(self, messages: Sequence[ChatMessage], tools: Tools) -> Sequence[int]:
        shown = [self._shown(message, first=at == 0) for at, message in enumerate(messages)]
        if not tools:
            return self.renderer.opening(shown, None)
        return open_conversation(self.renderer, self.fmt, shown, tools, describe_tools=self._describe)[1]

    def extension(self, messages: Sequence[ChatMessage], *, stop_included: bool) -> Sequence[int]:
        shown = [self._shown(message, first=False) for message in messages]
        return self.renderer.extension(shown, stop_included=stop_included)

    def _shown(self, message: ChatMessage, *, first: bool) -> dict[str, str]:
        """A system message within a conversation becomes the user's: templates take one, at the start."""
        role = "user" if message.role == "system" and not first else message.role
        thoughts = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
        calls = [self.fmt.render(call) for call in message.calls]
        return {"role": role, "content": thoughts + "\n".join(part for part in (message.text, *calls) if part)}


@dataclass(slots=True)
class _Took:
    """What a reply took: when it was begun and how long it was sampled, in seconds; tokens that the engine had."""

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

    ``context``: the most tokens that a conversation may have. ``key`` is the secret that requests bring. ``tools`` are
    those of the task, for a program that runs on the host.
    """

    name: str
    engine: Engine
    rendering: HarnessRenderer
    rules: EpisodeRules
    context: int
    tools: ToolSet | None = None
    messages: Sequence[Mapping[str, str]] = ()
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        self.forest = ConversationTree(self.rendering, routes=self.rules.routes)
        self.ended: StopReason | None = None
        self.context_full = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._took: dict[Node, _Took] = {}
        self._sampling: dict[Node, asyncio.Task[None]] = {}
        self._started = time.perf_counter()

    def begin(self, ask: Ask) -> Node:
        """Begin to sample a reply, or find the one that a request before this asked for and did not get; then await
        :meth:`sampling`, and :meth:`leave` it however that goes. Raises Refusal."""
        self._check_open()
        node = self._found_or_begun(ask)
        self._took[node].clients += 1
        return node

    def _found_or_begun(self, ask: Ask) -> Node:
        plan = self._planned(ask)
        for node in plan.waiting:
            if not self._took[node].clients:
                return node
        if len(plan.prompt) >= self.context:
            self.context_full = True
            raise Refusal("full", "the conversation fills the context", tokens=len(plan.prompt), most=self.context)
        if len(self.forest.nodes) >= self.rules.rollout.max_turns:
            self.end(StopReason.MAX_TURNS)
            self._check_open()
        self.context_full = False
        node = self.forest.begin(plan)
        self._took[node] = _Took(time.perf_counter() - self._started)
        self._sampling[node] = asyncio.create_task(
            self._sample(node, ask, plan.prompt), name=f"reply-{self.name}-{node.number}"
        )
        return node

    def sampling(self, node: Node) -> asyncio.Task[None]:
        """Done once a reply is whole or never will be; whoever waits for it leaves it running."""
        return self._sampling[node]

    def reply(self, node: Node, ask: Ask) -> Reply:
        """What answers ``ask``, once :meth:`sampling` is done. Raises Refusal where it never will be whole."""
        sampling = self._sampling[node]
        if sampling.cancelled():
            raise Refusal("ended", "the episode is over")
        if (error := sampling.exception()) is not None:
            raise Refusal("ended", f"the episode is over: {error}") from error
        assert node.spoken is not None
        return self._reply(node, ask, node.spoken)

    def leave(self, node: Node) -> None:
        """The client of a reply got it, or left: another that asks the same may have it."""
        self._took[node].clients -= 1

    async def call(self, call: ToolCall) -> ToolResult:
        """Call one of the task's tools. Raises Refusal; SandboxError where the sandbox broke, which ends the
        session."""
        self._check_open()
        if self.tools is None:
            raise Refusal("bad", "this session has no tools: its program runs in the sandbox itself")
        try:
            result = await self.tools.call(call)
        except Exception as error:
            self._break(error)
            raise
        if result.submitted:
            self.end(StopReason.SUBMITTED)
        return result

    def count_tokens(self, ask: Ask) -> int:
        """Tokens of the request's conversation. Raises Refusal."""
        return len(self._planned(ask).prompt)

    def end(self, why: StopReason) -> None:
        """Refuse all further requests; the first reason holds."""
        self.ended = self.ended or why

    async def close(self) -> None:
        """End the session, and what is still being sampled."""
        self.end(StopReason.CANCELLED)
        running = [task for task in self._sampling.values() if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task in self._sampling.values():
            if not task.cancelled():
                task.exception()  # told by ``broken``
        if self.broken.done():
            self.broken.exception()

    def counts(self) -> dict[str, int]:
        """What the program did besides going on: metrics harness/*."""
        causes = [node.cause for node in self.forest.nodes if node.parent is None or node.shared < node.parent.end]
        return {
            "rewrites": sum(cause in ("rewrite", "tools") for cause in causes),
            "retries": sum(bool(node.replaces) for node in self.forest.nodes),
            "echo_differs": self.forest.echo_differs,
        }

    def turns(self) -> tuple[Turn, ...]:
        """The replies that are whole, in the order in which they were asked for."""
        return tuple(self._turn(node, node.spoken) for node in self.forest.nodes if node.spoken is not None)

    def spoken_messages(self) -> tuple[Mapping[str, str], ...]:
        """The messages of the first branch."""
        said: list[Mapping[str, str]] = []
        for node in self.forest.line():
            said += [{"role": message.role, "content": message.text} for message in node.asked]
            said.append({"role": "assistant", "content": node.text})
        return tuple(said)

    def _planned(self, ask: Ask) -> Plan:
        if not ask.messages or ask.messages[-1].role == "assistant":
            raise Refusal("bad", "messages: the last one must be the user's or a tool's; replies are not continued")
        try:
            return self.forest.plan(ask.messages, ask.tools)
        except (TemplateError, TypeError, ValueError) as error:
            raise Refusal("bad", f"messages: they cannot be rendered: {error}") from error

    def _check_open(self) -> None:
        if self.ended is not None:
            raise Refusal("ended", f"the episode is over: {self.ended.value}")

    async def _sample(self, node: Node, ask: Ask, prompt: Tokens) -> None:
        """All of a reply. A failure ends the session, which says so by ``broken``."""
        started = time.perf_counter()
        try:
            await self._until_whole(node, ask, prompt)
            text = self.rendering.renderer.decode(node.sampled)
            self.forest.commit(node, text, parse_turn(self.rendering.fmt, text, [*ask.tools, *ask.later]))
        except Exception as error:
            self._break(error)
            raise
        finally:
            self._took[node].seconds = time.perf_counter() - started

    def _break(self, error: Exception) -> None:
        self.end(StopReason.ENGINE_FAILURE)
        if not self.broken.done():
            self.broken.set_exception(error)

    async def _until_whole(self, node: Node, ask: Ask, prompt: Tokens) -> None:
        """Where the request is aborted the reply goes on from what came: whenever it was cut for new weights, and a
        few times where the engine gave it up."""
        took, limit = self._took[node], ask.max_tokens or self.rules.rollout.max_new_tokens
        left = min(limit, self.rules.rollout.max_new_tokens, self.context - node.prompt)
        aborts = 0
        while aborts <= MAX_ABORTS:
            completion = await self.engine.generate(
                array("i", prompt.tobytes()),
                self.rules.sampling(left, self.rendering.stop_token_ids),
                routes_from=self.forest.routes_from(node),
                session=self.name,
            )
            took.cached = took.cached or completion.cached_tokens
            took.retractions += completion.retractions
            took.version, took.finish = completion.weight_version, completion.finish
            self.forest.sampled(node, completion)
            left -= len(completion.tokens)
            aborted = completion.finish is FinishReason.ABORT
            aborts += aborted and not completion.cut
            if not aborted or left == 0:
                return
            prompt = self.forest.tokens(node)
        raise EngineAborted(f"the engine aborted a reply of {self.name} {aborts} times")

    def _reply(self, node: Node, ask: Ask, spoken: Spoken) -> Reply:
        took = self._took[node]
        finish: Finish = "tool_calls" if spoken.calls else "stop"
        if took.finish is FinishReason.LENGTH and not spoken.calls:
            finish = "length"
        return Reply(
            node.id, spoken, finish, node.prompt, len(node.sampled), min(took.cached, node.prompt), int(time.time()),
            ask.model,
        )  # fmt: skip

    def _turn(self, node: Node, spoken: Spoken) -> Turn:
        took, call = self._took[node], spoken.calls[0] if spoken.calls else None
        after = next((n for n in self.forest.nodes if n.parent is node and n.shared == node.end), None)
        return Turn(
            text=node.text,
            tool=call.name if call else None,
            arguments=dict(call.arguments) if call else {},
            parse_failure=spoken.failure,
            observation="\n".join(message.text for message in after.asked) if after else "",
            prompt_tokens=node.prompt,
            completion_tokens=len(node.sampled),
            observation_tokens=len(after.context) if after else 0,
            cached_tokens=took.cached,
            weight_version=took.version,
            generate_seconds=took.seconds,
            tool_seconds=0.0,
            began=took.began,
            retractions=took.retractions,
        )
