"""agent-rl installed from its wheel, away from the checkout: what is in it, and the first commands of a new user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from agent_rl.bootstrap import TORCHES, train_extra
from agent_rl.config.loader import MODELS, shipped_configs

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agent_rl", "envs", "r3", "sandbox", "tools")
BUILT_FROM = "agent_rl/viewer/web/"
"""Sources of agent_rl/viewer/static, which only who changes them needs."""
Command = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=100
    )


def repository_files(*directories: str) -> list[str]:
    """The files of the checkout that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *directories]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [file for file in listed if os.path.lexists(ROOT / file)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the files that git does not ignore, so that nothing else gets into it."""
    directory = tmp_path_factory.mktemp("wheel")
    for file in repository_files(*PACKAGES, "configs", "pyproject.toml", "README.md", "LICENSE"):
        copy = directory / "source" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy, follow_symlinks=False)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", directory)
    made = run(sys.executable, "-m", "pip", "wheel", *options, directory / "source", cwd=directory)
    assert made.returncode == 0, made.stderr
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's directory whose .venv has the wheel; its dependencies are borrowed from this environment."""
    home = tmp_path_factory.mktemp("home")
    assert run(sys.executable, "-m", "venv", home / ".venv", cwd=home).returncode == 0
    site = next((home / ".venv/lib").glob("python*")) / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    made = run(home / ".venv/bin/python", "-m", "pip", "install", *options, wheel, cwd=home)
    assert made.returncode == 0, made.stderr
    return home


@pytest.fixture
def agent_rl(installed: Path, tmp_path: Path) -> Command:
    """The installed command, in an empty directory."""

    def call(*arguments: str, cwd: Path = tmp_path, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(installed / ".venv/bin/agent-rl", *arguments, cwd=cwd, COLUMNS="200", **variables)

    return call


def test_the_wheel_holds_what_the_commands_need(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"{package}/py.typed" for package in PACKAGES}
    wanted |= {f"agent_rl/configs/{name}.yaml" for name in shipped_configs()}
    wanted |= {f"agent_rl/demo_model/data/{name}/{path.name}" for name in MODELS for path in MODELS[name].iterdir()}
    wanted |= {"agent_rl/engine/requirements.txt", "agent_rl/engine/requirements-nodeps.txt"}
    wanted |= {file for file in repository_files(*PACKAGES) if not file.startswith(("agent_rl/configs", BUILT_FROM))}
    assert wanted <= names, sorted(wanted - names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)


@pytest.mark.long
@pytest.mark.bubblewrap
def test_a_project_is_begun_checked_and_evaluated(agent_rl: Command, tmp_path: Path) -> None:
    assert agent_rl("--version").stdout.startswith("agent-rl ")
    assert "quickstart" in agent_rl("config", "list").stdout
    begun = agent_rl("init", "project")
    assert begun.returncode == 0, begun.stderr
    commands = [line.split()[1:] for line in begun.stdout.splitlines() if line.startswith("  agent-rl")]
    assert [command[0] for command in commands] == ["envs", "eval", "train"]
    for command in commands[:2]:
        ran = agent_rl(*command, cwd=tmp_path / "project")
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "100.0%" in ran.stdout
    away = agent_rl("eval", "project/letters.yaml", "--policy", "gold", PYTHONPATH="project")
    assert away.returncode == 0, away.stderr


@pytest.mark.long
@pytest.mark.bubblewrap
def test_the_engine_environment_belongs_beside_the_one_of_the_command(agent_rl: Command, installed: Path) -> None:
    engine = installed / ".venv-engine"
    examined = agent_rl("doctor")
    assert examined.returncode == 1
    assert f"no interpreter {engine}/bin/python; run `agent-rl install engine`" in examined.stdout
    trained = agent_rl("train", "quickstart")
    assert (trained.returncode, trained.stderr.count("\n")) == (2, 1), trained.stderr
    assert "`agent-rl install engine`" in trained.stderr
    refused = agent_rl("install", "engine", PIP_NO_INDEX="1")  # as far as it gets without a package index
    assert refused.returncode == 2
    assert f"{engine}/bin/pip install" in refused.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("torch", TORCHES)
def test_the_trainer_s_packages_are_those_of_the_extra(torch: str, installed: Path) -> None:
    code = f"from agent_rl.bootstrap import trainer_packages as found; print(*found('{torch}'))"
    listed = run(installed / ".venv/bin/python", "-c", code, cwd=installed).stdout.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed == project["optional-dependencies"][train_extra(torch)]


@pytest.mark.long
def test_without_the_trainer_s_packages_the_command_that_installs_them_is_told(tmp_path: Path) -> None:
    lacking = "import sys; sys.modules.update(dict.fromkeys(('torch', 'megatron', 'ray')));"
    for command in (["train", "quickstart"], ["r3", "compare", "quickstart"]):
        code = f"{lacking} from agent_rl.cli import main; sys.argv[1:] = {command}; main()"
        told = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert told.returncode == 2
        missing = "torch, megatron-core, ray"
        assert told.stderr == f"error: not installed: {missing}; `agent-rl install trainer` installs them\n"


def test_the_installed_packages_accept_the_python_of_debian_12() -> None:
    """An environment of a later Python 3.11 may hold versions that 3.11.2 cannot install."""
    refused = {
        f"{package.name} {package.version}": requires
        for package in metadata.distributions()
        if (requires := package.metadata["Requires-Python"]) and not SpecifierSet(requires).contains("3.11.2")
    }
    assert not refused
