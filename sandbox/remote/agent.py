"""The main program of a remote sandbox: runs commands and accesses files for one connection.

Usage: ``python3 -I -c "$(cat agent.py)" ADDRESS SILENCE``. ``ADDRESS`` is ``-`` (standard input and output), a TCP
port, or the path of a unix socket to listen at. A socket takes one connection, which must begin with the token of the
environment variable ``AGENT_RL_TOKEN``. The sandbox ends with the connection, and after ``SILENCE`` seconds without a
request.

A message is the sizes of its header and body (``>II``), the header in JSON, and the body. ``id`` of a response is that
of its request. It uses only the standard library and supports Python 3.7 and newer, because it runs in any image.

**It kills every other process of its process-id namespace** at the end of a command, so it must have one of its own.

The agent is the user nobody with the capabilities to become other users, to kill their processes and to access their
files. Commands are root or another user without capabilities, so they can neither kill nor trace the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  imported now: a command may change the image's modules later
import errno
import hashlib
import hmac
import json
import os
import pwd
import queue
import resource
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

NOBODY = 65534
FILE_SIZE_LIMIT = 1 << 30
MAX_DEPTH = 64
MAX_DISK_DEPTH = 256
TOO_DEEP = 1 << 40
"""Files that a directory counts for that is too deep to be measured: over every limit."""
KILL_ATTEMPTS = 2000
POLL_SECONDS = 0.02
CHUNK = 1 << 16
MAX_MESSAGE = 1 << 30
SIZES = struct.Struct(">II")
# Numbers of Linux: capability.h, prctl.h, securebits.h.
DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SETPCAP = 1, 3, 5, 6, 7, 8
KEPT = sum(1 << capability for capability in (DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SETPCAP))
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 8, 24, 36, 38
CAPABILITY_VERSION = 0x20080522
LIBC = ctypes.CDLL(None, use_errno=True)
REASONS = {
    errno.ENOENT: "no such file",
    errno.EISDIR: "a directory, not a file",
    errno.ENXIO: "not a regular file",
    errno.ENOTDIR: "a part of the path is not a directory",
}


if TYPE_CHECKING:  # Python 3.8 cannot evaluate these
    Request = dict[str, Any]
    Message = tuple[dict[str, Any], bytes]


class Refused(Exception):
    """A file operation that fails: one line for the user. ``full``: the disk is full."""

    def __init__(self, text: str, full: bool = False) -> None:
        super().__init__(text)
        self.full = full


def prctl(option: int, value: int = 0) -> None:
    return LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def set_capabilities(mask: int) -> None:
    """Set the effective and permitted capabilities of this thread to ``mask``, the inheritable ones to none."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    if LIBC.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset: " + os.strerror(ctypes.get_errno()))


