"""Runs one host process with a deadline and a cap on the output that is kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sandbox.output_throttle import Toll
from sandbox.shielded import outlast

_CHUNK = 1 << 16
_KILL_GRACE = 10.0
_READ_COST = 120e-6
"""CPU seconds that one read takes, the event loop's part included (measured under load)."""


@dataclass(slots=True)
class Capture:
    """The first ``limit`` bytes of a stream; what follows is counted as dropped and not held."""

    limit: int
    data: bytearray
    dropped: int = 0

    @classmethod
    def of(cls, limit: int) -> Capture:
        return cls(limit, bytearray())

    def feed(self, chunk: bytes) -> None:
        kept = chunk[: max(0, self.limit - len(self.data))]
        self.data += kept
        self.dropped += len(chunk) - len(kept)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended. ``returncode`` is -signal where a signal ended it; ``seconds`` is wall time."""

    returncode: int
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool
    truncated: bool


async def run_process(
    argv: Sequence[str],
    *,
    timeout: float,
    limit: int,
    stdin: bytes | None = None,
    pass_fds: Sequence[int] = (),
    kill_rest: Callable[[], None] = lambda: None,
    toll: Toll | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Finished:
    """Run ``argv`` in a process group of its own, with no environment but ``env``.

    After ``timeout`` seconds, or when the caller is cancelled, the group is killed, and then ``kill_rest`` called for
    what has left it. Output beyond ``limit`` bytes a stream is read and dropped while the process goes on, all of it as
    slowly as ``toll`` demands. Must be called from a thread that outlives the process.
    """
    started = time.perf_counter()
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    )
    # Never cancelled midway: asyncio would wait for ever for pipes that it had not connected yet (seen in 3.11.7).
    cancellation = await outlast(starting)
    process = starting.result()
    out, err = Capture.of(limit), Capture.of(limit)
    killed = asyncio.Event()
    talk = asyncio.ensure_future(_talk(process, stdin, (out, err), toll, killed))
    timed_out = False
    try:
        if cancellation is not None:
            raise cancellation
        done, _ = await asyncio.wait({talk}, timeout=timeout)
        timed_out = not done
    finally:
        # Reached on a deadline and on cancellation alike; killing a group that is gone does nothing.
        if not talk.done():
            _kill_group(process)
            kill_rest()
            killed.set()
        await _settle(talk)
    talk.result()
    assert process.returncode is not None
    return Finished(
        returncode=process.returncode,
        stdout=bytes(out.data),
        stderr=bytes(err.data),
        seconds=time.perf_counter() - started,
        timed_out=timed_out,
        truncated=out.dropped + err.dropped > 0,
    )


async def _talk(
    process: asyncio.subprocess.Process,
    stdin: bytes | None,
    captures: tuple[Capture, Capture],
    toll: Toll | None,
    killed: asyncio.Event,
) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.TaskGroup() as group:
        for stream, capture in zip((process.stdout, process.stderr), captures, strict=True):
            group.create_task(_pump(stream, capture, toll, killed))
        if stdin is not None:
            assert process.stdin is not None
            group.create_task(_feed(process.stdin, stdin))
        await process.wait()


async def _pump(stream: asyncio.StreamReader, capture: Capture, toll: Toll | None, killed: asyncio.Event) -> None:
    while chunk := await stream.read(_CHUNK):
        capture.feed(chunk)
        if toll is not None and (wait := toll.wait_after(_READ_COST)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(killed.wait(), wait)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A command need not read its input: the pipe breaking is its business.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _settle(talk: asyncio.Future[None]) -> None:
    """Wait for a killed process to be reaped, whatever happens to the caller meanwhile, within a bound."""
    cancellation = await outlast(asyncio.ensure_future(asyncio.wait({talk}, timeout=_KILL_GRACE)))
    if not talk.done():
        talk.cancel()
        raise TimeoutError(f"a killed process did not go away within {_KILL_GRACE:.0f} s")
    if cancellation is not None:
        raise cancellation
