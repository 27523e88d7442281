"""The release of SGLang that engines on GPUs have, started by the launcher on a CPU: what other modules test with the
release for CPUs holds here too. Servers of both releases run the same patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_control import serving
from support.family_models import write_model
from test_probe import test_a_sound_server_passes_every_check  # noqa: F401
from test_server_generate import (  # noqa: F401
    test_a_stop_token_ends_the_turn_and_is_kept,
    test_an_aborted_turn_continues_from_its_tokens,
    test_info_describes_the_server,
    test_raw_routes_are_those_of_the_json_answer,
    test_tokens_log_probs_and_rows_line_up,
    test_turns_stitched_equal_one_prefill,
)
from test_weight_deltas import run_of, test_deltas_equal_full_updates  # noqa: F401

from agent_rl.bootstrap import CUDA_RELEASE
from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.route_probe.checks import CheckStatus
from agent_rl.engine.route_probe.run import probe
from agent_rl.utils.http import AsyncHttp

PYTHON = CUDA_RELEASE / "bin" / "python"
pytestmark = [pytest.mark.cuda_release, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(engine_config: EngineConfig, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = engine_config.model_copy(update={"python": str(PYTHON), "weight_sync": "delta"})
    yield from serving(EngineServer(config, model, tmp_path_factory.mktemp("cuda_release") / "engine.log"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["minimax_m2", "mixtral"])
async def test_routers_that_do_not_know_their_layer_are_captured(
    kind: str, engine_config: EngineConfig, tmp_path: Path
) -> None:
    config = engine_config.model_copy(update={"python": str(PYTHON)})
    server = EngineServer(config, write_model(tmp_path / "model", kind, seed=0), tmp_path / "engine.log")
    await server.start()
    try:
        report = await probe(server.url)
        assert [check for check in report.checks if check.status is CheckStatus.FAILED] == []
    finally:
        await server.stop()


async def test_the_server_is_of_the_release_for_gpus(server: str) -> None:
    pinned = (Path(__file__).parents[2] / "agent_rl/engine/requirements-cuda-nodeps.txt").read_text().split()
    async with AsyncHttp(30.0) as http:
        version = (await http.get_json(f"{server}/server_info"))["version"]
    assert f"sglang=={version}" in pinned
