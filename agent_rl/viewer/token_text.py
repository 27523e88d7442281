"""Decodes token ids to one text for each token, so that the page can color tokens separately.

If the bytes of a character are spread over several tokens, the last of them has the character and the others are empty.
The joined texts are the decoded text with special tokens.
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
from agent_rl.utils import foreign

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A byte token of a character vocabulary."""
_SPACE = "▁"
"""The space of a character vocabulary."""


class TokenTexts:
    """The texts of a tokenizer's tokens. Raises AgentRlError if the file is not a tokenizer."""

    def __init__(self, tokenizer_json: Path) -> None:
        data = foreign.read(tokenizer_json.parent, tokenizer_json.name)
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises only Exception
            raise AgentRlError(f"{tokenizer_json}: not a tokenizer: {error}") from None

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text for each token; "" if its bytes end in a later one. Bytes that are not UTF-8 become U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        token_bytes = {token: self._bytes(token) for token in set(ids)}
        texts = [decoder.decode(token_bytes[token]) for token in ids]
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
    """The bytes by their letters in byte-level vocabularies: printable ones themselves, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _letters()
