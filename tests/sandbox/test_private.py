"""What bubblewrap shows of the host: programs, and no checkout, cache, run directory or secret wherever it lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox import ImagePolicy, SandboxSpec, SandboxStartError
from sandbox.bubblewrap.backend import BubblewrapBackend
from sandbox.bubblewrap.private import private_paths
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.bubblewrap, pytest.mark.redteam, pytest.mark.timeout(180)]
ANSWER = "the hidden answer"
FILES = (".cache/tasks/train.jsonl", "runs/first/state.json", ".env", "src/code.py")
LEAKS = f"grep -rlsF --exclude-dir=proc '{ANSWER}' "


def fill(directory: Path) -> Path:
    for name in FILES:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(ANSWER)
    return directory


@pytest.fixture
def system_directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new directory below a system directory of this machine."""
    if os.getuid() != 0:
        pytest.skip("needs root, to write below /usr")
    directory = Path(request.param, f"agent-rl-test-{uuid.uuid4().hex[:8]}")
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-q", *map(str, directory.glob("mounted*"))], capture_output=True)
        shutil.rmtree(directory)


@pytest.fixture
async def open_backends() -> AsyncIterator[list[BubblewrapBackend]]:
    backends: list[BubblewrapBackend] = []
    yield backends
    for backend in backends:
        await backend.close()


def mount(source: Path, target: Path) -> None:
    target.mkdir()
    if subprocess.run(["mount", "--bind", source, target]).returncode != 0:
        pytest.skip("directories can't be mounted here")


async def leaks(backend: BubblewrapBackend, place: Path, spec: SandboxSpec | None = None) -> str:
    sandbox = await backend.start(spec or SandboxSpec())
    return (await sandbox.exec(f"{LEAKS} {place}; ls -A {place}", timeout=60)).stdout.decode()


