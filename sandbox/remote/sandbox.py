"""A sandbox on a provider's machine, which its agent serves over one connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sandbox.base import BaseSandbox
from sandbox.disk import Usage
from sandbox.errors import SandboxLostError
from sandbox.files import TreeCollector
from sandbox.remote.connection import AgentConnection
from sandbox.types import ExecResult, SandboxSpec, TreeFile

_GRACE = 30.0
"""Seconds beyond the time limit of a command after which its sandbox counts as lost."""
_FILE_SECONDS = 120.0


class RemoteSandbox(BaseSandbox):
    """One sandbox of a :class:`sandbox.remote.backend.RemoteBackend`. ``end`` removes it at its provider."""

    def __init__(
        self, id: str, spec: SandboxSpec, connection: AgentConnection, end: Callable[[RemoteSandbox], Awaitable[None]]
    ) -> None:
        super().__init__(id, spec)
        self._connection, self._end = connection, end
        # One command at a time: the end of a command kills all processes of the sandbox.
        self._exec_lock = asyncio.Lock()

    async def _exec(
        self, argv: Sequence[str], timeout: float, cwd: str, env: Mapping[str, str], stdin: bytes | None, user: str
    ) -> ExecResult:
        request = {
            **{"argv": list(argv), "seconds": timeout, "cwd": cwd, "user": user, "stdin": stdin is not None},
            **{"env": {**self._spec.env, **env}, "limit": self._spec.output_limit_bytes},
        }
        async with self._exec_lock:
            self._check_open()
            if self.disk_watch.overgrown:
                return await self._disk_limit_result(b"", 0.0)
            self.disk_watch.command_begins()
            try:
                header, body = await self._connection.request("exec", stdin or b"", timeout=timeout + _GRACE, **request)
            except SandboxLostError:
                if self.disk_watch.overgrown:
                    return await self._disk_limit_result(b"", 0.0)
                raise
            finally:
                self.disk_watch.command_ends()
        out, err = body[: header["stdout"]], body[header["stdout"] :]
        if self.disk_watch.overgrown:
            return await self._disk_limit_result(out, header["spent"])
        return ExecResult(
            exit_code=header["code"],
            stdout=out,
            stderr=err,
            seconds=header["spent"],
            timed_out=header["timed_out"],
            truncated=header["truncated"],
            oom_killed=header["oom_killed"],
        )

    async def _read_file(self, path: str, max_bytes: int) -> bytes:
        _, data = await self._files("read_file", path=self._absolute(path), max_bytes=max_bytes)
        return data

    async def _read_tree(self, path: str, tree: TreeCollector, skip: Collection[str]) -> None:
        """The agent reads the files; no program of the sandbox takes part."""
        limits = tree.limits
        header, data = await self._files(
            "read_tree",
            path=self._absolute(path),
            skip=list(skip),
            known=dict(tree.known),
            file_bytes=limits.file_bytes,
            total_bytes=limits.total_bytes,
            max_files=limits.files,
            compared_bytes=limits.compared_bytes,
        )
        begin = 0
        for name, mode, size, blob in header["entries"]:
            content = None if size < 0 else data[begin : begin + size]
            begin += max(0, size)
            tree.add(name, TreeFile(mode, content, blob))

    async def _write_files(self, files: Mapping[str, bytes]) -> None:
        sizes = [[self._absolute(path), len(data)] for path, data in files.items()]
        await self._files("write_files", b"".join(files.values()), files=sizes)

    async def _files(self, operation: str, body: bytes = b"", **request: Any) -> tuple[dict[str, Any], bytes]:
        return await self._connection.request(operation, body, timeout=_FILE_SECONDS, **request)

    def _absolute(self, path: str) -> str:
        return os.path.normpath(PurePosixPath(self._spec.workdir) / path)

    def _disk_directory(self) -> Path | None:
        return None

    async def _measure_disk(self) -> Usage | None:
        header, _ = await self._files("disk", workdir=self._spec.workdir)
        return Usage(header["bytes"], header["inodes"])

    async def _empty_disk(self) -> None:
        """The sandbox ends with its connection."""
        await self._connection.close()

    async def _destroy(self) -> None:
        await self.disk_watch.close()
        await self._connection.close()
        await self._end(self)
