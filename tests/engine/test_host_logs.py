"""The directories that servers beside actors log to: each is removed, also where its owner was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_interpreter import make_interpreter

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import ServerNode
from agent_rl.engine.ray_actor import EngineActor, LogDirectory, ServerRequest

OWNER = "from agent_rl.engine.ray_actor import LogDirectory; print(LogDirectory().log, flush=True); input()"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, of this process and of those that it starts."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


def left(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def test_a_start_removes_the_directories_of_owners_that_were_killed(temporary: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    log = Path(owner.stdout.readline().strip())
    mine = LogDirectory()
    assert set(temporary.iterdir()) == {log.parent, mine.log.parent}, "a living owner's stays"
    owner.kill()
    owner.communicate()
    log.write_text("what a server that was killed said")
    other = LogDirectory()
    assert set(temporary.iterdir()) == {mine.log.parent, other.log.parent}
    mine.log.write_bytes(b"the end")
    assert (mine.take(), other.take()) == (b"the end", b"")
    assert left(temporary) == []


@pytest.mark.slow
async def test_a_stopped_server_returns_its_log_and_leaves_no_file(temporary: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = EngineConfig(python=str(make_interpreter(tmp_path)), device="cpu", extra_args=("--die",))
    host = EngineActor()
    answer = await host.start(ServerRequest(config, model, 0, False, ServerNode(), Path("/logs/engine-0.log")))
    assert answer.error.endswith("no such thing as --die; log: /logs/engine-0.log")
    assert len(left(temporary)) == 1
    assert b"no such thing as --die" in await host.stop()
    assert left(temporary) == []
    assert await host.stop() == b""
