"""``agent-rl setup``: the base image is built where the backend is a container engine, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_rl.commands import setup
from agent_rl.config.loader import load_config
from agent_rl.monitoring.console import Display

CONFIG = Path(__file__).parents[2] / "configs/quickstart.yaml"


class Backend:
    def __init__(self, *, run_id: str, images: Any) -> None:
        self.name = type(self).__name__

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Images that were built, by engine; a container engine need not run here."""
    backends = {name: type(name, (Backend,), {}) for name in ("docker", "podman", "remote")}
    monkeypatch.setitem(sys.modules, "named_backends", SimpleNamespace(**backends))
    images: list[tuple[str, str]] = []

    def build(name: str, *, engine: str) -> None:
        images.append((engine, name))

    monkeypatch.setattr(setup, "build_image", build)
    return images


@pytest.mark.parametrize(
    ("backend", "image", "expected"),
    [
        ("docker", None, [("docker", "agent-rl-base")]),
        ("podman", None, [("podman", "agent-rl-base")]),
        ("podman", "my-image", []),
        ("remote", None, []),
    ],
)
async def test_the_base_image_is_built_where_needed(built: Any, backend: str, image: str | None, expected: Any) -> None:
    overrides = [f"sandbox.backend=named_backends:{backend}"] + ([f"sandbox.image={image}"] if image else [])
    config = load_config(CONFIG, overrides)
    await setup.ensure_image(config, Display("setup"))
    assert built == expected
