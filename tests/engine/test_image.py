"""The container image's Dockerfile, as far as it can be built without a network: the stage that both targets share."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from agent_rl import bootstrap

DOCKERFILE = bootstrap.ROOT / "Dockerfile"


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The stage ``source`` on the image of the sandboxes' tests."""
    tag = f"agent-rl-source:{uuid.uuid4().hex[:8]}"
    options = ["--target", "source", "--build-arg", "BASE=agent-rl-base", "--build-arg", "PACKAGES=", "--tag", tag]
    _docker("build", *options, str(bootstrap.ROOT))
    yield tag
    _docker("image", "rm", "--force", tag)


def _docker(*command: str) -> str:
    done = subprocess.run(["docker", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_image_has_what_the_installation_reads_and_nothing_else(image: str) -> None:
    code = """
import os
from agent_rl import bootstrap
files = [bootstrap.TRAINER_CONSTRAINTS, bootstrap.PYPROJECT]
files += [file for torch in bootstrap.TORCHES for file in bootstrap.engine_files(cuda=True, torch=torch)]
print(all(file.is_file() for file in files), *sorted(os.listdir()))
"""
    found, *names = _docker("run", "--rm", "--network", "none", image, "python3", "-c", code).split()
    assert found == "True"
    assert "agent_rl" in names
    assert not {"tests", ".venv", ".venv-engine", ".git", "runs"} & set(names)


def test_both_targets_run_steps_of_the_bootstrap() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    stages = dict(re.fullmatch(r"FROM (\S+) AS (\S+)", line).groups()[::-1] for line in lines if " AS " in line)  # type: ignore[union-attr]
    assert stages == {"source": "${BASE}", "trainer": "source", "engine": "trainer"}
    steps = [line.split()[-1] for line in lines if "agent_rl.bootstrap" in line]
    assert steps == ["trainer", "engine-cuda"]
    assert f"ARG TORCH={bootstrap.DEFAULT_TORCH}" in lines
