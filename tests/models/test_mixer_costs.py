"""The costs of token mixers, against numbers computed by hand for published models."""

from __future__ import annotations

import pytest

from agent_rl.models.mixer_costs import CHUNK, mixer_cost, shares_prompts_late
from agent_rl.planner.known_models import KNOWN
from agent_rl.planner.memory_model import kv_bytes_per_token, state_bytes_per_sequence

KIMI, GLM_5, DEEPSEEK = KNOWN["Kimi-K2-Instruct"], KNOWN["GLM-5"], KNOWN["DeepSeek-V3.2"]
NANO = KNOWN["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]
GPT_OSS, NEXT, QWEN3 = KNOWN["gpt-oss-20b"], KNOWN["Qwen3-Next-80B-A3B-Instruct"], KNOWN["Qwen3-30B-A3B"]


@pytest.mark.parametrize(
    ("name", "layers", "numbers"),
    [
        ("Qwen3-30B-A3B", 48, 2 * 4 * 128),
        ("MiniMax-M2", 62, 2 * 8 * 128),
        ("Kimi-K2-Instruct", 61, 512 + 64),
        ("DeepSeek-V3.2", 61, 512 + 64 + 128),  # with the indexer's key
        ("gpt-oss-120b", 18, 2 * 8 * 64),  # every other layer has a window
        ("Qwen3-Next-80B-A3B-Instruct", 12, 2 * 2 * 256),  # every fourth layer has attention
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6, 2 * 2 * 128),
    ],
)
def test_an_engine_caches_these_numbers_of_a_token(name: str, layers: int, numbers: int) -> None:
    assert kv_bytes_per_token(KNOWN[name], "bfloat16") == layers * numbers * 2


def test_a_latent_is_not_divided_among_gpus() -> None:
    assert kv_bytes_per_token(KIMI, "bfloat16", 8) == kv_bytes_per_token(KIMI, "bfloat16")
    assert kv_bytes_per_token(QWEN3, "bfloat16", 4) == kv_bytes_per_token(QWEN3, "bfloat16") // 4


def test_a_sequence_keeps_windows_and_states_of_constant_size() -> None:
    assert state_bytes_per_sequence(GPT_OSS, "bfloat16") == 12 * 128 * (2 * 8 * 64) * 2
    state, convolution = 32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert state_bytes_per_sequence(NEXT, "bfloat16") == 36 * (state + convolution)
    assert state_bytes_per_sequence(NEXT, "bfloat16", 4) == 9 * (state + convolution)
    assert state_bytes_per_sequence(QWEN3, "bfloat16") == state_bytes_per_sequence(KIMI, "bfloat16") == 0


def test_flops_follow_the_products_of_the_weights() -> None:
    latent = 7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
    assert mixer_cost(KIMI, 0).projections == 2 * latent
    assert mixer_cost(KIMI, 0).pair == 64 * (192 + 128)
    assert mixer_cost(GLM_5, 0).pair == 64 * (256 + 256) + 32 * 128
    window, full = mixer_cost(GPT_OSS, 0), mixer_cost(GPT_OSS, 1)
    assert (window.pair, window.token) == (0, 4 * 4096 * 128)
    assert (full.pair, full.token) == (2 * 4096, 0)
    delta = mixer_cost(NEXT, 0)
    assert delta.pair == 0
    assert delta.token == 32 * (CHUNK * 10 * 128 + 6 * 128 * 128)
    mamba, width, mixed = mixer_cost(NANO, 0), 64 * 64, 64 * 64 + 2 * 8 * 128
    assert mamba.projections == 2 * (2688 * (width + mixed + 64) + width * 2688 + mixed * 4)
    assert mamba.token == 2 * CHUNK * 64 * (128 + 64) + 4 * 64 * 64 * 128
    assert mixer_cost(NANO, 1).projections == 0  # experts only
    assert mixer_cost(NEXT, 3).projections == 2 * 2048 * (3 * 4096 + 2 * 512)  # with the output gate


def test_prompts_are_shared_late_with_states_and_windows() -> None:
    assert [shares_prompts_late(model) for model in (GPT_OSS, NEXT, QWEN3, KIMI, DEEPSEEK)] == [True, True] + [
        False
    ] * 3
