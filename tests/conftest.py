"""Skips tests whose external part is missing on this machine, and reports in the last line what was skipped.

``AGENT_RL_NO_SKIPS=1`` fails the session if any test was skipped. ``AGENT_RL_SKIPPED_TO=FILE`` writes the ids of
skipped tests to FILE, which pytest reads again as ``@FILE``: CI runs them once every part is installed.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from support import slurm_cluster

# The imports of the collection create what lives as long as the process: quick_imports() has the reason.
gc.disable()

# The time of an example depends on the other load of the machine.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

ROOT = Path(__file__).resolve().parent.parent


def _engine_answers(command: str) -> bool:
    if not shutil.which(command):
        return False
    client = [command, "--remote", "info"] if command == "podman" else [command, "info"]
    try:
        return subprocess.run(client, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _has_modules(*names: str) -> bool:
    return None not in map(importlib.util.find_spec, names)


PARTS: dict[str, tuple[Callable[[], object], str]] = {
    "docker": (lambda: _engine_answers("docker"), "no docker engine answers (.ci/start-docker)"),
    "podman": (lambda: _engine_answers("podman"), "no podman service answers (.ci/start-podman)"),
    "bubblewrap": (lambda: shutil.which("bwrap"), "bubblewrap is not installed (apt-get install bubblewrap)"),
    "sglang": ((ROOT / ".venv-engine/bin/python").exists, "no engine environment (make setup)"),
    "cuda_release": (
        (ROOT / ".venv-engine-cuda-release/bin/python").exists,
        "SGLang's release for GPUs is not installed (python3 -m agent_rl.bootstrap engine-cuda-release)",
    ),
    "megatron": (
        lambda: _has_modules("torch", "megatron", "ray"),
        "torch, megatron or ray is not installed (make setup)",
    ),
    "slurm": (lambda: not slurm_cluster.MISSING, "no Slurm, or not root (apt-get install slurm-wlm munge)"),
    "browser": (lambda: shutil.which("chromium"), "chromium is not installed (apt-get install chromium)"),
}
"""Of each marker: whether its part is available, and else the reason with the command that provides it."""


@functools.cache
def missing_part(marker: str) -> str | None:
    """Why the part behind ``marker`` is unavailable here; None if available."""
    available, reason = PARTS[marker]
    return None if available() else reason


WHOLE_DIRS = ("engine", "envs", "rollout", "sandbox")
"""Each of these directories runs in one process: its tests share a server or images, or check for leftovers."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one group in one process of pytest-xdist, and start the slow groups first. Both container engines
    share one backend, so the ordinary suite has docker's tests alone."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        if item.get_closest_marker("podman"):
            item.add_marker(pytest.mark.long)
    slow = {_group(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: _group(item) not in slow)


def pytest_collection_finish() -> None:
    """Later collections of garbage skip the modules and the tests."""
    gc.freeze()
    gc.enable()


def _group(item: pytest.Item) -> str:
    directory, *rest = item.path.relative_to(ROOT / "tests").parts
    return directory if directory in WHOLE_DIRS else "/".join((directory, *rest))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in PARTS:
        if item.get_closest_marker(marker) and (reason := missing_part(marker)):
            pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def ray_connection_is_closed() -> Iterator[None]:
    """A module that leaves its connection to Ray open fails: later tests of the process would share its resources."""
    yield
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


@pytest.fixture(scope="module")
def one_ray(ray_connection_is_closed: None) -> Iterator[None]:
    """A local Ray of two CPUs, which all trainers of a module share."""
    from agent_rl.train.ray_session import ray_cluster

    with ray_cluster(None, cpus=2):
        yield


@pytest.fixture(scope="session")
def megatron_shim() -> None:
    """What lets Megatron run without CUDA, for tests that import it themselves: it must come before that import."""
    if missing_part("megatron"):
        return
    import torch

    from agent_rl.train.megatron.cpu import install_cpu_shim

    if not torch.cuda.is_available():
        install_cpu_shim()


def _skipped(config: pytest.Config) -> list[pytest.TestReport]:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    return terminal.stats.get("skipped", []) if terminal else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    skipped = _skipped(session.config)
    if skipped and os.environ.get("AGENT_RL_NO_SKIPS"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if file := os.environ.get("AGENT_RL_SKIPPED_TO"):
        # pytest-xdist appends "@GROUP" to the id of a test.
        Path(file).write_text("".join(f"{report.nodeid.rpartition('@')[0] or report.nodeid}\n" for report in skipped))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print as the last line what was skipped and the commands that provide the missing parts."""
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in _skipped(config))
    if reasons:
        rule = " (AGENT_RL_NO_SKIPS is set: none may be skipped)" if os.environ.get("AGENT_RL_NO_SKIPS") else ""
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        print(f"skipped {reasons.total()} tests{rule}: {listed}")