def become_nobody() -> None:
    """Change the user of this process to nobody and keep the capabilities ``KEPT``."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    set_capabilities(KEPT)
    own_proc_files()
    os.umask(0o022)


def own_proc_files() -> None:
    """Let this process's files in /proc belong to nobody, so that root without capabilities cannot change its
    oom_score_adj. Every change of the user or capabilities gives them to root again. Only the same user could trace it.
    """
    prctl(PR_SET_DUMPABLE, 1)


def find_user(name: str) -> tuple[int, int, str]:
    """Return user id, group id and home of ``name``: a user of the image, or numbers ``uid:gid``."""
    first, _, group = name.partition(":")
    if first.isdigit():
        uid = int(first)
        try:
            entry = pwd.getpwuid(uid)
            home, gid = entry.pw_dir, entry.pw_gid
        except KeyError:
            home, gid = "/", uid
    else:
        try:
            entry = pwd.getpwnam(first)
        except KeyError:
            raise Refused(f"user {name!r}: the image has no such user") from None
        uid, gid, home = entry.pw_uid, entry.pw_gid, entry.pw_dir
    if uid == NOBODY:
        raise Refused(f"user {name!r} keeps the sandbox alive, so its commands cannot be killed; use another")
    return uid, int(group) if group.isdigit() else gid, home


@contextlib.contextmanager
def files_of(uid: int) -> Iterator[None]:
    """Let files that this thread creates belong to the user ``uid``."""
    LIBC.setfsuid(uid)
    try:
        yield
    finally:
        LIBC.setfsuid(NOBODY)
        set_capabilities(KEPT)  # the change of the user took those of files away
        own_proc_files()


class Command:
    """A command of the sandbox: a process, its pipes, and the first bytes of its outputs."""

    def __init__(self, request: Request, stdin: bytes) -> None:
        user = find_user(request["user"])
        self.limit = request["limit"]
        self.input = memoryview(stdin)
        self.outputs = [bytearray(), bytearray()]
        self.truncated = False
        with files_of(user[0]):  # a command may open its own outputs as /dev/stdout
            (out, out_end), (err, err_end) = os.pipe(), os.pipe()
            source, self.stdin = os.pipe() if request["stdin"] else (os.open("/dev/null", os.O_RDONLY), -1)
        given = (source, out_end, err_end)
        self.pid = os.fork()
        if self.pid == 0:
            start_program(request, user, given)
        for end in given:
            os.close(end)
        self.readable = {out: 0, err: 1}
        self.poll = select.poll()
        for end, event in ((out, select.POLLIN), (err, select.POLLIN), (self.stdin, select.POLLOUT)):
            if end >= 0:
                os.set_blocking(end, False)
                self.poll.register(end, event)

    def exchange(self, seconds: float) -> None:
        """Pass on input and output for at most ``seconds``; return at the first event."""
        for end, _ in self.poll.poll(seconds * 1000):
            if end == self.stdin:
                self.write_input()
            else:
                self.read_output(end)

    def read_output(self, end: int) -> None:
        try:
            data = os.read(end, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.poll.unregister(end)
            del self.readable[end]
            os.close(end)
            return
        output = self.outputs[self.readable[end]]
        kept = data[: max(0, self.limit - len(output))]
        self.truncated = self.truncated or len(kept) < len(data)
        output += kept

    def write_input(self) -> None:
        try:
            self.input = self.input[os.write(self.stdin, self.input[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the command ended without reading all of it
            self.input = self.input[:0]
        if not self.input:
            self.close_input()

    def close_input(self) -> None:
        if self.stdin >= 0:
            self.poll.unregister(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        self.close_input()
        for end in self.readable:
            os.close(end)


def start_program(request: Request, user: tuple[int, int, str], streams: Sequence[int]) -> None:
    """Become ``user`` without capabilities and execute the program; never returns."""
    code = 126
    try:
        for number, end in enumerate(streams):
            os.dup2(end, number)
        os.setsid()
        uid, gid, home = user
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # the kernel kills a command at the memory limit, not the agent
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT, FILE_SIZE_LIMIT))
        for capability in range(64):
            prctl(PR_CAPBSET_DROP, capability)
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        set_capabilities(0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.chdir(request["cwd"])
        except OSError:
            os.write(2, f"cd: {request['cwd']}: no such directory\n".encode(errors="surrogateescape"))
            os._exit(126)
        environment = {**os.environ, "HOME": home, **request["env"]}
        code = 127
        os.execvpe(request["argv"][0], request["argv"], environment)
    except BaseException as error:
        why = getattr(error, "strerror", None) or repr(error)
        os.write(2, f"{request['argv'][0]}: {why}\n".encode(errors="surrogateescape"))
    finally:
        os._exit(code)


def reap(statuses: dict[int, int]) -> bool:
    """Collect the ends of child processes in ``statuses``; return whether none is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        statuses[pid] = status


def kill_all(statuses: dict[int, int]) -> bool:
    """Kill every process but the first one and this one; return whether all have ended."""
    for _ in range(KILL_ATTEMPTS):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
        if reap(statuses):
            return True
        time.sleep(0.005)
    return False


