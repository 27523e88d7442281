"""The tiny model's tokenizer and template: nothing is lost, tags are one token, the template only appends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agent_rl.render.chat import ChatRenderer
from envs.mini import generate
from scripts.tiny_moe import EOS, TAGS, VOCAB_SIZE, save_tokenizer, train_tokenizer
from scripts.train_demo_model import Demonstrator


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = random.Random(0)
    tasks = generate("train", 1500, seed=0)
    corpus = [text for task in tasks for text in (*task.files.values(), task.issue, *Demonstrator().turns(task, rng))]
    return train_tokenizer(corpus)


def test_it_has_its_size_and_every_tag_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    for tag in TAGS:
        assert tokenizer.encode(tag).tokens == [tag]


@given(st.text(max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_decoding_without_control_tokens_keeps_the_tags(tokenizer: Tokenizer) -> None:
    text = "<function=finish></function>"
    assert tokenizer.decode(tokenizer.encode(f"{text}{EOS}").ids, skip_special_tokens=True) == text


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="1024 are required"):
        train_tokenizer(["def a():\n    return 1\n"])


def test_the_template_is_prefix_preserving_and_a_turn_ends_with_one_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    renderer = ChatRenderer(tmp_path)
    assert renderer.observation_role == "tool"
    assert renderer.stop_token_ids == (tokenizer.token_to_id(EOS),)
    messages = [{"role": "system", "content": "Fix."}, {"role": "user", "content": "a.py is wrong."}]
    prompt = renderer.initial_prompt(messages)
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nFix.<|im_end|><|im_start|>user\na.py is wrong.<|im_end|><|im_start|>assistant\n"
    )
