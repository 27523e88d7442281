"""Starts, kills and stops fake SGLang servers (:mod:`fake_server_process`)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from agent_rl.errors import EngineError, EngineStartError
from agent_rl.utils.http import AsyncHttp

PROCESS = Path(__file__).with_name("fake_server_process.py")


class FakeServer:
    """One process. Has the methods of :class:`agent_rl.engine.supervisor.Server`; a restart keeps ``port``."""

    def __init__(self, port: int, directory: Path, *, starts: int = 100) -> None:
        self.port, self._directory, self._starts = port, directory, starts
        self.gpus = ()
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        if not self._starts:
            raise EngineStartError("out of memory")
        self._starts -= 1
        self._process = self._started()
        async with AsyncHttp(5.0) as http:
            while True:
                try:
                    await http.get(f"{self.url}/model_info")
                    return self.url
                except EngineError:
                    await asyncio.sleep(0.02)

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROCESS), str(self.port), str(self._directory)]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def death(self) -> str | None:
        assert self._process is not None
        return None if self._process.poll() is None else "the engine server died"

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def stop(self) -> None:
        if self._process is not None:
            self.kill()
            self._process = None
