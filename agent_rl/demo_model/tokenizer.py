"""The tiny model's tokenizer: 1,024 tokens of byte-level BPE, trained on generated repositories and dialogues.

Numbers are split into digits, words keep their leading space, a run of indentation is one piece, and every tag of the
XML tool-call format is one token, so that a whole episode fits into about 250 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_PIECES = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n|[^\S\n]+"
_TOOLS = ("file_editor", "execute_bash", "search", "finish")
_PARAMETERS = (
    *("command", "path", "old_str", "new_str", "file_text", "insert_line", "view_range"),
    *("cmd", "search_term", "result"),
)
TAGS = (
    *(f"<function={name}>" for name in _TOOLS),
    *(f"<parameter={name}>" for name in _PARAMETERS),
    "</parameter>",
    "</function>",
)


def train_tokenizer(corpus: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly ``VOCAB_SIZE`` tokens, the special tokens and tags first; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS, *TAGS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} were wanted: give more text"
        )
    return _with_plain_tags(tokenizer)


def _with_plain_tags(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the tags as ordinary added tokens: decoding without special tokens keeps them."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(data))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [BOS],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": chat_template(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def chat_template() -> str:
    """The chat template: ChatML without the newline after a message, so that a turn's end is one token."""
    return (Path(__file__).parent / "template.jinja").read_text()
