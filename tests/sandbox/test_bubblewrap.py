"""The bubblewrap backend: its system call filter, fallbacks and directories."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.small_disk import small_disk

from sandbox import (
    ImageMissingError,
    ImagePolicy,
    SandboxDiskFullError,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
)
from sandbox.bubblewrap.backend import BubblewrapBackend

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[BubblewrapBackend]:
    backend = BubblewrapBackend(run_id="only-bwrap", base=tmp_path / "base", images=ImagePolicy(root=tmp_path.parent))
    yield backend
    await backend.close()


async def test_system_call_filter_refuses_unisolated_interfaces(backend: BubblewrapBackend) -> None:
    code = """
import ctypes, errno, json, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments) == -1 and ctypes.get_errno() == errno.EPERM
def opens(family):
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True
x86 = platform.machine() == "x86_64"
print(json.dumps([opens(1), opens(2), opens(10), opens(40), opens(38),
    refused(250 if x86 else 219, 0, -3, 1), refused(321 if x86 else 280, 0, 0, 0), refused(425, 8, 0)]))
"""
    sandbox = await backend.start(SandboxSpec())
    result = await sandbox.exec(["python3", "-c", code], timeout=30)
    assert json.loads(result.stdout) == [True, True, True, False, False, True, True, True], result


@pytest.mark.slow
async def test_commands_leave_no_zombies(backend: BubblewrapBackend) -> None:
    """Zombies count against the process limit; the machine's init may reap slowly or never."""
    sandbox = await backend.start(SandboxSpec(pids=8))
    for _ in range(16):
        assert (await sandbox.exec("true & true", timeout=20)).ok
    if "pids" in sandbox.cgroup.directories:
        assert (sandbox.cgroup.directories["pids"] / "pids.current").read_text() == "0\n"


@pytest.mark.slow
async def test_a_command_cancelled_during_its_start_leaves_no_process(
    backend: BubblewrapBackend, marker: str, host: Any
) -> None:
    sandbox = await backend.start(SandboxSpec())
    moments = random.Random(7)
    for _ in range(60):
        running = asyncio.create_task(sandbox.exec(f"sleep {marker}", timeout=60))
        await asyncio.sleep(moments.uniform(0, 0.01))  # bwrap takes a few milliseconds; each moment of it is met
        running.cancel()
        await asyncio.wait({running}, timeout=20)
        assert running.cancelled(), "the cancelled start did not end"
    assert host.processes(marker) == 0


async def test_root_file_system_is_read_only(backend: BubblewrapBackend) -> None:
    sandbox = await backend.start(SandboxSpec())
    # /dev is made anew for each command, in memory that counts against the sandbox.
    find = "find / -xdev -path /dev -prune -o -writable -not -type l -print"
    assert set((await sandbox.exec(find, timeout=60)).stdout.split()) == {b"/home/agent", b"/testbed", b"/tmp"}


async def test_limits_without_control_groups(tmp_path: Path) -> None:
    backend = BubblewrapBackend(run_id="rlimits", base=tmp_path / "base", control_groups=False)
    try:
        assert "resource limits" in backend.limits
        sandbox = await backend.start(SandboxSpec(memory_mb=200, pids=20))
        assert (await sandbox.exec(["no-such-program"], timeout=20)).exit_code == 127
        hog = await sandbox.exec(["python3", "-c", "bytearray(1 << 30)"], timeout=30)
        assert b"MemoryError" in hog.stderr
        assert (await sandbox.exec("ulimit -u", timeout=20)).stdout == b"23\n"
    finally:
        await backend.close()


