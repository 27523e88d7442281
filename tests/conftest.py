"""Skips a test whose real part this machine lacks, with the reason.

``AGENT_RL_NO_SKIPS=1`` fails the session where anything at all was skipped: CI, which installs every part, sets it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says more about what else the machine does than about us.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

ROOT = Path(__file__).resolve().parent.parent


def _docker() -> str | None:
    if not shutil.which("docker"):
        return "no docker command"
    try:
        answer = subprocess.run(["docker", "info"], capture_output=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "the container engine does not answer"
    return None if answer.returncode == 0 else "no container engine answers"


def _bubblewrap() -> str | None:
    return None if shutil.which("bwrap") else "bubblewrap is not installed"


def _sglang() -> str | None:
    return None if (ROOT / ".venv-engine/bin/python").exists() else "no engine environment (make setup)"


def _chromium() -> str | None:
    return None if shutil.which("chromium") else "chromium is not installed (Debian: apt-get install chromium)"


def _megatron() -> str | None:
    missing = [name for name in ("torch", "megatron", "ray") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@functools.cache
def missing_part(marker: str) -> str | None:
    """Why the part behind ``marker`` cannot be used here, or None where it can."""
    parts = {
        "docker": _docker,
        "bubblewrap": _bubblewrap,
        "sglang": _sglang,
        "megatron": _megatron,
        "browser": _chromium,
    }
    return parts[marker]()


WHOLE_DIRS = ("engine", "envs", "rollout", "sandbox")
"""Directories whose tests share a server or images, or look for what each other left: one process runs each of them."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the suite is spread over processes (pytest-xdist), what belongs together stays together, the longest first.

    So the processes end at about the same time.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    long = {_group(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: _group(item) not in long)


def _group(item: pytest.Item) -> str:
    directory, *rest = item.path.relative_to(ROOT / "tests").parts
    return directory if directory in WHOLE_DIRS else "/".join((directory, *rest))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("docker", "bubblewrap", "sglang", "megatron", "browser"):
        if item.get_closest_marker(marker) and (reason := missing_part(marker)):
            pytest.skip(reason)


@pytest.fixture(scope="session")
def megatron_shim() -> None:
    """What lets Megatron run without CUDA, for tests that import it themselves: it must come before that import."""
    if _megatron():
        return
    import torch

    from agent_rl.train.megatron.cpu import install_cpu_shim

    if not torch.cuda.is_available():
        install_cpu_shim()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = terminal.stats.get("skipped", []) if terminal else []
    if skipped and os.environ.get("AGENT_RL_NO_SKIPS"):
        terminal.write_line(f"\nAGENT_RL_NO_SKIPS: {len(skipped)} skipped, none may be", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