def oom_kills() -> int:
    """Return the out-of-memory kills in the sandbox's control group, 0 if it is not visible."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except (OSError, ValueError):
            continue
    return 0


def run_command(request: Request, stdin: bytes, cancelled: Callable[[], bool]) -> Message:
    """Run one command to its end, its time limit or its cancellation; return the header and body of the response."""
    started, kills = time.monotonic(), oom_kills()
    statuses: dict[int, int] = {}
    command = Command(request, stdin)
    timed_out = False
    try:
        while command.pid not in statuses:
            left = started + request["seconds"] - time.monotonic()
            timed_out = left <= 0
            if timed_out or cancelled():
                break
            if command.readable or command.stdin >= 0:
                command.exchange(min(left, POLL_SECONDS))
            else:
                time.sleep(min(left, POLL_SECONDS / 4))
            reap(statuses)
        killed = kill_all(statuses)
        deadline = time.monotonic() + 5.0
        command.close_input()
        while command.readable and time.monotonic() < deadline:
            command.exchange(0.1)
    finally:
        command.close()
    if not killed:
        raise RuntimeError("processes of a command could not be killed")
    status = statuses[command.pid]
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    header = {
        "code": -9 if timed_out else code,
        "timed_out": timed_out,
        "truncated": command.truncated,
        "oom_killed": oom_kills() > kills,
        "spent": time.monotonic() - started,
        "stdout": len(command.outputs[0]),
    }
    return header, bytes(command.outputs[0] + command.outputs[1])


def open_file(path: str, flags: int, directory: int | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file outside of /proc; never waits, as opening a pipe would."""
    try:
        file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=directory)
    except OSError as error:
        raise refusal(path, error) from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_dev == os.stat("/proc").st_dev:
        os.close(file)
        raise Refused(f"{path}: not a regular file")
    return file, found


def refusal(path: str, error: OSError) -> Refused:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Refused(f"{path}: {REASONS.get(error.errno or 0) or os.strerror(error.errno or 0)}", full)


def read_file(request: Request, _: bytes) -> Message:
    path, limit = request["path"], request["max_bytes"]
    file, found = open_file(path, os.O_RDONLY)
    with open(file, "rb") as stream:
        if found.st_size > limit:
            raise Refused(f"{path}: {found.st_size} bytes, more than the {limit} allowed")
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise Refused(f"{path}: more than the {limit} bytes allowed")
    return {}, data


