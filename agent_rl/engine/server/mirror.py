"""Receives weight updates as deltas, in the engine's processes (``engine.weight_sync: delta``).

An engine keeps one copy of the Hugging Face tensors that it received, the mirror, in an unnamed file that its ranks
share and that disappears with them::

    full update   rank 0 writes every tensor into the mirror while all ranks load it
    delta         the web server applies it to the mirror and compares every digest, while the engine samples;
                  after the pause, the ranks load the changed tensors from the mirror

A delta is refused unless the mirror is the state that it builds on. If anything fails, the mirror is forgotten, and the
sender's next update is a full one. A delta is relayed to further engines while it arrives.

Runs in the engine's environment, which has no other module of this project but those beside this one.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import numpy as np
import torch
from delta_codec import STAGED, DeltaRefused, read_delta, state_digest, tensor_digest, words_of
from torch import Tensor

_FILES = "AGENT_RL_MIRROR"
_ALIGNED = 8
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 120.0


class Mirror:
    """The tensors in file ``data``; file ``index`` describes them: for each name its dtype, shape, offset and digest,
    and under ``load`` the names that a staged delta changed. The index is empty unless the mirror is complete."""

    def __init__(self, data: Path, index: Path) -> None:
        self._data, self._index = data, index
        self._written: dict[str, list[Any]] = {}
        self._end, self._loaded = 0, False

    @contextmanager
    def _locked(self, mode: int) -> Iterator[BinaryIO]:
        with self._data.open("r+b") as file:
            fcntl.flock(file, mode)  # opened again, so the lock excludes the other processes
            yield file

    def forget(self) -> None:
        """Refuse deltas until the next full update."""
        with self._locked(fcntl.LOCK_EX):
            self._clear()

    def begin(self) -> None:
        """An update begins."""
        self._written, self._end, self._loaded = {}, 0, False

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add tensors of a full update."""
        with self._locked(fcntl.LOCK_EX) as file:
            if not self._written:
                self._clear()
            for name, tensor in tensors:
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                file.seek(self._end)
                file.write(data.data)
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._written[name] = [dtype, list(tensor.shape), self._end, tensor_digest(data)]
                self._end += -(-data.nbytes // _ALIGNED) * _ALIGNED

    def end(self) -> None:
        """The update is over: what was loaded is what the mirror holds."""
        with self._locked(fcntl.LOCK_EX):
            if self._written:
                self._save(self._written, None)
            elif self._loaded and (index := self._read()) is not None:
                self._save(index["tensors"], None)
        self.begin()

    def stage(self, data: bytes | bytearray) -> None:
        """Apply a packed delta to the mirror. Raises DeltaRefused, with the weights in use unchanged."""
        delta = read_delta(data)
        with self._locked(fcntl.LOCK_EX) as file:
            index = self._read()
            if index is None or index["load"] is not None:
                raise DeltaRefused("no complete update came before the delta")
            tensors = index["tensors"]
            held = state_digest({name: entry[3] for name, entry in tensors.items()})
            if held != delta.base:
                raise DeltaRefused(f"the delta builds on state {delta.base[:8]}, and this engine holds {held[:8]}")
            self._clear()  # until all is applied
            for name, digest in delta.digests.items():
                dtype, shape, offset, _ = tensors[name]
                itemsize = getattr(torch, dtype).itemsize
                file.seek(offset)
                raw = np.frombuffer(bytearray(file.read(int(np.prod(shape)) * itemsize)), np.uint8)
                delta.apply(name, words_of(raw, itemsize))
                file.seek(offset)
                file.write(raw.data)
                tensors[name][3] = digest
            if state_digest({name: entry[3] for name, entry in tensors.items()}) != delta.state:
                raise DeltaRefused("the delta does not make the state that it names")
            file.flush()
            self._save(tensors, list(delta.load))

    def staged(self, state: str) -> list[tuple[str, Tensor]]:
        """The changed tensors of the staged ``state``. Raises DeltaRefused if another one is staged, or none."""
        with self._locked(fcntl.LOCK_SH):
            index = self._read()
            if index is None or index["load"] is None:
                raise DeltaRefused("no delta is staged")
            held = state_digest({name: entry[3] for name, entry in index["tensors"].items()})
            if held != state:
                raise DeltaRefused(f"state {held[:8]} is staged, not {state[:8]}")
            data = torch.from_numpy(np.memmap(self._data, np.uint8, mode="c"))
            self._loaded = True
        return [(name, _tensor(data, *index["tensors"][name][:3])) for name in index["load"]]

    def _clear(self) -> None:
        self._index.write_bytes(b"")

    def _read(self) -> dict[str, Any] | None:
        text = self._index.read_bytes()
        return json.loads(text) if text else None

    def _save(self, tensors: dict[str, list[Any]], load: Sequence[str] | None) -> None:
        self._index.write_text(json.dumps({"tensors": tensors, "load": load}))


def _tensor(data: Tensor, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    kind = getattr(torch, dtype)
    return data[offset : offset + int(np.prod(shape)) * kind.itemsize].view(kind).view(list(shape))


def install() -> Mirror:
    """Make this process's SGLang keep a mirror and load staged deltas."""
    mirror = Mirror(*_shared_files())
    module: Any = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    updater = module.WeightUpdater
    receive, begin, end, from_disk = (
        updater.receive_weights_from_distributed,
        updater.begin_weight_update,
        updater.end_weight_update,
        updater.update_weights_from_disk,
    )

    def received(self: Any, *, group_name: str, **options: Any) -> list[tuple[str, Tensor]]:
        if group_name.startswith(STAGED):
            return mirror.staged(group_name.removeprefix(STAGED))
        tensors: list[tuple[str, Tensor]] = receive(self, group_name=group_name, **options)
        if self.tp_rank == 0:
            try:
                mirror.write(tensors)
            except OSError as error:  # the disk is full: the update goes on, and the next one is full too
                print(f"no copy of the weights for delta updates: {error}", flush=True)
                mirror.begin()
        return tensors

    def began(self: Any) -> None:
        mirror.begin()
        begin(self)

    def ended(self: Any, **options: Any) -> None:
        end(self, **options)
        if self.tp_rank == 0:
            mirror.end()

    def loaded_from_disk(self: Any, *arguments: Any, **options: Any) -> tuple[bool, str]:
        mirror.forget()
        result: tuple[bool, str] = from_disk(self, *arguments, **options)
        return result

    updater.receive_weights_from_distributed, updater.update_weights_from_disk = received, loaded_from_disk
    updater.begin_weight_update, updater.end_weight_update = began, ended
    return mirror


def _shared_files() -> list[Path]:
    """The two files of the mirror: unnamed ones of the first process, which its children find through /proc."""
    if _FILES not in os.environ:
        made = [tempfile.mkstemp(prefix="agent-rl-mirror-") for _ in range(2)]
        for _, name in made:
            os.unlink(name)
        os.environ[_FILES] = ":".join(f"/proc/{os.getpid()}/fd/{file}" for file, _ in made)
    return [Path(name) for name in os.environ[_FILES].split(":")]


def serve(app: Any, mirror: Mirror) -> None:
    """Add the endpoint ``POST /stage_weight_delta?next=URL&next=URL...`` to the web server ``app``.

    The response lists why each engine refused the delta ("" for those that did not): this one, then the next ones.
    """
    responses, routing = importlib.import_module("starlette.responses"), importlib.import_module("starlette.routing")

    async def stage(request: Any) -> Any:
        received, arriving = bytearray(), asyncio.Queue[bytes]()
        further = request.query_params.getlist("next")
        relay = asyncio.create_task(_relayed(further, arriving, request.headers.get("authorization")))
        try:
            async for chunk in request.stream():
                received += chunk
                if chunk:
                    arriving.put_nowait(chunk)
        finally:
            arriving.put_nowait(b"")
        own = await asyncio.to_thread(_refusal, mirror, received)
        return responses.JSONResponse({"refusals": [own, *await relay]})

    app.router.routes.append(routing.Route("/stage_weight_delta", stage, methods=["POST"]))


async def _relayed(urls: Sequence[str], arriving: asyncio.Queue[bytes], key: str | None) -> list[str]:
    """Send the chunks in ``arriving``, up to an empty one, to the first of ``urls``, which sends them on. Returns the
    refusals of all."""
    if not urls:
        return []

    async def chunks() -> AsyncIterator[bytes]:
        while chunk := await arriving.get():
            yield chunk

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
    further = [("next", url) for url in urls[1:]]
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers={"authorization": key} if key else None) as session,
            session.post(f"{urls[0]}/stage_weight_delta", params=further, data=chunks()) as response,
        ):
            response.raise_for_status()
            refusals: list[str] = (await response.json())["refusals"]
            return refusals
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        return [f"the relay to {urls[0]} broke off: {error or type(error).__name__}"] * len(urls)


def _refusal(mirror: Mirror, data: bytearray) -> str:
    """Stage a delta. Returns why it was refused, or ""."""
    try:
        mirror.stage(data)
    except (DeltaRefused, KeyError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    return ""
