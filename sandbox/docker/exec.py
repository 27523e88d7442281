"""Runs one command in a running container over the engine's HTTP API. Blocking: call it in a worker thread."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any, Protocol

from sandbox.process import Capture, OutputThrottle

_CHUNK = 1 << 16
_STDERR = 2
# CPU seconds per frame and per byte of output, in the engine and this process (measured under load with docker 20.10
# and podman 4.3): each frame wakes a monitor, the engine's daemon and this thread.
_FRAME_COST, _BYTE_COST = 70e-6, 1.5e-9
_CODE_SECONDS = 10.0
_CODE_POLL_SECONDS = 0.01

# Runs in the sandbox as the command's user, without capabilities, and reports how the command ended:
#   $1 seconds, $2 directory, $3 bytes of standard input (-1: none), then the command.
# - `timeout` kills the command inside the sandbox: the engine cannot kill it, and a kill from outside leaves children.
# - `kill -9 -1` ends all remaining processes of the command in any session, because without capabilities they cannot
#   become another user's. It does not reach this shell, nor the sandbox's first processes, which belong to the user
#   nobody (sandbox/docker/backend.py).
# - `head` ends standard input because a TLS connection cannot close one direction. The rest of the input is read even
#   if no command runs: podman otherwise writes an error message of its own to the output.
# - Both outputs end with a mark: a busy engine sometimes loses output (seen with docker 20.10), and lost output must
#   not look like a command without output.
# - The inner shell keeps the shell's own message ("Killed") out of the command's standard error: a shell writes it with
#   the redirection of the command it waits for.
# - Under gVisor, a process that is being forked escapes `kill`, so it repeats until only init, `sleep` and this shell
#   are left. Counting them starts no program, because the process limit may be reached.
_KILL = """n=0
while kill -9 -1; n=$((n+1)); set -- /proc/[0-9]*; [ $# -gt 3 ] && [ $n -lt 200 ]; do :; done"""
WRAPPER = (
    """
exec 3>&2 2>/dev/null
finish() { printf '\\000agent-rl end\\000'; printf '\\000agent-rl end\\000' >&3; exit "$1"; }
cd -- "$2" || { [ "$3" -lt 0 ] || head -c "$3" >/dev/null; echo "cd: $2: no such directory" >&3; finish 126; }
seconds=$1 size=$3; shift 3
run() { (exec timeout -s KILL "$seconds" "$@" 2>&3 3>&-); }
if [ "$size" -ge 0 ]; then head -c "$size" | { run "$@"; code=$?; cat >/dev/null; exit $code; }
else run "$@"; fi
code=$?
"""
    + _KILL
    + """
finish $code
"""
)
END = b"\0agent-rl end\0"
KILL_ALL = ("/bin/sh", "-c", f"{_KILL}; exit 0")


class Sink(Protocol):
    """Receives the bytes of a stream."""

    def feed(self, chunk: bytes) -> None: ...


@dataclass(slots=True)
class MarkedStream:
    """Passes a stream on to ``capture`` without the wrapper's end mark."""

    capture: Capture
    _tail: bytes = b""

    def feed(self, chunk: bytes) -> None:
        data = self._tail + chunk
        split = max(0, len(data) - len(END))
        self.capture.feed(data[:split])
        self._tail = data[split:]

    def finish(self) -> bool:
        """Return whether the stream ended with the mark; otherwise pass its tail on to ``capture``."""
        if self._tail == END:
            return True
        self.capture.feed(self._tail)
        return False


@dataclass(slots=True)
class Demux:
    """Splits the engine's stream of frames: a kind byte, three zeros, a big-endian length, the payload."""

    out: Sink
    err: Sink
    frames: int = 0
    _header: bytearray = field(default_factory=bytearray)
    _kind: int = 0
    _remaining: int = 0

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._remaining:
                (self.err if self._kind == _STDERR else self.out).feed(bytes(view[: self._remaining]))
                consumed = min(self._remaining, len(view))
                self._remaining -= consumed
            else:
                consumed = min(8 - len(self._header), len(view))
                self._header += view[:consumed]
                if len(self._header) == 8:
                    self._kind, self._remaining = struct.unpack(">BxxxL", self._header)
                    self._header.clear()
                    self.frames += 1
            view = view[consumed:]


class ExecConnection:
    """The connection of a running command; another thread can abort it, so that the command's thread returns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._aborted = Event()

    def attach(self, connection: socket.socket) -> None:
        """Set the socket of the command; shut it down if :meth:`abort` was called before."""
        with self._lock:
            self._socket = connection
            if self.aborted:
                self._shut(connection)

    def abort(self) -> None:
        """Shut the connection down."""
        with self._lock:
            self._aborted.set()
            if self._socket is not None:
                self._shut(self._socket)

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def wait(self, seconds: float) -> None:
        """Wait ``seconds``, or until the connection is aborted."""
        self._aborted.wait(seconds)

    @staticmethod
    def _shut(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class ExecOutcome:
    """The end of a command. ``exit_code`` is None after the deadline or an abort.

    ``complete``: both outputs end with the wrapper's mark.
    """

    exit_code: int | None
    out: Capture
    err: Capture
    complete: bool


def run_exec(
    api: Any,
    container: str,
    argv: Sequence[str],
    connection: ExecConnection,
    *,
    user: str,
    env: Mapping[str, str],
    stdin: bytes | None,
    limit: int,
    deadline: float,
    throttle: OutputThrottle,
    unthrottled_seconds: float,
) -> ExecOutcome:
    """Run ``argv`` as ``user`` and read its output until it ends, for at most ``deadline`` seconds.

    It reads as slowly as ``throttle`` requires, except in the last ``unthrottled_seconds``. ``argv`` starts in /, which
    always exists; an earlier command may have removed the working directory.
    """
    exec_id = api.exec_create(
        container,
        list(argv),
        environment=dict(env),
        user=user,
        workdir="/",
        stdin=stdin is not None,
        stdout=True,
        stderr=True,
    )["Id"]
    stream = api.exec_start(exec_id, socket=True)
    # The client returns a read-only wrapper for plain sockets and the socket itself for TLS.
    sock = stream if isinstance(stream, ssl.SSLSocket) else stream._sock
    out, err = MarkedStream(Capture(limit)), MarkedStream(Capture(limit))
    demux, deadline_time = Demux(out, err), time.monotonic() + deadline

    def on_output(data: bytes) -> None:
        frames = demux.frames
        demux.feed(data)
        wait = throttle.wait_after((demux.frames - frames) * _FRAME_COST + len(data) * _BYTE_COST)
        connection.wait(min(wait, deadline_time - unthrottled_seconds - time.monotonic()))

    try:
        connection.attach(sock)
        ended = _exchange(sock, stdin or b"", on_output, deadline_time)
    finally:
        stream.close()
    code = _exit_code(api, exec_id) if ended and not connection.aborted else None
    marks = [out.finish(), err.finish()]
    return ExecOutcome(code, out.capture, err.capture, all(marks))


def _exit_code(api: Any, exec_id: str) -> int | None:
    """Return the exit code of a command whose output has ended; a busy engine reports it with a delay."""
    deadline = time.monotonic() + _CODE_SECONDS
    while (state := api.exec_inspect(exec_id))["Running"] and time.monotonic() < deadline:
        time.sleep(_CODE_POLL_SECONDS)
    code = state["ExitCode"]
    return None if code is None else int(code)


def _exchange(
    connection: socket.socket, stdin: bytes, on_output: Callable[[bytes], None], deadline_time: float
) -> bool:
    """Send ``stdin`` and read output concurrently; return whether the other end closed before the deadline."""
    unsent = memoryview(stdin)
    while (remaining := deadline_time - time.monotonic()) > 0:
        # A short timeout while there is input, so that neither direction blocks the other.
        connection.settimeout(min(remaining, 0.01) if unsent else remaining)
        if unsent:
            try:
                unsent = unsent[connection.send(unsent[:_CHUNK]) :]
            except TimeoutError:
                pass
            except OSError:
                unsent = unsent[:0]  # the command ended without reading all input
        try:
            connection.settimeout(0.001 if unsent else max(0.001, deadline_time - time.monotonic()))
            data = connection.recv(_CHUNK)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return True
        if not data:
            return True
        on_output(data)
    return False
