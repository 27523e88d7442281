"""Sandbox backends by name: built in, of an installed distribution, or by path."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_rl.config import SandboxConfig
from sandbox import BACKENDS, SandboxSpec, SandboxUnavailableError, open_backend

OWN_BACKEND = """
from sandbox.bubblewrap.backend import BubblewrapBackend

class QuietBackend(BubblewrapBackend):
    @property
    def name(self):
        return "quiet"
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution that adds the backend ``quiet``."""
    (tmp_path / "quiet_boxes.py").write_text(OWN_BACKEND)
    metadata = tmp_path / "quiet_boxes-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet-boxes\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[agent_rl.sandboxes]\nquiet = quiet_boxes:QuietBackend\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.bubblewrap
@pytest.mark.parametrize("name", ["quiet", "quiet_boxes:QuietBackend"])
async def test_a_backend_of_an_installed_distribution_starts_sandboxes(distribution: None, name: str) -> None:
    backend = open_backend(SandboxConfig(backend=name).backend, run_id="own-backend")
    try:
        sandbox = await backend.start(SandboxSpec())
        assert backend.name == "quiet"
        assert (await sandbox.exec("echo here", timeout=30)).stdout == b"here\n"
    finally:
        await backend.close()


def test_registered_names(distribution: None) -> None:
    assert list(BACKENDS.targets()) == ["auto", "bubblewrap", "docker", "modal", "podman", "quiet"]


@pytest.mark.parametrize(
    ("name", "runtime", "message"),
    [
        ("dokcer", None, r"'dokcer': did you mean 'docker'.*auto, bubblewrap, docker, modal, pod"),
        ("bubblewrap", "runsc", r"runtime=runsc.*set sandbox.backend=docker"),
    ],
)
def test_an_unknown_name_or_runtime_is_one_line(name: str, runtime: str | None, message: str) -> None:
    with pytest.raises(SandboxUnavailableError, match=message) as error:
        open_backend(name, run_id="x", runtime=runtime)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", [pytest.param("docker", marks=pytest.mark.docker), pytest.param("podman", marks=pytest.mark.podman), "auto"]
)
def test_an_unknown_runtime_is_refused(name: str) -> None:
    """Podman would start the sandbox all the same, with another one."""
    try:
        asyncio.run(open_backend(name.replace("auto", "docker"), run_id="runtime").close())
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    with pytest.raises(SandboxUnavailableError, match=r"runtime=kata: .* runc") as error:
        open_backend(name, run_id="runtime", runtime="kata")
    assert "\n" not in str(error.value)
