"""Messages to tokens and back, token-in and token-out: a conversation only ever grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_rl.errors import TemplateError
from agent_rl.render.encoder import Encoder
from agent_rl.render.prefix_check import TAILS, Delta, Probed, Role, after_turn, check_tail, probe
from agent_rl.render.template import ChatModel, ChatTemplate, Messages, Tools

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class ChatRenderer:
    """Renders one model's conversations.

    ``model`` is a Hugging Face directory (``tokenizer.json`` and a chat template) or a :class:`ChatModel`. The
    template is probed here, once; one that is not prefix-preserving is refused with ``TemplateError`` (see
    :mod:`agent_rl.render.prefix_check`). ``thinking=False`` says that the model's turns hold no ``<think>`` blocks, so
    that a template which drops those from earlier turns may pass. ``options`` are variables of the template's own.
    ``observation_role`` is the role of observations; None: tool where the template can append it, else user.
    """

    def __init__(
        self,
        model: Path | ChatModel,
        *,
        thinking: bool = True,
        options: Mapping[str, Any] = _NO_OPTIONS,
        observation_role: Role | None = None,
    ) -> None:
        where = f"{model}: " if isinstance(model, Path) else ""
        source = model if isinstance(model, ChatModel) else ChatModel.from_dir(model)
        try:
            self._encoder = Encoder(source.tokenizer)
            self._template = ChatTemplate(source.template, source.special, options)
            self._deltas = self._probe_roles(thinking, (observation_role,) if observation_role else ("tool", "user"))
            self.observation_role: Role = next(iter(self._deltas))
            self.end_of_turn_id = self._end_of_turn()
            self.stop_token_ids = self._stop_tokens(source.eos_token_ids)
        except TemplateError as error:
            raise TemplateError(f"{where}{error}") from error

    def opening(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """The tokens of the opening messages and the generation prompt."""
        content = [list(messages), list(tools) if tools is not None else None]
        guard = self._encoder.guard_for(content)
        messages, tools = self._encoder.guarded(content, guard)
        return self._encoder.encode(self._template.render(messages, tools), guard)

    def observation(self, text: str, role: Role | None = None, *, stop_included: bool) -> list[int]:
        """The tokens that follow a sampled turn: its end, the observation ``text``, the next generation prompt.

        ``stop_included`` says that the sampled tokens end with one of ``stop_token_ids``; where they don't (the turn
        was cut by its length), the end-of-turn token comes first here. ``role`` is ``observation_role`` unless given:
        tool where the template has it, else user. Raises ``TemplateError`` for a role the template cannot append.
        """
        delta = self._deltas.get(role or self.observation_role)
        if delta is None:
            raise TemplateError(f"the chat template cannot append messages of role {role}; use {self.observation_role}")
        guard = self._encoder.guard_for(text)
        tokens = self._encoder.encode(delta.text(self._encoder.guarded(text, guard)), guard)
        return tokens[1:] if stop_included else tokens

    def extension(self, messages: Messages, *, stop_included: bool) -> list[int]:
        """As :meth:`observation` for any ``messages`` that follow a sampled turn, ``{"role", "content"}`` each.

        A tool's message has the role of observations where the template has none for tools. Raises ``TemplateError``
        where the template cannot append them.
        """
        shown = [{**m, "role": self.observation_role} if m["role"] == "tool" else dict(m) for m in messages]
        if len(shown) == 1 and shown[0]["role"] in self._deltas:
            return self.observation(shown[0]["content"], shown[0]["role"], stop_included=stop_included)
        guard = self._encoder.guard_for(shown)
        text = after_turn(self._template, self._encoder.guarded(shown, guard))
        tokens = self._encoder.encode(text, guard)
        if not tokens or tokens[0] != self.end_of_turn_id:
            raise TemplateError("the chat template does not end an assistant's turn before these messages")
        return tokens[1:] if stop_included else tokens

    def check_tails(self) -> None:
        """Raises ``TemplateError`` where the template writes otherwise after a turn that it renders itself than
        :meth:`extension` does, for one tool's answer, two, a user's message, and both."""
        for roles in TAILS:
            check_tail(self._template, [self.observation_role if role == "tool" else role for role in roles])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, control tokens left out."""
        return self._encoder.decode(tokens)

    def _probe_roles(self, thinking: bool, roles: tuple[Role, ...]) -> dict[Role, Delta]:
        """The deltas of those of ``roles`` that the template can append, the preferred one first."""
        passed: dict[Role, Delta] = {}
        reasons = []
        for role in roles:
            try:
                probed = probe(self._template, role, thinking=thinking)
                self._check_tokens(probed)
                passed[role] = probed.delta
            except TemplateError as error:
                reasons.append(f"with observations of role {role}, {error}")
        if not passed:
            raise TemplateError(f"the chat template is not prefix-preserving: {'; '.join(reasons)}")
        return passed

    def _check_tokens(self, probed: Probed) -> None:
        """The tokens of an observation encoded alone must be those that the tokenizer gives for it within the whole
        rendering, and start at a special token."""
        encoder = self._encoder
        observation = encoder.encode(probed.delta.text(probed.observation))
        if observation[0] not in encoder.special.values():
            raise TemplateError(f"no special token ends the assistant's turn; {probed.delta.before[:40]!r} follows it")
        whole = encoder.reference.encode(probed.conversation, add_special_tokens=False).ids
        opening = encoder.reference.encode(probed.opening, add_special_tokens=False).ids
        if whole[-len(observation) :] != observation or opening != encoder.encode(probed.opening):
            raise TemplateError("the tokenizer does not encode the text between special tokens on its own")

    def _end_of_turn(self) -> int:
        ends = {self._encoder.encode(delta.before)[0] for delta in self._deltas.values()}
        if len(ends) > 1:
            raise TemplateError("the chat template ends an assistant's turn differently before a tool's message")
        return ends.pop()

    def _stop_tokens(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        unsafe = set(eos_token_ids).difference(self._encoder.special.values())
        if unsafe:
            raise TemplateError(f"the eos tokens {sorted(unsafe)} are not marked special in tokenizer.json")
        return tuple(dict.fromkeys([self.end_of_turn_id, *eos_token_ids]))
