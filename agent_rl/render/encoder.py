"""Rendered text to tokens, so that only the template writes control tokens.

Control tokens are the tokenizer's added tokens marked special (``<|im_end|>``, ...). A file or a log may hold their
text; were it encoded as they are, the agent's observation would end its own turn. So content is *guarded* before it
is rendered (a guard that occurs nowhere, one character or a few, is put inside every such text), the rendering is cut
at the special tokens that are left, which are the template's, and the text between them is encoded, guards taken out,
with special tokens turned off. Text between two special tokens is encoded in one piece, template and content together,
so merges across their border are those of the plain tokenizer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from agent_rl.errors import TemplateError

_GUARDS = tuple(map(chr, range(0xE000, 0xF900)))  # the private use area


class Encoder:
    """Encodes guarded renderings with one tokenizer, and decodes."""

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
        """The text that guards ``content`` (a JSON value) and is nowhere in it: a character, or several where each
        one is taken. "" where nothing in ``content`` needs guarding."""
        text = "".join(_strings(content))
        if not self._pattern.search(text):
            return ""
        return next(guard for length in itertools.count(1) for guard in _absent(text, length))

    def guarded(self, content: Any, guard: str) -> Any:
        """``content`` with ``guard`` inside every text of a control token, however deep it lies."""
        if not guard:
            return content
        if isinstance(content, str):
            while self._pattern.search(content):  # taking one apart may leave another that overlapped it
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
        """The text of ``tokens``, control tokens left out."""
        text: str = self.reference.decode(list(tokens), skip_special_tokens=True)
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


def _absent(text: str, length: int) -> Iterator[str]:
    """The guards of ``length`` characters that are not in ``text``, in linear time: one more is tried than it holds."""
    held = {text[at : at + length] for at in range(len(text))}
    return (guard for guard in map("".join, itertools.product(_GUARDS, repeat=length)) if guard not in held)


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
