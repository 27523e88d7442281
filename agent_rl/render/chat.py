"""Renders messages to tokens, append-only: a conversation only grows, and sampled tokens are never re-tokenized.

Only the template produces control tokens: the tokenizer's added tokens marked special (``<|im_end|>``, ...). Their text
may occur in files and logs; encoded naively, an observation could end its own turn. So content is *guarded* before
rendering: a string that occurs nowhere in it (one or more private-use characters) is inserted into every such text. The
rendering is split at the remaining special tokens, which belong to the template. The text between them is encoded
without guards and with special tokens disabled. Text between two special tokens is encoded in one piece, so merges
across the border of template and content equal the plain tokenizer's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from agent_rl.errors import TemplateError
from agent_rl.render.prefix_check import (
    TAILS,
    Delta,
    Probed,
    Role,
    after_turn,
    around_thoughts,
    check_tail,
    closes_thoughts,
    probe,
    reasoning_of,
)
from agent_rl.render.profiles import profile_of
from agent_rl.render.template import (
    ChatModel,
    ChatTemplate,
    Messages,
    Thinking,
    Tools,
    check_thinking,
    template_variables,
)
from agent_rl.render.template_limits import check_limits
from agent_rl.types import SampledCall
from tools import ToolCall, ToolCallFormat
from tools.types import WritesTurns

_ROLES: tuple[Role, ...] = ("tool", "user")
_GUARDS = tuple(map(chr, range(0xE000, 0xF900)))  # the private use area


class Encoder:
    """Encodes guarded renderings with one tokenizer, and decodes tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.reference = _copy(tokenizer)
        self._plain = _copy(tokenizer)
        self._plain.encode_special_tokens = True
        added = tokenizer.get_added_tokens_decoder()
        self.special: dict[str, int] = {token.content: id for id, token in added.items() if token.special}
        self._check_special()
        longest_first = sorted(self.special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def guard_for(self, content: Any) -> str:
        """A guard for ``content`` (a JSON value) that does not occur in it; "" if nothing in ``content`` needs
        guarding."""
        text = "".join(_strings(content))
        if not self._pattern.search(text):
            return ""
        return next(guard for length in itertools.count(1) for guard in _unused_guards(text, length))

    def guarded(self, content: Any, guard: str) -> Any:
        """``content`` with ``guard`` inserted into the text of every control token, at any depth."""
        if not guard:
            return content
        if isinstance(content, str):
            while self._pattern.search(content):  # splitting one may leave another that overlapped it
                content = self._pattern.sub(lambda match: match[0][0] + guard + match[0][1:], content)
            return content
        if isinstance(content, Mapping):
            return {self.guarded(key, guard): self.guarded(value, guard) for key, value in content.items()}
        if isinstance(content, list | tuple):
            return [self.guarded(item, guard) for item in content]
        return content

    def encode(self, rendered: str, guard: str = "") -> list[int]:
        """The tokens of ``rendered``, whose content was guarded with ``guard``."""
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(rendered):
            ids += self._encode_text(rendered[position : match.start()], guard)
            ids.append(self.special[match[0]])
            position = match.end()
        return ids + self._encode_text(rendered[position:], guard)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, control tokens included."""
        text: str = self.reference.decode(list(tokens), skip_special_tokens=False)
        return text

    def _encode_text(self, text: str, guard: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._plain.encode(text.replace(guard, "") if guard else text, add_special_tokens=False).ids
        return ids

    def _check_special(self) -> None:
        if not self.special:
            raise TemplateError("the tokenizer has no special tokens, so nothing can mark the end of a turn")
        control = set(self.special.values())
        for text in self.special:
            if len(text) < 2 or control.intersection(self._encode_text(text, "")):
                raise TemplateError(f"the tokenizer cannot write the special token {text!r} as plain text")


def _unused_guards(text: str, length: int) -> Iterator[str]:
    """Guards of ``length`` characters that do not occur in ``text``, in linear time."""
    substrings = {text[start : start + length] for start in range(len(text))}
    return (guard for guard in map("".join, itertools.product(_GUARDS, repeat=length)) if guard not in substrings)


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _strings(content: Any) -> Iterable[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _strings(item)


_CALL_ID = re.compile(r"<\|tool_call_begin\|>\s*(\S+?)\s*<\|tool_call_argument_begin\|>")


def _id_of(call: SampledCall) -> str:
    """The id of ``call``, which Kimi samples."""
    match = _CALL_ID.search(call.turn)
    return match[1] if match else ""


_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class ChatRenderer:
    """Renders one model's conversations.

    ``model`` is a Hugging Face directory (``tokenizer.json`` and a chat template) or a :class:`ChatModel`. The template
    is probed once here; a template without a constant opening and delta is refused with ``TemplateError`` (see
    :mod:`agent_rl.render.prefix_check`). ``thinking`` and ``options`` are the keys of ``rollout`` (see
    :mod:`agent_rl.render.template`).
    ``tool_format`` is the name of the family's tool-call format.
    ``observation_role`` is the role of observations; None selects tool if the template can append it, else user.
    """

    def __init__(
        self,
        model: Path | ChatModel,
        *,
        thinking: Thinking = "default",
        options: Mapping[str, Any] = _NO_OPTIONS,
        observation_role: Role | None = None,
    ) -> None:
        where = f"{model}: " if isinstance(model, Path) else ""
        source = model if isinstance(model, ChatModel) else ChatModel.from_dir(model)
        try:
            self._encoder = Encoder(source.tokenizer)
            check_limits(source.template, source.special, {})
            variables = template_variables(source.template, thinking, options)
            check_limits(source.template, source.special, variables)
            self._template = ChatTemplate(source.template, source.special, variables)
            self._deltas = self._probe_roles(observation_role, source.eos_token_ids)
            self.observation_role: Role = self._preferred if observation_role is None else observation_role
            profile = profile_of(source.model_type)
            self.tool_format = profile.tool_format(source.template)
            self.history_fields = profile.history_fields
            self.reasoning = reasoning_of(self._template, profile.reasoning)
            check_thinking(thinking, self.reasoning)
            self._closes_thoughts = closes_thoughts(self._template, self.reasoning)
            self._around_thoughts = around_thoughts(self._template, self.reasoning)
            self.end_of_thoughts = tuple(self._encoder.encode(profile.end_of_thoughts or self._around_thoughts[1]))
            self.end_of_turn_id = self._end_of_turn(self._deltas[self._preferred])
            self.stop_token_ids = self._stop_tokens(source.eos_token_ids)
        except TemplateError as error:
            raise TemplateError(f"{where}{error}") from error

    def initial_prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """The tokens of ``messages`` and the generation prompt."""
        content = [list(messages), list(tools) if tools is not None else None]
        guard = self._encoder.guard_for(content)
        messages, tools = self._encoder.guarded(content, guard)
        return self._encoder.encode(self._template.render(messages, tools), guard)

    def observation(
        self, text: str, role: Role | None = None, *, stop: int | None, call: SampledCall | None = None
    ) -> list[int]:
        """The tokens after a sampled turn: the end of the turn, the observation ``text``, the next generation prompt.

        ``stop``: the one of ``stop_token_ids`` that the sampled tokens end with; None if the turn hit its length limit.
        Unless it is the template's own end of the turn, that comes first here. ``call``: the call that the turn made.
        Without one, a role whose messages name the call gives way to the role user. ``role`` defaults to
        ``observation_role``, or to a role whose message begins with ``stop`` (GLM's ``<|user|>``). Raises
        ``TemplateError`` for a role that the template cannot append.
        """
        role = role or self._role_after(stop, call)
        delta = self._deltas.get(role)
        if delta is None:
            raise TemplateError(f"the chat template cannot append messages of role {role}; use {self.observation_role}")
        content = [text, call.name, _id_of(call)] if call else [text, "", ""]
        guard = self._encoder.guard_for(content)
        return _after_stop(self._encoder.encode(delta.text(*self._encoder.guarded(content, guard)), guard), stop)

    def extension(self, messages: Messages, *, stop: int | None) -> list[int]:
        """Like :meth:`observation` for any ``messages`` (``{"role", "content"}``) that follow a sampled turn.

        Tool messages get the role user if the template has no role for tools or names the call in their header. Raises
        ``TemplateError`` if the template cannot append the messages.
        """
        normalized = [{**m, "role": self._role_of_results} if m["role"] == "tool" else dict(m) for m in messages]
        if len(normalized) == 1 and normalized[0]["role"] in self._deltas:
            return self.observation(normalized[0]["content"], normalized[0]["role"], stop=stop)
        guard = self._encoder.guard_for(normalized)
        text = after_turn(self._template, self._encoder.guarded(normalized, guard))
        tokens = self._encoder.encode(text, guard)
        if not tokens or tokens[0] not in self.stop_token_ids:
            raise TemplateError("the chat template does not end an assistant's turn before these messages")
        return _after_stop(tokens, stop)

    def plain_text(self, text: str) -> list[int]:
        """The tokens of ``text``, none of them a control token."""
        guard = self._encoder.guard_for(text)
        return self._encoder.encode(self._encoder.guarded(text, guard), guard)

    def written(self, text: str) -> list[int]:
        """The tokens of ``text`` as the model writes it, with control tokens where it has their texts."""
        return self._encoder.encode(text)

    def turn(self, fmt: ToolCallFormat, thoughts: str, text: str, calls: Sequence[ToolCall]) -> list[int]:
        """The tokens that a model would sample for an assistant's turn, up to the one that ends it. ``fmt`` writes the
        calls. Raises ``TemplateError`` for a turn that the template or ``fmt`` cannot write."""
        content = [thoughts, text, [[call.name, dict(call.arguments)] for call in calls]]
        guard = self._encoder.guard_for(content)
        thoughts, text, made = self._encoder.guarded(content, guard)
        calls = [ToolCall(name, arguments) for name, arguments in made]
        if thoughts and self._closes_thoughts:
            raise TemplateError("the turn has thoughts, and the prompt closes them: set rollout.thinking to on")
        try:
            if isinstance(fmt, WritesTurns):
                return self._encoder.encode(fmt.render_turn(thoughts, text, calls), guard)
            said = "\n".join(filter(None, (text, *map(fmt.render, calls))))
        except ValueError as error:
            raise TemplateError(f"the format {fmt.name} cannot write the turn: {error}") from None
        if thoughts or self.reasoning.prompt_opens:
            opening, closing = self._around_thoughts
            if not closing:
                raise TemplateError("the turn has thoughts, and the chat template has none")
            said = opening + thoughts.strip("\n") + closing + said
        ended = self._deltas.get("tool" if calls else "user", self._deltas[self._preferred])
        return [*self._encoder.encode(said, guard), self._end_of_turn(ended)]

    def check_end_of_thoughts(self) -> None:
        """Raises ``TemplateError`` if thoughts cannot be closed (``rollout.max_thinking_tokens``)."""
        if not self.end_of_thoughts:
            raise TemplateError(
                f"rollout.max_thinking_tokens: the chat template has no {self.reasoning.close}, so thoughts cannot be "
                "closed: leave the key out"
            )

    def check_tails(self) -> None:
        """Raises ``TemplateError`` if the template renders the messages after a turn differently from
        :meth:`extension`. Checked for one tool message, two, a user message, and both."""
        for roles in TAILS:
            check_tail(self._template, [self._role_of_results if role == "tool" else role for role in roles])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without the stop token at their end. Other control tokens are kept as text, because
        some formats write calls with them."""
        return self._encoder.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens)

    def _probe_roles(self, needed: Role | None, eos_token_ids: Sequence[int]) -> dict[Role, Delta]:
        """The deltas of the roles that the template can append: tool, the preferred one, and user. ``needed`` must be
        among them."""
        passed: dict[Role, Delta] = {}
        reasons = {}
        ends = [text for text, id in self._encoder.special.items() if id in eos_token_ids]
        for role in _ROLES:
            try:
                probed = probe(self._template, role, ends)
                self._check_tokens(probed)
                passed[role] = probed.delta
            except TemplateError as error:
                reasons[role] = f"with observations of role {role}, {error}"
        if not passed or needed in reasons:
            why = reasons[needed] if needed else "; ".join(reasons.values())
            raise TemplateError(f"the chat template is not prefix-preserving: {why}")
        return passed

    def _check_tokens(self, probed: Probed) -> None:
        """Raises ``TemplateError`` if an observation encoded alone gets other tokens than within the whole
        rendering, or does not start with a special token."""
        encoder = self._encoder
        observation = encoder.encode(probed.delta.text(probed.observation))
        if observation[0] not in encoder.special.values():
            raise TemplateError(
                f"the assistant's turn must end with a special token, found {probed.delta.before[:40]!r}"
            )
        whole = encoder.reference.encode(probed.conversation, add_special_tokens=False).ids
        prompt = encoder.reference.encode(probed.prompt, add_special_tokens=False).ids
        if whole[-len(observation) :] != observation or prompt != encoder.encode(probed.prompt):
            raise TemplateError("the tokenizer merges text across special tokens")

    @property
    def _preferred(self) -> Role:
        return "tool" if "tool" in self._deltas else "user"

    @property
    def _role_of_results(self) -> Role:
        """The role of a tool's message whose call is not known."""
        return (
            "user"
            if self._deltas[self.observation_role].needs_call and "user" in self._deltas
            else self.observation_role
        )

    def _role_after(self, stop: int | None, call: SampledCall | None) -> Role:
        """The role of an observation after ``stop``."""
        if call is None and self._role_of_results != self.observation_role:
            return self._role_of_results
        if stop not in (None, self.end_of_turn_id):
            return next(
                (role for role in self._deltas if self._end_of_turn(self._deltas[role]) == stop), self.observation_role
            )
        return self.observation_role

    def _end_of_turn(self, delta: Delta) -> int:
        return self._encoder.encode(delta.before)[0]

    def _stop_tokens(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        unsafe = set(eos_token_ids).difference(self._encoder.special.values())
        if unsafe:
            raise TemplateError(f"the eos tokens {sorted(unsafe)} are not marked special in tokenizer.json")
        return tuple(dict.fromkeys([self.end_of_turn_id, *eos_token_ids]))


def _after_stop(tokens: list[int], stop: int | None) -> list[int]:
    """``tokens``, which begin with the end of a turn, after a turn that ends with ``stop``."""
    return tokens[1:] if tokens[0] == stop else tokens
