"""Encodes rendered text so that only the template produces control tokens.

Control tokens are the tokenizer's added tokens marked special (``<|im_end|>``, ...). Their text may occur in files and
logs; encoded naively, an observation could end its own turn. So content is *guarded* before rendering: a string that
occurs nowhere in it (one or more private-use characters) is inserted into every such text. The rendering is split at
the remaining special tokens, which belong to the template. The text between them is encoded without guards and with
special tokens disabled. Text between two special tokens is encoded in one piece, so merges across the border of
template and content equal the plain tokenizer's.
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
        """The text of ``tokens`` without control tokens."""
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