@pytest.mark.parametrize(
    "system_directory", ["/usr/src", "/usr/lib", "/usr/local/lib", "/opt", "/usr/games"], indirect=True
)
async def test_a_checkout_is_hidden_wherever_it_lies(
    system_directory: Path, open_backends: list[BubblewrapBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fill(system_directory))
    open_backends.append(BubblewrapBackend(run_id="private", base=tmp_path / "base"))
    assert not await leaks(open_backends[0], system_directory)
    report_stopped(f"reading the tasks of a checkout in {system_directory.parent}", "it is not in the sandbox")


@pytest.mark.parametrize("system_directory", ["/usr/lib"], indirect=True)
async def test_an_env_file_above_a_checkout_and_links_out_of_it_are_hidden(
    system_directory: Path, open_backends: list[BubblewrapBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, elsewhere = tmp_path / "checkout", fill(system_directory)
    checkout.mkdir()
    (elsewhere / "src/code.py").unlink()
    (checkout / ".cache").symlink_to(elsewhere / ".cache")
    (checkout / "runs").symlink_to(elsewhere / "runs")
    monkeypatch.chdir(checkout)
    open_backends.append(BubblewrapBackend(run_id="links", base=tmp_path / "base"))
    assert await leaks(open_backends[0], elsewhere) == f"{elsewhere}/.env\n.cache\n.env\nruns\nsrc\n"
    (elsewhere / "app").mkdir()
    monkeypatch.chdir(elsewhere / "app")
    open_backends.append(BubblewrapBackend(run_id="above", base=tmp_path / "base"))
    sandbox = await open_backends[1].start(SandboxSpec())
    read = await sandbox.exec(f"cat {elsewhere}/.env", timeout=20)
    assert not read.ok
    assert not read.stdout


@pytest.mark.parametrize("system_directory", ["/usr/lib"], indirect=True)
async def test_a_checkout_that_is_mounted_below_a_system_directory_is_hidden(
    system_directory: Path, open_backends: list[BubblewrapBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = fill(tmp_path / "checkout")
    mount(checkout, system_directory / "mounted")
    mount(checkout / ".cache/tasks", system_directory / "mounted-tasks")
    mount(tmp_path, system_directory / "mounted-up")
    monkeypatch.chdir(checkout)
    open_backends.append(BubblewrapBackend(run_id="mounted", base=tmp_path / "base"))
    shown = await leaks(open_backends[0], system_directory)
    assert "checkout" not in shown
    assert ANSWER not in shown
    assert not [line for line in shown.splitlines() if line.startswith("/")], shown


@pytest.mark.parametrize("system_directory", ["/usr/lib"], indirect=True)
async def test_directories_of_the_config_are_hidden(
    system_directory: Path, open_backends: list[BubblewrapBackend], tmp_path: Path
) -> None:
    fill(system_directory)
    private = (system_directory / "runs", system_directory / ".cache/tasks/train.jsonl")
    open_backends.append(BubblewrapBackend(run_id="named", base=tmp_path / "base", images=ImagePolicy(private=private)))
    shown = await leaks(open_backends[0], system_directory)
    assert set(shown.split()[:2]) == {f"{system_directory}/.env", f"{system_directory}/src/code.py"}


@pytest.mark.parametrize("system_directory", ["/usr/lib"], indirect=True)
async def test_sandboxes_go_on_after_a_private_directory_is_removed(
    system_directory: Path, open_backends: list[BubblewrapBackend], tmp_path: Path
) -> None:
    private = fill(system_directory / "tasks")
    policy = ImagePolicy(private=(private,))
    open_backends.append(BubblewrapBackend(run_id="removed", base=tmp_path / "base", images=policy))
    sandbox = await open_backends[0].start(SandboxSpec())
    shutil.rmtree(private)
    assert (await sandbox.exec("true", timeout=20)).ok
    assert await leaks(open_backends[0], system_directory) == ""
    fill(private)
    read = await sandbox.exec(f"{LEAKS} {private}; ls -A {private}", timeout=20)
    assert not read.stdout


@pytest.mark.parametrize("system_directory", ["/usr/lib"], indirect=True)
async def test_a_private_directory_below_a_read_only_bind_is_hidden(
    system_directory: Path, open_backends: list[BubblewrapBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = fill(tmp_path / "checkout")
    monkeypatch.chdir(checkout)
    open_backends.append(BubblewrapBackend(run_id="below", base=tmp_path / "base"))
    shown = await leaks(open_backends[0], Path("/opt/x"), SandboxSpec(ro_binds={str(tmp_path): "/opt/x"}))
    assert ANSWER not in shown
    assert not [line for line in shown.splitlines() if line.startswith("/")], shown
    for private in (checkout, checkout / ".cache", checkout / ".cache/tasks", checkout / "runs"):
        with pytest.raises(SandboxStartError, match="holds private files") as error:
            await open_backends[0].start(SandboxSpec(ro_binds={str(private): "/opt/x"}))
        assert "\n" not in str(error.value)
    report_stopped("binding the directory of tasks", error.value)


async def test_start_is_refused_where_a_bound_directory_is_private(
    open_backends: list[BubblewrapBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/usr/lib")
    open_backends.append(BubblewrapBackend(run_id="refused", base=tmp_path / "base"))
    with pytest.raises(SandboxStartError, match="/usr/lib: sandboxes would see it") as error:
        await open_backends[0].start(SandboxSpec())
    assert "\n" not in str(error.value)


async def test_a_sandbox_sees_only_the_parts_of_usr_that_programs_need(
    open_backends: list[BubblewrapBackend], tmp_path: Path
) -> None:
    open_backends.append(BubblewrapBackend(run_id="usr", base=tmp_path / "base"))
    sandbox = await open_backends[0].start(SandboxSpec())
    listed = (await sandbox.exec("ls /usr /usr/local", timeout=20)).stdout.decode().split()
    assert not {"src", "games", "etc"} & set(listed)
    assert {"bin", "lib", "share"} <= set(listed)
    programs = (
        "git init -q . && python3 -c 'import ssl, sqlite3, json, pytest' && perl -e 'use strict; print 1' && date"
    )
    assert (await sandbox.exec(programs, timeout=60)).ok
    compiled = await sandbox.exec("echo 'int main(){return 0;}' > a.c && cc a.c && ./a.out", timeout=60)
    assert compiled.ok or shutil.which("cc") is None, compiled.text


def test_private_paths_exist_and_hold_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(fill(tmp_path / "real"))
    monkeypatch.chdir(tmp_path / "link")
    private = private_paths()
    assert {tmp_path / "real" / name for name in ("", ".cache", ".cache/tasks", "runs", ".env")} <= private
    assert all(path.resolve() == path and path.exists() for path in private)
