"""Parts that need no sandbox: owners, frames, paths, the system call filter, the choice of a backend."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import (
    ImageBuildError,
    SandboxFileError,
    SandboxLostError,
    SandboxSpec,
    SandboxUnavailableError,
    open_backend,
)
from sandbox.bubblewrap.seccomp import sandbox_filter
from sandbox.cgroup import ran_out_of_memory
from sandbox.docker.backend import check_limits
from sandbox.docker.client import is_quota_refusal, supports_quota
from sandbox.docker.exec import END, Demux, MarkedStream
from sandbox.docker.images import base_images, image_name
from sandbox.lease import EXPIRY_SECONDS, Heartbeat, Lease, Owner
from sandbox.nofollow_io import SandboxRequired, read_file_nofollow, write_file_nofollow
from sandbox.process import Capture
from sandbox.temp_dir import TempDirectory

# Control groups


@pytest.mark.parametrize("group", ["/docker/{}", "/libpod_parent/libpod-{}", "/system.slice/docker-{}.scope"])
def test_kernel_log_names_the_group_that_ran_out_of_memory(group: str, tmp_path: Path) -> None:
    full, beside = "9a6c954be4e4", "9a6c954be4e5"
    killed = f"oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg={group.format(full)},task_memcg=/{beside},task=exe,pid=7"
    log = tmp_path / "kmsg"
    log.write_text(f"6,1,1,-;exe invoked oom-killer\n6,2,1,-;{killed}\n")
    assert [ran_out_of_memory(name, log) for name in (full, beside, full[:8])] == [True, False, False]
    assert not ran_out_of_memory(full, tmp_path / "missing")


# Owners and their directories


@pytest.mark.timeout(10)
def test_temp_directory_ignores_pipes_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe of another user would wait for its writer."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.mkfifo(tmp_path / "own-pipe")
    directory = TempDirectory("own-")
    directory.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["own-pipe"]


def test_owner_runs_until_its_process_ends() -> None:
    me = Owner.current("run")
    assert (me.visible, me.running, Owner.from_json(me.to_json())) == (True, True, me)
    with subprocess.Popen(["true"]) as other:
        # A zombie until it is waited for, which counts as ended.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not replace(me, pid=other.pid).running
    assert not replace(me, started=me.started + 1).running, "its id was given to another process"
    assert not replace(me, boot_id="another").visible
    assert not replace(me, pid_namespace="pid:[1]").visible


ME = Owner.current("run")
UNSEEN = replace(ME, pid=1 << 30, pid_namespace="pid:[1]")
OTHER_HOST = replace(ME, pid=1 << 30, boot_id="another")


@pytest.mark.parametrize(
    ("owner", "silence_seconds", "dead"),
    [
        (ME, 10 * EXPIRY_SECONDS, False),  # a visible owner is judged by its process
        (replace(ME, started=ME.started + 1), 0.0, True),
        *((owner, EXPIRY_SECONDS - 1, False) for owner in (UNSEEN, OTHER_HOST)),
        *((owner, EXPIRY_SECONDS + 1, True) for owner in (UNSEEN, OTHER_HOST)),
        (UNSEEN, float("inf"), True),
        (UNSEEN, None, False),  # an owner without any sign is kept
    ],
)
def test_an_invisible_owner_is_judged_by_its_heartbeat(owner: Owner, silence_seconds: float | None, dead: bool) -> None:
    assert Lease("docker", owner, ("sandbox",), silence_seconds, "engine").dead is dead


def test_heartbeat_survives_a_failed_beat_and_stops(caplog: pytest.LogCaptureFixture) -> None:
    beats, third = [], threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 2:
            raise SandboxLostError("the engine is away")
        if len(beats) == 3:
            third.set()

    heartbeat = Heartbeat(beat, seconds=0.001)
    assert third.wait(20)
    heartbeat.stop()
    after = len(beats)
    assert "the engine is away" in caplog.text
    heartbeat.stop()
    assert len(beats) == after


@pytest.mark.parametrize("text", ["", "{}", '{"pid": 1}', "[]", "null"])
def test_invalid_owner_records_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (JSONDecodeError is one)
        Owner.from_json(text)


# Frames


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut at the places of ``cuts``, each modulo its length."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


@given(
    frames=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=20),
    limit=st.integers(0, 120),
)
def test_demux_splits_frames_at_any_chunk_boundary(
    frames: list[tuple[int, bytes]], cuts: list[int], limit: int
) -> None:
    wire = b"".join(struct.pack(">BxxxL", kind, len(data)) + data for kind, data in frames)
    demux = Demux(Capture(limit), Capture(limit))
    for chunk in chunks(wire, cuts):
        demux.feed(chunk)
    for kind, capture in ((1, demux.out), (2, demux.err)):
        whole = b"".join(data for k, data in frames if k == kind)
        assert bytes(capture.data) == whole[:limit]
        assert capture.dropped == len(whole[limit:])


@given(text=st.binary(max_size=60), marked=st.booleans(), cuts=st.lists(st.integers(0, 80), max_size=8))
def test_only_the_end_mark_is_removed(text: bytes, marked: bool, cuts: list[int]) -> None:
    for body in (text, END + text, text + END[:-1], text + END):
        wire = body + END if marked else body + b"."
        stream = MarkedStream(Capture(1000))
        for chunk in chunks(wire, cuts):
            stream.feed(chunk)
        assert stream.finish() is marked
        assert bytes(stream.capture.data) == (body if marked else wire)


@pytest.mark.docker
async def test_lost_output_of_the_engine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend("docker", run_id="lost")
    try:
        sandbox = await backend.start(SandboxSpec())
        monkeypatch.setattr("sandbox.docker.sandbox.WRAPPER", "echo half of it")  # and no mark
        with pytest.raises(SandboxLostError, match=r"lost a command's output.*half of it"):
            await sandbox.exec("true", timeout=20)
        monkeypatch.undo()
        assert (await sandbox.exec("printf '\\000agent-rl end\\000'", timeout=20)).stdout == END
    finally:
        await backend.close()


# Paths


def test_nofollow_io_refuses_links(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    (outside / "x").write_text("secret")
    (root / "l").symlink_to(outside)
    (root / "d" / "f").symlink_to(outside / "x")
    for parts in (["l", "x"], ["d", "f"], ["l", "new", "y"]):
        with pytest.raises(SandboxRequired):
            read_file_nofollow(root, parts, max_bytes=10, path="p")
        with pytest.raises(SandboxRequired):
            write_file_nofollow(root, parts, b"over", path="p")
    assert (outside / "x").read_text() == "secret"
    assert os.listdir(outside) == ["x"]


def test_nofollow_io_reads_and_writes(tmp_path: Path) -> None:
    write_file_nofollow(tmp_path, ["a", "b", "c"], b"12345", path="a/b/c")
    assert read_file_nofollow(tmp_path, ["a", "b", "c"], max_bytes=5, path="a/b/c") == b"12345"
    with pytest.raises(SandboxFileError, match="a/b/c: 5 bytes, more than the 4"):
        read_file_nofollow(tmp_path, ["a", "b", "c"], max_bytes=4, path="a/b/c")
    with pytest.raises(SandboxFileError, match="directory"):
        write_file_nofollow(tmp_path, ["a", "b"], b"", path="a/b")
    with pytest.raises(SandboxFileError, match="not a directory"):
        write_file_nofollow(tmp_path, ["a", "b", "c", "d"], b"", path="a/b/c/d")


# The system call filter, run by a small interpreter


def run_filter(program: bytes, arch: int, number: int, argument: int = 0) -> int:
    data = struct.pack("=IIQQ", number, arch, 0, argument).ljust(64, b"\0")
    lines = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    here, register = 0, 0
    while True:
        code, true, false, operand = lines[here]
        here += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, operand)
        elif code in (0x15, 0x35):
            here += true if (register == operand if code == 0x15 else register >= operand) else false
        else:
            assert code == 0x06
            return operand


@pytest.mark.parametrize(
    ("machine", "arch", "socket", "keyctl"), [("x86_64", 0xC000003E, 41, 250), ("aarch64", 0xC00000B7, 198, 219)]
)
def test_filter(machine: str, arch: int, socket: int, keyctl: int) -> None:
    program = sandbox_filter(machine)
    allow, refuse = 0x7FFF0000, 0x50000
    assert run_filter(program, arch, 0) == allow
    assert run_filter(program, arch, keyctl) == refuse | errno.EPERM
    assert [run_filter(program, arch, socket, family) for family in (1, 2, 10, 16)] == [allow] * 4
    assert run_filter(program, arch, socket, 40) == refuse | errno.EAFNOSUPPORT
    assert run_filter(program, arch, 0x40000000 | socket, 1) == refuse | errno.EPERM
    assert run_filter(program, arch ^ 1, 0) == refuse | errno.EPERM


def test_unknown_architecture_has_no_filter() -> None:
    assert sandbox_filter("riscv64") is None


# Opening a backend


def test_without_a_backend_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailableError) as error:
        open_backend("auto", run_id="none")
    assert "\n" not in str(error.value)
    assert all(f"apt-get install {name}" in str(error.value) for name in ("docker.io", "bubblewrap"))
    with pytest.raises(SandboxUnavailableError, match=r"none\.sock \(no such file or directory\)"):
        open_backend("docker", run_id="none")
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailableError, match=r"none\.sock.*apt-get install podman"):
        open_backend("podman", run_id="none")


def test_a_hanging_engine_is_reported_within_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sandbox.docker.client._PROBE_SECONDS", 0.2)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/hangs.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/hangs.sock")
        silent.listen()
        with pytest.raises(SandboxUnavailableError, match=r"hangs\.sock \(timed out\): it hangs; restart it"):
            open_backend("docker", run_id="hangs")


def test_an_engine_without_limits_is_refused() -> None:
    info = {"MemoryLimit": True, "PidsLimit": True, "CgroupVersion": "1", "SecurityOptions": None}
    check_limits(info)
    check_limits({**info, "Rootless": True, "CgroupVersion": "2"})
    rootless_docker = {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}
    unlimited = [{limit: False, "CgroupVersion": "2"} for limit in ("MemoryLimit", "PidsLimit")]
    for change in ({"Rootless": True}, rootless_docker, *unlimited):
        with pytest.raises(SandboxUnavailableError, match="does not enforce memory and process limits"):
            check_limits({**info, **change})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("bubblewrap", "docker")]
)
async def test_auto_opens_an_engine_or_else_bubblewrap(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "bubblewrap":
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    backend = open_backend("auto", run_id="auto")
    assert backend.name == name
    await backend.close()


def test_import_loads_no_heavy_module() -> None:
    heavy = ("docker", "requests", "torch", "sandbox.docker.backend")
    code = f"import sys, sandbox; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_file_systems_with_quotas_and_quota_refusals_are_recognized() -> None:
    drivers = {("overlay2", "extfs"): False, ("overlay2", "xfs"): True, ("btrfs", ""): True, ("zfs", ""): True}
    for (driver, backing), quotas in drivers.items():
        status = [["Backing Filesystem", backing]] if backing else None
        assert supports_quota({"Driver": driver, "DriverStatus": status}) is quotas, driver
    assert is_quota_refusal("--storage-opt is supported only for overlay over xfs with 'pquota' mount option")
    assert is_quota_refusal("Storage option overlay.size not supported. Filesystem does not support Project Quota")
    assert not is_quota_refusal("no space left on device")


def test_base_images_are_those_that_no_stage_makes() -> None:
    dockerfile = """# FROM comment
ARG VERSION=1
FROM --platform=linux/amd64 python:3.12 AS build
from scratch
FROM Build AS second
FROM base:$VERSION
  FROM debian
COPY --from=build /a /b
"""
    assert base_images(dockerfile) == ["python:3.12", "debian"]


def test_image_name_changes_with_contents_modes_and_links(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match="no Dockerfile"):
        image_name(tmp_path)
    names = set()
    for change in (
        lambda: (tmp_path / "Dockerfile").write_text("FROM a"),
        lambda: (tmp_path / "run.sh").write_text("true"),
        lambda: (tmp_path / "run.sh").chmod(0o755),
        lambda: (tmp_path / "link").symlink_to("/etc/shadow"),
    ):
        change()
        names.add(image_name(tmp_path))
        assert image_name(tmp_path) in names
    assert len(names) == 4
