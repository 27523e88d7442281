"""One command in a running container, over the engine's HTTP API. Blocking: meant for a worker thread."""

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

from sandbox.output_throttle import Toll
from sandbox.process import Capture

_CHUNK = 1 << 16
_STDERR = 2
# CPU seconds that output costs the engine's processes and this one, a frame and a byte (measured with docker 20.10 and
# podman 4.3 under load): each frame wakes a monitor, the engine's daemon and this thread.
_FRAME_COST, _BYTE_COST = 70e-6, 1.5e-9
_CODE_SECONDS = 10.0
_CODE_POLL_SECONDS = 0.01

# Runs in the sandbox as root without capabilities, and says how the command ended:
#   $1 seconds, $2 directory, $3 bytes of standard input (-1: none), then the command.
# - The engine can't kill a command, and a kill from outside would leave its children: `timeout` does it in the sandbox.
# - `kill -9 -1` then ends whatever the command left behind, also in sessions of its own. It reaches neither this shell
#   nor the sandbox's first processes, which belong to another user (sandbox/docker/backend.py).
# - Standard input is cut off by `head`, since closing one direction is beyond a TLS connection. What is left of it is
#   read, also where no command runs: podman puts a complaint of its own into the output where nobody takes the input.
# - Last come marks at the end of both outputs: the engine now and then loses output when it is busy (seen with docker
#   20.10), and what is lost must not look like a command that said nothing.
# - The shell's own words ("Killed") are kept out of the command's standard error: it says them with the redirection of
#   the command it waits for, hence the inner shell.
# - Under gVisor a process that is being forked meanwhile escapes, hence again and again until none is left but init,
#   keeper and this shell. Counting them starts no program, for which there may be no room.
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
    """Takes what comes of a stream."""

    def feed(self, chunk: bytes) -> None: ...


@dataclass(slots=True)
class Marked:
    """A stream that ends with the wrapper's mark, which is held back from ``capture``."""

    capture: Capture
    _held: bytes = b""

    def feed(self, chunk: bytes) -> None:
        data = self._held + chunk
        cut = max(0, len(data) - len(END))
        self.capture.feed(data[:cut])
        self._held = data[cut:]

    def finish(self) -> bool:
        """Whether the stream came to its end. What was held back and was no mark goes to ``capture``."""
        if self._held == END:
            return True
        self.capture.feed(self._held)
        return False


@dataclass(slots=True)
class Demux:
    """Takes apart the engine's stream of frames: a kind byte, three zeros, a big-endian length, the payload."""

    out: Sink
    err: Sink
    frames: int = 0
    _header: bytearray = field(default_factory=bytearray)
    _kind: int = 0
    _left: int = 0

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._left:
                (self.err if self._kind == _STDERR else self.out).feed(bytes(view[: self._left]))
                taken = min(self._left, len(view))
                self._left -= taken
            else:
                taken = min(8 - len(self._header), len(view))
                self._header += view[:taken]
                if len(self._header) == 8:
                    self._kind, self._left = struct.unpack(">BxxxL", self._header)
                    self._header.clear()
                    self.frames += 1
            view = view[taken:]


class ExecLink:
    """The connection of a running command, which another thread may cut to make the command's thread return."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._cut = Event()

    def attach(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = connection
            if self.is_cut:
                self._shut(connection)

    def cut(self) -> None:
        with self._lock:
            self._cut.set()
            if self._socket is not None:
                self._shut(self._socket)

    @property
    def is_cut(self) -> bool:
        return self._cut.is_set()

    def wait(self, seconds: float) -> None:
        """Wait, or until the link is cut."""
        self._cut.wait(seconds)

    @staticmethod
    def _shut(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class ExecOutcome:
    """How a command ended. ``exit_code`` is None where it did not within the deadline, or the link was cut.

    ``complete``: the wrapper's marks came at the end of both outputs.
    """

    exit_code: int | None
    out: Capture
    err: Capture
    complete: bool


def run_exec(
    api: Any,
    container: str,
    argv: Sequence[str],
    link: ExecLink,
    *,
    env: Mapping[str, str],
    stdin: bytes | None,
    limit: int,
    deadline: float,
    toll: Toll,
    haste: float,
) -> ExecOutcome:
    """Run ``argv`` as the sandbox's root and read its output until it ends, or for ``deadline`` seconds at most.

    Output is read as slowly as ``toll`` demands, but for the last ``haste`` of these seconds.
    ``argv`` starts in the top directory, which is always there; the working directory is the command's to remove.
    """
    exec_id = api.exec_create(
        container,
        list(argv),
        environment=dict(env),
        user="0:0",
        workdir="/",
        stdin=stdin is not None,
        stdout=True,
        stderr=True,
    )["Id"]
    stream = api.exec_start(exec_id, socket=True)
    # The client hands out a read-only wrapper for plain sockets and the socket itself for TLS.
    connection = stream if isinstance(stream, ssl.SSLSocket) else stream._sock
    out, err = Marked(Capture.of(limit)), Marked(Capture.of(limit))
    demux, until = Demux(out, err), time.monotonic() + deadline

    def take(data: bytes) -> None:
        frames = demux.frames
        demux.feed(data)
        wait = toll.wait_after((demux.frames - frames) * _FRAME_COST + len(data) * _BYTE_COST)
        link.wait(min(wait, until - haste - time.monotonic()))

    try:
        link.attach(connection)
        ended = _converse(connection, stdin or b"", take, until)
    finally:
        stream.close()
    code = _exit_code(api, exec_id) if ended and not link.is_cut else None
    marks = [out.finish(), err.finish()]
    return ExecOutcome(code, out.capture, err.capture, all(marks))


def _exit_code(api: Any, exec_id: str) -> int | None:
    """The exit code of a command whose output has ended. A busy engine notes it a moment later."""
    deadline = time.monotonic() + _CODE_SECONDS
    while (state := api.exec_inspect(exec_id))["Running"] and time.monotonic() < deadline:
        time.sleep(_CODE_POLL_SECONDS)
    code = state["ExitCode"]
    return None if code is None else int(code)


def _converse(connection: socket.socket, stdin: bytes, take: Callable[[bytes], None], deadline: float) -> bool:
    """Send ``stdin`` and read output, both as the other end is ready; whether the other end closed in time."""
    unsent = memoryview(stdin)
    while (left := deadline - time.monotonic()) > 0:
        # While there is input to send a short wait, so that neither direction waits on the other.
        connection.settimeout(min(left, 0.01) if unsent else left)
        if unsent:
            try:
                unsent = unsent[connection.send(unsent[:_CHUNK]) :]
            except TimeoutError:
                pass
            except OSError:
                unsent = unsent[:0]  # The command ended without reading all of it.
        try:
            # Input goes out as fast as it is taken; output is looked at between pieces without waiting.
            connection.settimeout(0.001 if unsent else max(0.001, deadline - time.monotonic()))
            data = connection.recv(_CHUNK)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return True
        if not data:
            return True
        take(data)
    return False
