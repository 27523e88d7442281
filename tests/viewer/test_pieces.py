"""Texts of tokens: joined they are the decoded text, and a character split over tokens is whole in the last of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agent_rl.errors import AgentRlError
from agent_rl.viewer.token_text import TokenTexts


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    """A tokenizer whose tokens are single bytes, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, path


def test_a_character_split_over_tokens_belongs_to_the_last_one(by_bytes: tuple[Tokenizer, Path]) -> None:
    tokenizer, path = by_bytes
    ids = tokenizer.encode("a€é<|im_end|>").ids
    assert TokenTexts(path).texts(ids) == ["a", "", "", "€", "", "é", "<|im_end|>"]


@pytest.mark.parametrize("text", ["plain\n\ttext", "𝒳 \u202e\x00\x1b[31m", "漢字 and 🙂"])
def test_texts_joined_are_the_decoded_text(by_bytes: tuple[Tokenizer, Path], text: str) -> None:
    tokenizer, path = by_bytes
    ids = tokenizer.encode(text).ids
    assert "".join(TokenTexts(path).texts(ids)) == tokenizer.decode(ids) == text


def test_broken_bytes_and_unknown_ids_are_replaced(by_bytes: tuple[Tokenizer, Path]) -> None:
    tokenizer, path = by_bytes
    ids = tokenizer.encode("€a").ids
    bad = "\ufffd"
    assert TokenTexts(path).texts([ids[0], ids[3], 999_999, ids[1], ids[0]]) == ["", f"{bad}a", bad, bad, bad]
    assert TokenTexts(path).texts([]) == []


def test_tokens_of_a_vocabulary_with_bytes_as_a_fallback(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0xC3>": 2, "<0xA9>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenTexts(tmp_path / "tokenizer.json").texts([1, 2, 3]) == [" the", "", "é"]


def test_an_invalid_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(AgentRlError, match=r"tokenizer.json: not a tokenizer"):
        TokenTexts(tmp_path / "tokenizer.json")
