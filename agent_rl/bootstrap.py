"""Makes the virtual environments and sees to a sandbox. Standard library only: it runs before any install.

``python3 -m agent_rl.bootstrap trainer engine sandbox`` announces each step, shows pip's progress, and skips with a
word what is already done. A step is done when its stamp holds the hash of what it would install.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / ".venv"
DOCS = ROOT / ".venv-docs"
ENGINE_REQUIREMENTS = ROOT / "agent_rl" / "engine" / "requirements.txt"
MINI_SWE_AGENT = ROOT / ".cache" / "agents" / "mini-swe-agent"
MINI_SWE_AGENT_REQUIREMENTS = ROOT / "tests" / "gateway" / "programs" / "mini-swe-agent.txt"
ENGINE_NODEPS = ROOT / "agent_rl" / "engine" / "requirements-nodeps.txt"
TORCH = "torch==2.13.0"


class BootstrapError(Exception):
    """A step failed; the message is one line for the user."""


def engine_venv() -> Path:
    """The engine environment's directory: the checkout's, else beside the environment that agent-rl is installed in,
    else (agent-rl in no virtual environment) in the working directory."""
    if (ROOT / "pyproject.toml").is_file():
        return ROOT / ".venv-engine"
    return (Path.cwd() if sys.prefix == sys.base_prefix else Path(sys.prefix).parent) / ".venv-engine"


def engine_python() -> Path:
    """The engine environment's interpreter, whether it is there or not."""
    return engine_venv() / "bin" / "python"


def say(text: str) -> None:
    print(f"\033[1m==>\033[0m {text}" if sys.stdout.isatty() else f"==> {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command with its output shown. Raises BootstrapError with the command when it fails."""
    if subprocess.run([str(part) for part in command], cwd=ROOT).returncode != 0:
        raise BootstrapError(f"this command failed, its reason stands above: {' '.join(map(str, command))}")


def once(venv: Path, wanted: Sequence[Path], build: Callable[[], None], what: str) -> None:
    """Run ``build`` unless ``venv`` carries the stamp of just these files and this Python."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in wanted) + sys.version.encode()).hexdigest()
    stamp = venv / ".agent-rl-ready"
    if stamp.is_file() and stamp.read_text() == digest:
        say(f"{what}: already there ({venv.name})")
        return
    say(f"{what}: installing into {venv.name} (a few minutes the first time)")
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    build()
    stamp.write_text(digest)
    say(f"{what}: ready after {time.monotonic() - started:.0f} s")


def make_venv(venv: Path) -> Path:
    """Create ``venv`` where it is missing and return its pip command."""
    if not (venv / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", venv)
    return venv / "bin" / "pip"


def build_trainer() -> None:
    pip = make_venv(TRAINER)
    # torch first, alone: a range in another package's metadata would otherwise choose the newest CUDA build.
    run(pip, "install", "--quiet", "--progress-bar=on", TORCH)
    run(pip, "install", "--quiet", "--progress-bar=on", "--editable", ".[train,dev]")


def trainer_packages() -> list[str]:
    """The requirements of the extra ``train``, as the installed agent-rl names them."""
    marked = [text.partition(";") for text in importlib.metadata.requires("agent-rl") or ()]
    return [package.strip() for package, _, marker in marked if 'extra == "train"' in marker]


def add_trainer_packages() -> None:
    """Install the trainer's packages into the environment that runs this, torch first."""
    for wanted in ([TORCH], trainer_packages()):
        run(sys.executable, "-m", "pip", "install", "--quiet", "--progress-bar=on", *wanted)
    say("trainer packages: ready")


def build_engine() -> None:
    pip = make_venv(engine_venv())
    run(pip, "install", "--quiet", "--progress-bar=on", TORCH)
    run(pip, "install", "--quiet", "--no-deps", "--progress-bar=on", "--requirement", ENGINE_NODEPS)
    run(pip, "install", "--quiet", "--progress-bar=on", "--requirement", ENGINE_REQUIREMENTS)


def build_docs() -> None:
    """The site generator alone: the documentation needs nothing of the project installed."""
    import tomllib  # not at the top: an interpreter older than 3.11 is to reach main(), which says what is needed

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run(make_venv(DOCS), "install", "--quiet", "--progress-bar=on", *project["optional-dependencies"]["docs"])


def build_agents() -> None:
    """The agent program that the tests drive, in sandboxes of the trainer environment's Python."""
    into = ("--no-deps", "--upgrade", "--target", MINI_SWE_AGENT)
    run(make_venv(TRAINER), "install", "--quiet", "--progress-bar=on", *into, "-r", MINI_SWE_AGENT_REQUIREMENTS)


def docker_answers() -> bool:
    """Whether a container engine answers within five seconds."""
    if not shutil.which("docker"):
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=5).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def ensure_sandbox() -> None:
    """bubblewrap must be there, which the quickstart uses, or at least a container engine; root on Debian gets it."""
    if shutil.which("bwrap"):
        say("sandbox: bubblewrap is there")
    elif os.geteuid() == 0 and shutil.which("apt-get"):
        say("sandbox: installing bubblewrap")
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "bubblewrap", "git")
    elif docker_answers():
        say("sandbox: a container engine answers; the quickstart is faster with bubblewrap (apt install bubblewrap)")
    else:
        raise BootstrapError(
            "no container engine answers and bubblewrap is missing: install one (apt install bubblewrap)"
        )


def main(steps: Sequence[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - an older interpreter may well be the one that runs this
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try: make PYTHON=python3.11 setup")
        return 2
    actions = {
        "trainer": lambda: once(TRAINER, [ROOT / "pyproject.toml"], build_trainer, "trainer environment"),
        "engine": lambda: once(engine_venv(), [ENGINE_REQUIREMENTS, ENGINE_NODEPS], build_engine, "engine environment"),
        "trainer-packages": add_trainer_packages,
        "docs": lambda: once(DOCS, [ROOT / "pyproject.toml"], build_docs, "documentation environment"),
        "sandbox": ensure_sandbox,
        "agents": lambda: once(MINI_SWE_AGENT, [MINI_SWE_AGENT_REQUIREMENTS], build_agents, "agent program"),
    }
    try:
        for step in steps:
            actions[step]()
    except BootstrapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["trainer", "engine", "sandbox"]))
