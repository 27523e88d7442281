"""Starting the real server: what goes wrong is one clear line, and nothing is ever left running."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_interpreter import make_interpreter
from server_control import shared_files
from support.family_models import write_model

from agent_rl.config import EngineConfig
from agent_rl.controller.rollout_runtime import describe_gpu_start
from agent_rl.engine import launch
from agent_rl.engine.factory import open_engine
from agent_rl.engine.launch import EngineServer, group_members, reason_in_log, sglang_version
from agent_rl.engine.shared_memory import SHARED_MEMORY, remove_stale
from agent_rl.errors import ConfigError, EngineStartError
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.console import Display

SERVE = Path(launch.__file__).with_name("server") / "serve.py"
OWNER = """
    import asyncio, sys
    from pathlib import Path
    from agent_rl.config import EngineConfig
    from agent_rl.engine.launch import EngineServer

    async def main(config, *paths):
        server = EngineServer(EngineConfig.model_validate_json(config), *map(Path, paths))
        await server.start()
        print(server.pid, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=[pytest.mark.sglang, pytest.mark.exhaustive])])
def test_a_server_dies_with_its_killed_owner(
    real: bool, engine_config: EngineConfig, model: Path, tmp_path: Path
) -> None:
    """The real one also leaves shared memory, which the next start removes."""
    if not real:
        engine_config = engine_config.model_copy(update={"python": str(make_interpreter(tmp_path))})
    command = [sys.executable, "-c", textwrap.dedent(OWNER), engine_config.model_dump_json(), model, tmp_path / "log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        assert len(group_members(group)) >= (2 if real else 1)
        files = shared_files(group)
        assert any(name.startswith("sglang_loads_") for name in files) is real
        remove_stale()
        assert files <= set(os.listdir(SHARED_MEMORY)), "files of a living server were removed"
        owner.kill()
    deadline = time.monotonic() + 10
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(group) == []
    if real:
        assert files & set(os.listdir(SHARED_MEMORY)), "a killed server cleans up by itself: remove this sweep"
    remove_stale()  # every start begins with this
    assert not files & set(os.listdir(SHARED_MEMORY))


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_server_that_is_late_is_stopped(engine_config: EngineConfig, model: Path, tmp_path: Path) -> None:
    config = engine_config.model_copy(update={"start_timeout": 0.5})
    server = EngineServer(config, model, tmp_path / "engine.log")
    with pytest.raises(EngineStartError, match=r"not healthy within engine\.start_timeout=0\.5 s"):
        await server.start()
    assert server.pid is not None
    assert group_members(server.pid) == []
    await server.stop()


@pytest.mark.sglang
@pytest.mark.slow
async def test_cancelling_the_start_leaves_no_process(engine_config: EngineConfig, model: Path, tmp_path: Path) -> None:
    server = EngineServer(engine_config, model, tmp_path / "engine.log")
    task = asyncio.ensure_future(server.start())
    async with asyncio.timeout(60):
        while server.pid is None:
            assert not task.done()
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert group_members(server.pid) == []


async def test_a_taken_port_is_reported(model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        config = EngineConfig(python=sys.executable, port=holder.getsockname()[1])
        with pytest.raises(EngineStartError, match=rf"engine\.port: port {config.port} is taken .*engine\.port=0"):
            await EngineServer(config, model, tmp_path / "log").start()


def test_a_server_whose_port_was_taken_ends_before_its_imports(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = ["--host", "127.0.0.1", "--port", str(holder.getsockname()[1])]
        command = [sys.executable, str(SERVE), "--model-path", str(model), *address]
        server = subprocess.run(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert server.returncode == 1
    assert reason_in_log(server.stderr).startswith("its port is taken")


@pytest.mark.parametrize(
    ("script", "reason"),
    [("#!/bin/sh\nexit 3\n", "python has no SGLang: exit code 3"), ("\0", "python: .*Exec format")],
)
def test_an_interpreter_without_sglang_is_refused(tmp_path: Path, script: str, reason: str) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"^engine\.python: .*{tmp_path}/{reason}"):
        sglang_version(str(python))


async def test_a_missing_interpreter_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.python: /no/such is not an interpreter; run `agent-rl install eng"):
        async with open_engine(EngineConfig(python="/no/such"), model, read_model_spec(model), tmp_path):
            pass


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("x\nOSError: [Errno 98] error while attempting to bind: Address already in use\n", "its port is taken (OSErr"),
        ("a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "out of memory (torch.OutOfMemoryError: CUDA out"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory\n", "out of memory (RuntimeError"),
        ("ModuleNotFoundError: No module named 'torch_memory_saver'\n", "engine.colocate needs torch-memory-saver"),
        ("OSError: [Errno 28] No space left on device\n", "the disk is full (OSError"),
        ("[2026-01-01 10:00:00] ValueError: a\n[12:00] ValueError: dtype float9 unknown\nbye\n", "ValueError: dtype"),
        ("usage: x\nserve.py: error: unrecognized arguments: --y\n", "serve.py: error: unrecognized"),
        ("\n\n", "its log is empty"),
    ],
)
def test_the_reason_is_found_in_the_log(log: str, reason: str) -> None:
    assert reason_in_log(log).startswith(reason)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "triton"), ("cpu", None)])
def test_gpt_oss_on_a_gpu_gets_experts_that_capture_routes(device: str, expected: str | None, tmp_path: Path) -> None:
    """What the user sets comes later, so it counts."""
    model = write_model(tmp_path / "model", "gpt_oss", seed=0)

    def backends(**options: Any) -> list[str]:
        command = EngineServer(
            EngineConfig(python=sys.executable, device=device, **options), model, tmp_path
        )._command()
        return [value for flag, value in pairwise(command) if flag == "--moe-runner-backend"]

    default = [expected] if expected else []
    assert backends() == default
    assert backends(extra_args=("--moe-runner-backend", "cutlass")) == [*default, "cutlass"]


@pytest.mark.parametrize(
    ("options", "gpu", "seconds"),
    [
        ({"device": "cpu"}, True, 600),
        ({"device": "cuda"}, False, 1800),
        ({"device": "auto"}, False, 600),
        ({"device": "auto"}, True, 1800),
        ({"device": "auto", "placement": "ray"}, False, 1800),
        ({"device": "cuda", "start_timeout": 7}, True, 7),
    ],
)
def test_an_engine_on_a_gpu_has_time_to_compile_kernels(
    options: dict[str, Any], gpu: bool, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_rl.config.engine.NVIDIA", tmp_path if gpu else tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert EngineConfig(**options).start_seconds == seconds


def test_what_a_start_on_gpus_waits_for_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    describe_gpu_start(EngineConfig(device="cuda"), Path("runs/a"), Display("a"))
    compiling, settings = capsys.readouterr().out.splitlines()
    assert compiling.endswith("kernels for minutes; the limit is 1800 s; log: runs/a/engine-0.log")
    assert settings.startswith("NCCL: NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=1;")


def test_group_members_are_running_processes() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert group_members(child.pid) == [child.pid]
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while group_members(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group_members(child.pid) == [], "a zombie does not run"
    child.wait(5)


async def test_a_model_that_sglang_serves_wrongly_is_refused(
    engine_config: EngineConfig, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [1]}))
    with pytest.raises(ConfigError, match=r"has dense layers \[1\], which SGLang would not load"):
        async with open_engine(engine_config, other, read_model_spec(other), tmp_path):
            pass