async def test_works_as_an_ordinary_user() -> None:
    """As nobody, with the system's own Python and a copy of the package that nobody can read."""
    if os.getuid() != 0 or shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("needs root, to become another user, and a system Python")
    directory = Path("/var/tmp") / f"agent-rl-test-{os.getpid()}"
    try:
        shutil.copytree(ROOT / "sandbox", directory / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        (directory / "tmp").mkdir()
        shutil.chown(directory / "tmp", 65534, 65534)
        code = """
import asyncio, os
from sandbox import SandboxSpec, open_backend
async def main():
    assert os.getuid() == 65534
    backend = open_backend("bubblewrap", run_id="nobody")
    sandbox = await backend.start(SandboxSpec(pids=20))
    await sandbox.write_files({"a": b"1"})
    result = await sandbox.exec("id -u; cat a; echo 2 > b; chmod 0 b; mkdir -p locked/in; chmod 0 locked", timeout=20)
    print(result, await sandbox.read_file("a"))
    bomb = '''import os, time
made = 0
try:
    while made < 500:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        made += 1
except OSError: pass
print("forks", made)'''
    print((await sandbox.exec(["python3", "-c", bomb], timeout=20)).text)
    await backend.close()
    print("left", [name for name in os.listdir(os.environ["TMPDIR"] + "/agent-rl-sandboxes-65534") if name[0] != "."])
asyncio.run(main())
"""
        run = await asyncio.create_subprocess_exec(
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", code),
            cwd=directory,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(directory / "tmp"), "PYTHONPATH": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        text = (await asyncio.wait_for(run.communicate(), 60))[0].decode()
        assert "stdout=b'0\\n1'" in text, text
        assert "forks 2" in text, text  # the limit of 20 and what a sandbox needs itself, less what runs then
        assert "left []" in text, text
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A root file system with a shell, the libraries that it needs, and something in its working directory."""
    root = tmp_path / "rootfs"
    listing = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
    for file in {"/bin/bash", "/bin/sh", *(part for part in listing.split() if part.startswith("/"))}:
        target = root / "usr" / file.removeprefix("/usr").lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for directory in (root / "usr").iterdir():
        (root / directory.name).symlink_to(f"usr/{directory.name}")
    for name in ("etc", "testbed"):
        (root / name).mkdir()
    (root / "etc/marker").write_text("image's own")
    (root / "testbed/README").write_text("from the image")
    (root / "testbed/link").symlink_to("/etc/marker")
    return root


async def test_a_directory_image(backend: BubblewrapBackend, rootfs: Path) -> None:
    sandbox = await backend.start(SandboxSpec(image=str(rootfs)))
    command = "read a < README; read b < link; echo $a, $b; echo new > README; echo $HOME; echo x > /etc/marker"
    result = await sandbox.exec(command, timeout=20)
    assert result.stdout == b"from the image, image's own\n/root\n"
    assert b"Read-only" in result.stderr
    assert (rootfs / "testbed/README").read_text() == "from the image"
    assert await sandbox.read_file("README") == b"new\n"


async def test_invalid_specs_are_refused(backend: BubblewrapBackend, tmp_path: Path) -> None:
    with pytest.raises(ImageMissingError, match="directory of a root file system"):
        await backend.start(SandboxSpec(image=str(tmp_path)))
    for workdir in ("relative", "/", "/home", "/a/../b"):
        with pytest.raises(SandboxStartError, match="workdir"):
            await backend.start(SandboxSpec(workdir=workdir))
    with pytest.raises(SandboxStartError, match="/testbed/lib: below a writable directory"):
        await backend.start(SandboxSpec(ro_binds={str(tmp_path): "/testbed/lib"}))


async def test_workdir_inside_the_home(backend: BubblewrapBackend) -> None:
    sandbox = await backend.start(SandboxSpec(workdir="/home/agent/repo"))
    await sandbox.write_files({"a": b"1", "/home/agent/b": b"2"})
    assert (await sandbox.exec("pwd; cat a ../b", timeout=20)).text == "/home/agent/repo\n12"


async def test_deep_and_locked_directories_are_removed(backend: BubblewrapBackend, tmp_path: Path) -> None:
    sandbox = await backend.start(SandboxSpec())
    code = "import os\nfor i in range(1500):\n os.mkdir('d'); os.chdir('d')"
    assert (await sandbox.exec(["python3", "-c", code], timeout=60)).ok
    await sandbox.close()
    assert not list((tmp_path / "base").glob("only*/sandboxes/*"))


async def test_a_sandbox_without_its_directory_is_lost(backend: BubblewrapBackend, tmp_path: Path) -> None:
    sandbox = await backend.start(SandboxSpec())
    (directory,) = (tmp_path / "base").glob("only*/sandboxes/*")
    shutil.rmtree(directory)
    with pytest.raises(SandboxLostError, match="gone"):
        await sandbox.exec("true", timeout=20)


async def test_full_disk_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        backend = BubblewrapBackend(run_id="full", base=disk)
        sandbox = await backend.start(SandboxSpec())
        assert (await sandbox.exec("head -c 10 /dev/zero > small", timeout=20)).ok
        (disk / "of-others").write_bytes(bytes(shutil.disk_usage(disk).free - (8 << 20)))
        with pytest.raises(SandboxDiskFullError, match=r"free on its disk") as error:
            await sandbox.exec("false", timeout=20)
        assert "\n" not in str(error.value)
        with pytest.raises(SandboxDiskFullError):
            await backend.start(SandboxSpec())
        await backend.close()


async def test_base_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    with pytest.raises(SandboxStartError, match="only this user may write"):
        BubblewrapBackend(run_id="other", base=base)
