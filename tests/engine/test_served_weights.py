"""A running server with another model than the config's is refused before a token of it is used."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from support.local_server import serving

from agent_rl.config import EngineConfig
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import UserError
from agent_rl.models.spec import read_model_spec
from agent_rl.weight_sync.served import check_served_weights, stored_tensors

LAYERS, EXPERTS, PADDING = 4, 8, 8


def held(directory: Path) -> dict[str, bytes]:
    """A tiny model's parameters as an engine on a CPU holds them, in float32, its experts' inner size padded to 32."""
    weights = load_file(directory / "model.safetensors")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    parameters = {name: value for name, value in weights.items() if not any(part in name for part in PARTS)}
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        for name, parts in fused.items():
            parts = (weights[f"{layer}self_attn.{part}.weight"] for part in parts)
            parameters[f"{layer}self_attn.{name}.weight"] = np.concatenate(list(parts))
        experts = [
            {part: weights[f"{layer}mlp.experts.{n}.{part}_proj.weight"] for part in MLP} for n in range(EXPERTS)
        ]
        gate, up, down = (np.stack([expert[part] for expert in experts]) for part in MLP)
        rows, columns = ((0, 0), (0, PADDING), (0, 0)), ((0, 0), (0, 0), (0, PADDING))
        parameters[f"{layer}mlp.experts.w13_weight"] = np.concatenate([np.pad(gate, rows), np.pad(up, rows)], axis=1)
        parameters[f"{layer}mlp.experts.w2_weight"] = np.pad(down, columns)
    return {name: value.tobytes() for name, value in parameters.items()}


MLP = ("gate", "up", "down")
PARTS = ("q_proj", "k_proj", "v_proj", ".experts.")


@asynccontextmanager
async def engine(parameters: Mapping[str, bytes], **info: Any) -> AsyncIterator[str]:
    """A fake SGLang server with ``parameters`` and the server info ``info``."""
    checksums = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in parameters.items()}
    whole = hashlib.sha256(orjson.dumps(checksums)).hexdigest()

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/server_info":
            return 200, orjson.dumps({"device": "cpu", "dtype": "float32", "model_path": "some/model", **info})
        assert (path, request) == ("/weights_checker", {"action": "checksum"})
        return 200, orjson.dumps({"per_engine_checksum": whole, "ranks": [{"checksums": checksums}]})

    async with serving(handler) as url:
        yield url


async def compared(model: Path, *urls: str) -> str | None:
    return await asyncio.to_thread(check_served_weights, urls, model, read_model_spec(model), EngineConfig())


async def test_the_configs_weights_pass(model: Path) -> None:
    async with engine(held(model)) as one, engine(held(model)) as other:
        assert await compared(model, one, other) is None


async def test_other_weights_of_the_same_sizes_are_refused(model: Path, other_model: Path) -> None:
    async with engine(held(model)) as right, engine(held(other_model)) as wrong:
        with pytest.raises(UserError, match=f"^the engine at {wrong} has other weights than model: {model} ") as raised:
            await compared(model, right, wrong)
    assert "it was started with some/model" in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_one_wrong_bit_is_found(model: Path) -> None:
    parameters = held(model)
    data = parameters["model.layers.2.mlp.experts.w2_weight"]
    parameters["model.layers.2.mlp.experts.w2_weight"] = data[:-1] + bytes([data[-1] ^ 1])
    async with engine(parameters) as url:
        with pytest.raises(UserError, match="has other weights than model"):
            await compared(model, url)


async def test_layers_and_other_engines_are_compared_where_checksums_are_unpredictable(
    model: Path, other_model: Path
) -> None:
    fewer = {name: data for name, data in held(model).items() if ".layers.3." not in name}
    async with (
        engine(held(other_model), device="cuda") as one,
        engine(held(model), device="cuda") as other,
        engine(fewer, device="cuda") as short,
    ):
        assert await compared(model, one) == (
            f"{one}: the weights were not compared with those of {model}, only the layers"
        )
        with pytest.raises(UserError, match=f"^the engines at {one} and {other} have different weights: "):
            await compared(model, one, other)
        with pytest.raises(UserError, match=f"^the engine at {short} has other weights"):
            await compared(model, short)


async def test_a_server_without_checksums_is_noted(model: Path) -> None:
    async def gateway(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        return 404, b"no such page"

    async with serving(gateway) as url:
        note = await compared(model, url)
    assert note is not None
    assert note.startswith(f"the engines' weights were not compared with those of {model}: GET {url}/server_info")


def test_a_tensor_is_rounded_as_a_loader_rounds_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    save_file({"a": values}, tmp_path / "model.safetensors")
    rounded = torch.from_numpy(values).bfloat16()
    tensor = stored_tensors(tmp_path)["a"]
    assert tensor.bytes_as("BF16").tobytes() == rounded.view(torch.uint8).numpy().tobytes()
    back = replace(tensor, kind="BF16", raw=_bytes(tensor.bytes_as("BF16")))
    assert back.bytes_as("F32").tobytes() == rounded.float().numpy().tobytes()


def _bytes(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(data.tobytes(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_hidden_layers": 3}, "it has layers with experts (True, True, True), not (True, True, True, True)"),
        ({"num_experts_per_tok": 3}, "it has num_experts_per_tok 3, not 2"),
        ({"rope_theta": 1e6}, "it has rope_theta 1000000.0, not 10000.0"),
    ],
)
async def test_another_config_behind_an_address_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    """The server's directory is also on this machine."""
    config = orjson.loads((model / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(orjson.dumps(config | changes))

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        assert path != "/generate"
        return 200, orjson.dumps({"tokenizer_path": str(tmp_path)})

    async with serving(handler) as url:
        with pytest.raises(UserError) as raised:
            async with SGLangEngine(url, read_model_spec(model)):
                pass
    message = f"the engine at {url} serves {tmp_path}, which is another model than the config's: {found}"
    assert str(raised.value) == message


async def test_routes_of_another_model_are_refused(model: Path) -> None:
    """The server's directory is on another machine, so only its responses are known."""

    async def handler(path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        if path != "/generate":
            return 200, b"{}"
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 7, None]],
            "routed_experts": base64.b64encode(np.zeros((2, 3, 2), "<i4").tobytes()).decode(),
        }
        return 200, orjson.dumps({"output_ids": [7], "meta_info": meta})

    async with serving(handler) as url:
        with pytest.raises(
            UserError, match=f"^the engine at {url} serves another model than the config's, or "
        ) as raised:
            async with SGLangEngine(url, read_model_spec(model)):
                pass
    assert "expected 2 rows of 4 layers x top-2 (64 bytes), received 1.50 rows (48 bytes)" in str(raised.value)


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_real_servers_weights(server: str, model: Path, other_model: Path) -> None:
    assert await compared(model, server) is None
    with pytest.raises(UserError, match=f"^the engine at {server} has other weights than model: {other_model} "):
        await compared(other_model, server)
