"""User directories with the names of agent-rl's packages: imports still work, or fail with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.new_project import write_template

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with an environment of its own, and directories of all our packages' names beside it."""
    write_template("letters", tmp_path)
    for name in ("tools", "envs", "sandbox", "r3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "helpers.py").write_text("WORD = 'mine'\n")
    return tmp_path


def python(project: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Python in ``project``, which comes first on its import path unless ``path`` replaces that."""
    environment = {**os.environ, "PYTHONPATH": path or f"{project}{os.pathsep}{ROOT}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    "command",
    [
        "test_letters.py",
        "-m pytest -q test_letters.py",
        "-m agent_rl.cli envs check letters:Letters count=5",
        "-m agent_rl.cli eval letters.yaml --policy gold --tasks 2",
    ],
)
def test_own_packages_are_imported_despite_user_directories(project: Path, command: str) -> None:
    ran = python(project, *command.split())
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_user_package_imported_first_is_an_import_error(project: Path) -> None:
    ran = python(project, "-c", "import tools, agent_rl.api")
    assert ran.stderr.splitlines()[-1] == (
        f"ImportError: {project}/tools shadows agent-rl's package tools (at {ROOT}/tools): "
        "rename it or run from another directory"
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", ["from tools.helpers import WORD", "from tools import helpers"])
def test_module_of_the_user_package_is_a_one_line_error(project: Path, line: str) -> None:
    source = project / "letters.py"
    source.write_text(source.read_text().replace("WORDS =", f"{line}\nWORDS ="))
    message = f"{project}/tools has the same name as agent-rl's package tools (at {ROOT}/tools), which has no module"
    ran = python(project, "-m", "agent_rl.cli", "eval", "letters.yaml", "--policy", "gold")
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith("error: environment 'letters:Letters': letters does not import: ")
    assert message in ran.stderr
    assert f"ImportError: {message}" in python(project, "-c", f"import agent_rl.api\n{line}").stderr


@pytest.mark.slow
def test_commands_resolve_dotted_paths_alike_and_the_directory_comes_last(tmp_path: Path) -> None:
    write_template("letters", tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit('the working directory hides an installed package')\n")
    for command in (["envs", "check", "letters:Letters"], ["eval", "letters.yaml", "--policy", "noop"]):
        code = f"import sys; sys.path.remove(''); from agent_rl.cli import main; sys.argv[1:] = {command}; main()"
        ran = python(tmp_path, "-c", code, path=str(ROOT))
        assert ran.returncode == 0, ran.stdout + ran.stderr
