"""Runs one host process with a timeout, captures limited output, and throttles a flood of output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from sandbox.shielded import wait_until_done

_CHUNK = 1 << 16
_KILL_GRACE = 10.0
_READ_COST = 120e-6
"""CPU seconds per read, including the event loop (measured under load)."""
_THROTTLE_SHARE = 0.04
"""Share of the sandbox's CPU limit. Cost estimates may be off by a factor of 2; the host still pays less than 10 %."""
_THROTTLE_BURST = 0.25
"""CPU seconds of the host that a sandbox may use without a delay: enough for a long log, not for a flood."""


class OutputThrottle:
    """Delays reading a sandbox's output if reading it costs the host too much CPU time; full pipes make it wait.

    All commands of a sandbox share one throttle. Thread-safe.
    """

    def __init__(self, cpus: float) -> None:
        self._rate = _THROTTLE_SHARE * cpus
        self._budget = _THROTTLE_BURST
        self._updated = time.monotonic()
        self._lock = threading.Lock()

    def wait_after(self, cost: float) -> float:
        """Return the seconds to wait after output that cost the host ``cost`` CPU seconds."""
        with self._lock:
            now = time.monotonic()
            self._budget = min(_THROTTLE_BURST, self._budget + (now - self._updated) * self._rate) - cost
            self._updated = now
            return max(0.0, -self._budget / self._rate)


@dataclass(slots=True)
class Capture:
    """Keeps the first ``limit`` bytes of a stream in ``data`` and counts the rest in ``dropped``."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def feed(self, chunk: bytes) -> None:
        kept = chunk[: max(0, self.limit - len(self.data))]
        self.data += kept
        self.dropped += len(chunk) - len(kept)


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The end of a process. ``returncode`` is -signal after a signal; ``seconds`` is wall time."""

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
    kill_escaped: Callable[[], None] = lambda: None,
    throttle: OutputThrottle | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
) -> ProcessResult:
    """Run ``argv`` in a new process group with exactly the environment ``env``.

    After ``timeout`` seconds, or if the caller is cancelled, it kills the group and calls ``kill_escaped`` to kill
    processes outside of the group. It keeps ``limit`` bytes per stream, drops the rest, and reads as slowly as
    ``throttle`` requires. The calling thread must outlive the process. Raises ``OSError`` if the process does not
    start and ``TimeoutError`` if a killed process is not reaped within 10 seconds.
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
    # Not cancellable: asyncio 3.11.7 waits forever for pipes that are not connected yet.
    cancellation = await wait_until_done(starting)
    process = starting.result()
    out, err = Capture(limit), Capture(limit)
    killed = asyncio.Event()
    exchange = asyncio.ensure_future(_exchange(process, stdin, (out, err), throttle, killed))
    timed_out = False
    try:
        if cancellation is not None:
            raise cancellation
        done, _ = await asyncio.wait({exchange}, timeout=timeout)
        timed_out = not done
    finally:
        if not exchange.done():
            _kill_group(process)
            kill_escaped()
            killed.set()
        await _wait_reaped(exchange)
    exchange.result()
    assert process.returncode is not None
    return ProcessResult(
        returncode=process.returncode,
        stdout=bytes(out.data),
        stderr=bytes(err.data),
        seconds=time.perf_counter() - started,
        timed_out=timed_out,
        truncated=out.dropped + err.dropped > 0,
    )


async def _exchange(
    process: asyncio.subprocess.Process,
    stdin: bytes | None,
    captures: tuple[Capture, Capture],
    throttle: OutputThrottle | None,
    killed: asyncio.Event,
) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.TaskGroup() as group:
        for stream, capture in zip((process.stdout, process.stderr), captures, strict=True):
            group.create_task(_read_stream(stream, capture, throttle, killed))
        if stdin is not None:
            assert process.stdin is not None
            group.create_task(_write_stdin(process.stdin, stdin))
        await process.wait()


async def _read_stream(
    stream: asyncio.StreamReader, capture: Capture, throttle: OutputThrottle | None, killed: asyncio.Event
) -> None:
    while chunk := await stream.read(_CHUNK):
        capture.feed(chunk)
        if throttle is not None and (wait := throttle.wait_after(_READ_COST)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(killed.wait(), wait)


async def _write_stdin(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A command may end without reading its input.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _wait_reaped(exchange: asyncio.Future[None]) -> None:
    """Wait at most 10 seconds for a killed process to be reaped, ignoring cancellations until then."""
    cancellation = await wait_until_done(asyncio.ensure_future(asyncio.wait({exchange}, timeout=_KILL_GRACE)))
    if not exchange.done():
        exchange.cancel()
        raise TimeoutError(f"a killed process was not reaped within {_KILL_GRACE:.0f} s")
    if cancellation is not None:
        raise cancellation
