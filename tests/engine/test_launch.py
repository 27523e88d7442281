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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_control import shared_files

from agent_rl.config import EngineConfig
from agent_rl.engine.factory import open_engine
from agent_rl.engine.launch import EngineServer, group_members, reason_in_log, sglang_version
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.shared_memory import SHARED_MEMORY, remove_stale
from agent_rl.errors import ConfigError, EngineStartError, RoutesMissingError
from agent_rl.models.spec import read_model_spec

OWNER = """
    import asyncio, json, sys
    from pathlib import Path
    from agent_rl.config import EngineConfig
    from agent_rl.engine.launch import EngineServer

    async def main():
        config = EngineConfig(**json.loads(sys.argv[1]))
        server = EngineServer(config, Path(sys.argv[2]), Path(sys.argv[3]), capture_routes=False)
        await server.start()
        print(json.dumps({"url": server.url, "pid": server.pid}), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@dataclass(frozen=True)
class Owned:
    """A server without route capture, and the process that owns it."""

    url: str
    group: int
    owner: subprocess.Popen[str]


@pytest.fixture(scope="module")
def owned(engine_config: EngineConfig, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    log = tmp_path_factory.mktemp("owned") / "engine.log"
    arguments = [engine_config.model_dump_json(), str(model), str(log)]
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    first_line = owner.stdout.readline()
    assert first_line, log.read_text()
    started = json.loads(first_line)
    yield Owned(started["url"], started["pid"], owner)
    owner.kill()
    owner.wait(10)


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_server_without_capture_is_found_out(owned: Owned, model: Path) -> None:
    with pytest.raises(RoutesMissingError, match="the engine sends no routes: start it with --enable"):
        async with SGLangEngine(owned.url, read_model_spec(model)):
            pass


@pytest.mark.sglang
@pytest.mark.slow
def test_the_server_dies_with_an_owner_that_was_killed(owned: Owned) -> None:
    """The next start removes what the server leaves in shared memory."""
    assert len(group_members(owned.group)) >= 2, "the server has child processes"
    files = shared_files(owned.group)
    assert any(name.startswith("sglang_loads_") for name in files)
    remove_stale()
    assert files <= set(os.listdir(SHARED_MEMORY)), "files of a living server were removed"
    owned.owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while group_members(owned.group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(owned.group) == []
    assert files & set(os.listdir(SHARED_MEMORY)), "a killed server cleans up by itself: remove this sweep"
    remove_stale()  # what every start begins with
    assert not files & set(os.listdir(SHARED_MEMORY))


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_server_that_dies_gives_its_logs_reason(
    engine_config: EngineConfig, model: Path, tmp_path: Path
) -> None:
    config = engine_config.model_copy(update={"extra_args": ("--no-such-flag", "1")})
    with pytest.raises(EngineStartError, match=r"died \(exit code 2\): .*--no-such-flag.*; log: ") as caught:
        await EngineServer(config, model, tmp_path / "engine.log").start()
    assert "\n" not in str(caught.value)


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
async def test_cancelling_the_start_leaves_nothing(engine_config: EngineConfig, model: Path, tmp_path: Path) -> None:
    server = EngineServer(engine_config, model, tmp_path / "engine.log")
    task = asyncio.ensure_future(server.start())
    await asyncio.wait({task}, timeout=0.5)
    assert server.pid is not None, "the server was spawned"
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert group_members(server.pid) == []


async def test_a_taken_port_is_one_line(model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        config = EngineConfig(python=sys.executable, port=holder.getsockname()[1])
        with pytest.raises(EngineStartError, match=rf"engine\.port: port {config.port} is taken .*engine\.port=0"):
            await EngineServer(config, model, tmp_path / "log").start()


@pytest.mark.parametrize(
    ("script", "reason"),
    [("#!/bin/sh\nexit 3\n", "python has no SGLang: exit code 3"), ("\0", "python: .*Exec format")],
)
def test_an_interpreter_that_says_nothing_is_a_users_mistake(tmp_path: Path, script: str, reason: str) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"^engine\.python: .*{tmp_path}/{reason}"):
        sglang_version(str(python))


async def test_a_missing_interpreter_is_a_users_mistake(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.python: /no/such is not an interpreter; run `agent-rl install engine`"
    ):
        async with open_engine(EngineConfig(python="/no/such"), model, read_model_spec(model), tmp_path):
            pass


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("x\nOSError: [Errno 98] error while attempting to bind: Address already in use\n", "its port is taken (OSErr"),
        ("a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "out of memory (torch.OutOfMemoryError: CUDA out"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory\n", "out of memory (RuntimeError"),
        (
            "ModuleNotFoundError: No module named 'torch_memory_saver'\n",
            "engine.colocate needs torch-memory-saver",
        ),
        ("OSError: [Errno 28] No space left on device\n", "the disk is full (OSError"),
        (
            "[2026-01-01 10:00:00] ValueError: first\n[12:00] ValueError: dtype float9 unknown\nbye\n",
            "ValueError: dtype",
        ),
        ("usage: x\nserve.py: error: unrecognized arguments: --y\n", "serve.py: error: unrecognized"),
        ("\n\n", "its log is empty"),
    ],
)
def test_the_reason_is_found_in_the_log(log: str, reason: str) -> None:
    assert reason_in_log(log).startswith(reason)


def test_group_members_are_those_that_run() -> None:
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