def write_files(request: Request, body: bytes) -> Message:
    begin = 0
    for path, size in request["files"]:
        try:
            os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        except OSError as error:
            raise refusal(path, error) from None
        file, _ = open_file(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(file, 0)
            with open(file, "wb") as stream:
                stream.write(body[begin : begin + size])
        except OSError as error:
            raise refusal(path, error) from None
        begin += size
    return {}, b""


def make_directory(request: Request, _: bytes) -> Message:
    try:
        os.makedirs(request["path"], 0o755, exist_ok=True)
    except OSError as error:
        raise refusal(request["path"], error) from None
    return {}, b""


class Tree:
    """Collects the files of a directory up to the limits of a request."""

    def __init__(self, request: Request) -> None:
        self.request, self.known, self.skip = request, request["known"], set(request["skip"])
        self.entries: list[list[Any]] = []
        self.data: list[bytes] = []
        self.bytes = self.count = self.compared = 0

    def gather(self, directory: int, prefix: str, depth: int) -> None:
        if depth == 0:
            raise Refused(f"{prefix[:200]}: more than {MAX_DEPTH} directories deep")
        with os.scandir(directory) as listed:
            modes = {
                entry.name: entry.stat(follow_symlinks=False).st_mode for entry in listed if entry.name not in self.skip
            }
        for name, mode in sorted(modes.items()):
            self.count += 1
            if self.count > self.request["max_files"]:
                raise Refused(self.over(f"{self.request['max_files']} files and directories"))
            if stat.S_ISDIR(mode):
                child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                try:
                    self.gather(child, prefix + name + "/", depth - 1)
                finally:
                    os.close(child)
            elif stat.S_ISLNK(mode):
                self.add(prefix + name, mode, os.fsencode(os.readlink(name, dir_fd=directory)))
            elif stat.S_ISREG(mode):
                self.read(prefix + name, name, directory)

    def read(self, path: str, name: str, directory: int) -> None:
        file, found = open_file(name, os.O_RDONLY | os.O_NOFOLLOW, directory)
        known, size = self.known.get(path), found.st_size
        wanted = size <= self.request["file_bytes"]
        digest, chunks = hashlib.sha1(b"blob %d\0" % size), []
        with open(file, "rb", buffering=0) as stream:
            while size > 0 and (wanted or known):
                chunk = stream.read(min(CHUNK, size))
                if not chunk:
                    break
                size -= len(chunk)
                self.compared += len(chunk)
                if self.compared > self.request["compared_bytes"]:
                    raise Refused(self.over(f"{self.request['compared_bytes']} bytes"))
                if known:
                    digest.update(chunk)
                if wanted:
                    chunks.append(chunk)
        if known and digest.hexdigest() == known:
            self.add(path, found.st_mode, None, known)
        else:
            self.add(path, found.st_mode, b"".join(chunks) if wanted else None)

    def add(self, path: str, mode: int, data: bytes | None, blob: str = "") -> None:
        self.entries.append([path, mode, -1 if data is None else len(data), blob])
        self.data.append(data or b"")
        self.bytes += len(data or b"")
        if self.bytes > self.request["total_bytes"]:
            raise Refused(self.over(f"{self.request['total_bytes']} bytes"))

    def over(self, what: str) -> str:
        return f"{self.request['path']}: more than the {what} allowed"


def read_tree(request: Request, _: bytes) -> Message:
    tree, path = Tree(request), request["path"]
    try:
        if os.path.islink(path):
            raise Refused(f"{path}: a link, not a directory")
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            tree.gather(directory, "", MAX_DEPTH)
        finally:
            os.close(directory)
    except OSError as error:
        raise refusal(path, error) from None
    return {"entries": tree.entries}, b"".join(tree.data)


def disk_usage(request: Request, _: bytes) -> Message:
    """Return the allocated bytes and the number of files of the root file system and of the working directory's."""
    total = [0, 0]
    seen: set[tuple[int, int]] = set()
    for path in ("/", request["workdir"]):
        measure(path, os.stat(path).st_dev, seen, total)
    return {"bytes": total[0], "inodes": total[1]}, b""


def measure(path: str, device: int, seen: set[tuple[int, int]], total: list[int]) -> None:
    """Add the usage of the directory ``path`` to ``total``, without recursion: code in the sandbox chose its depth."""
    pending = [(path, 0)]
    while pending:
        directory, depth = pending.pop()
        try:
            entries = os.scandir(directory)
        except OSError as error:
            total[1] += TOO_DEEP * (error.errno == errno.ENAMETOOLONG)
            continue
        with entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                key = (found.st_dev, found.st_ino)
                if key in seen:
                    continue
                seen.add(key)
                total[0] += found.st_blocks * 512
                total[1] += 1
                if stat.S_ISDIR(found.st_mode) and found.st_dev == device:
                    if depth == MAX_DISK_DEPTH:
                        total[1] += TOO_DEEP
                    else:
                        pending.append((entry.path, depth + 1))


FILE_OPERATIONS = {
    "read_file": read_file,
    "write_files": write_files,
    "read_tree": read_tree,
    "mkdir": make_directory,
    "disk": disk_usage,
}


class Agent:
    """Serves one connection: ``read`` and ``write`` are binary streams."""

    def __init__(self, read: BinaryIO, write: BinaryIO) -> None:
        self.reader, self.writer, self.lock = read, write, threading.Lock()
        self.commands: queue.Queue[tuple[Request, bytes]] = queue.Queue()
        self.files: queue.Queue[tuple[Request, bytes]] = queue.Queue()
        self.cancelled: set[int] = set()

    def serve(self, heard: Callable[[], None]) -> None:
        """Answer requests until the connection ends; call ``heard`` for each."""
        ready = threading.Event()
        for work, arguments in ((self.run_commands, ()), (self.access_files, (ready,))):
            threading.Thread(target=work, args=arguments, daemon=True).start()
        ready.wait()
        self.send({"id": 0})
        while True:
            sizes = self.reader.read(SIZES.size)
            if len(sizes) < SIZES.size:
                return
            header_size, body_size = SIZES.unpack(sizes)
            if header_size + body_size > MAX_MESSAGE:
                return
            heard()
            header = json.loads(self.reader.read(header_size).decode())
            body = self.reader.read(body_size)
            operation = header["op"]
            if operation == "exec":
                self.commands.put((header, body))
            elif operation == "cancel":
                self.cancelled.add(header["command"])
            elif operation in FILE_OPERATIONS:
                self.files.put((header, body))
            else:
                self.send({"id": header["id"]})

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        data = json.dumps(header).encode()
        with self.lock:
            self.writer.write(SIZES.pack(len(data), len(body)) + data)
            self.writer.write(body)
            self.writer.flush()

    def run_commands(self) -> None:
        while True:
            request, stdin = self.commands.get()
            number = request["id"]
            self.answer(number, run_command, request, stdin, lambda number=number: number in self.cancelled)
            self.cancelled.discard(number)

    def access_files(self, ready: threading.Event) -> None:
        LIBC.setfsuid(0)  # of this thread: files belong to root
        LIBC.setfsgid(0)
        own_proc_files()
        ready.set()
        while True:
            request, body = self.files.get()
            self.answer(request["id"], FILE_OPERATIONS[request["op"]], request, body)

    def answer(self, number: int, work: Callable[..., Message], *arguments: Any) -> None:
        try:
            header, body = work(*arguments)
        except Refused as refused:
            header, body = {"error": str(refused), "full": refused.full}, b""
        except Exception as error:
            header, body = {"error": f"{type(error).__name__}: {error}", "failed": True}, b""
        self.send({"id": number, **header}, body)


def accept(address: str) -> tuple[BinaryIO, BinaryIO]:
    """Listen at ``address`` and return the streams of the first connection that begins with the token."""
    token = os.environ.pop("AGENT_RL_TOKEN").encode()
    if address.isdigit():
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("0.0.0.0", int(address)))
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address + ".starting")
    listening.listen(8)
    if not address.isdigit():
        os.rename(address + ".starting", address)  # a socket that exists accepts connections
    while True:
        connection, _ = listening.accept()
        connection.settimeout(10.0)
        try:
            given = connection.recv(len(token), socket.MSG_WAITALL)
        except OSError:
            given = b""
        if hmac.compare_digest(given, token):
            listening.close()
            connection.settimeout(None)
            return connection.makefile("rb"), connection.makefile("wb")
        connection.close()


def open_streams(address: str) -> tuple[BinaryIO, BinaryIO]:
    """Become nobody and return the binary streams of the connection."""
    if address != "-":
        become_nobody()
        return accept(address)
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    become_nobody()
    return streams


def main(address: str, silence: float) -> None:
    heard = [time.monotonic()]

    def end_after_silence() -> None:
        while time.monotonic() - heard[0] < silence:
            time.sleep(silence / 20)
        end()

    def end() -> None:
        kill_all({})
        os._exit(0)

    streams = open_streams(address)
    threading.Thread(target=end_after_silence, daemon=True).start()
    with contextlib.suppress(OSError):  # a broken connection
        Agent(*streams).serve(lambda: heard.__setitem__(0, time.monotonic()))
    end()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
