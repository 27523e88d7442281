"""Token ids to the texts that they stand for, one a token, so that a page can colour each by itself.

A character's bytes may lie in several tokens: the last of them has the character as its text, and those before have an
empty one. All texts joined are the decoded text, special tokens written out.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from agent_rl.errors import AgentRlError

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""How vocabularies of characters write a byte that is no whole character."""
_SPACE = "▁"
"""How they write a space."""


class Pieces:
    """The texts of a tokenizer's tokens. Raises AgentRlError where the file is no tokenizer."""

    def __init__(self, tokenizer_json: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        except Exception as error:  # the library raises nothing narrower
            raise AgentRlError(f"{tokenizer_json}: not a tokenizer: {error}") from None

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token; "" where its bytes end in a later one. Bytes that are no UTF-8 become U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        held = {token: self._bytes(token) for token in set(ids)}
        texts = [decoder.decode(held[token]) for token in ids]
        if rest := decoder.decode(b"", final=True):
            texts[-1] += rest
        return texts

    def _bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) if token >= 0 else None
        if text is None:
            return "\ufffd".encode()
        if token in self._added:
            return text.encode()
        if self._byte_level:
            return bytes(_BYTES[letter] for letter in text if letter in _BYTES)
        if one := _BYTE.fullmatch(text):
            return bytes.fromhex(one[1])
        return text.replace(_SPACE, " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])


def _letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: itself where one can be seen, else one from U+0100."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(unseen)}


_BYTES = _letters()
