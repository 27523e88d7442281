"""Creates the virtual environments and installs a sandbox. Standard library only: it runs before any install.

``python3 -m agent_rl.bootstrap trainer engine sandbox`` prints each step and pip's progress. It skips a step whose
stamp file contains the hash of its requirements. ``AGENT_RL_TORCH`` chooses the torch of both environments; without it
they keep theirs.
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
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / ".venv"
DOCS = ROOT / ".venv-docs"
CUDA_RELEASE = ROOT / ".venv-engine-cuda-release"
"""The engine environment on a CPU, with the release of SGLang that engines on GPUs have: for tests."""
CUDA_RELEASE_PACKAGES = ("sglang", "transformers", "tokenizers", "openai")
ENGINE = ROOT / "agent_rl" / "engine"
NVIDIA = Path("/dev/nvidiactl")
TRAINER_CONSTRAINTS = ROOT / "constraints" / "trainer.txt"
DOCS_CONSTRAINTS = ROOT / "constraints" / "docs.txt"
MINI_SWE_AGENT = ROOT / ".cache" / "agents" / "mini-swe-agent"
MINI_SWE_AGENT_REQUIREMENTS = ROOT / "tests" / "endpoint" / "programs" / "mini-swe-agent.txt"
PYPROJECT = ROOT / "pyproject.toml"
TORCHES = {"2.13.0": "", "2.14.1": "-torch214"}
"""Releases of torch, the default first. The suffix belongs to the extra ``train`` and the engine's files for GPUs."""
DEFAULT_TORCH = next(iter(TORCHES))
_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


class BootstrapError(Exception):
    """A step failed; the message is one line for the user."""


def engine_venv() -> Path:
    """Directory of the engine environment.

    It is in the checkout; without a checkout next to agent-rl's virtual environment; without one in the working
    directory.
    """
    if (ROOT / "pyproject.toml").is_file():
        return ROOT / ".venv-engine"
    return (Path.cwd() if sys.prefix == sys.base_prefix else Path(sys.prefix).parent) / ".venv-engine"


def engine_python() -> Path:
    """Path of the engine environment's interpreter. The file may not exist."""
    return engine_venv() / "bin" / "python"


def chosen_torch() -> str:
    """The torch of both environments: AGENT_RL_TORCH, else the installed one, else the default. Raises BootstrapError
    for an unknown release."""
    torch = os.environ.get("AGENT_RL_TORCH") or installed_torch() or DEFAULT_TORCH
    if torch not in TORCHES:
        raise BootstrapError(f"AGENT_RL_TORCH={torch} is not one of {', '.join(TORCHES)}")
    return torch


def installed_torch() -> str | None:
    """The torch of the trainer's environment, else of the engine's, if it is one of :data:`TORCHES`."""
    trainer = TRAINER if PYPROJECT.is_file() else Path(sys.prefix)
    for venv in (trainer, engine_venv()):
        packages = [str(path) for path in venv.glob("lib/python*/site-packages")]
        for torch in importlib.metadata.distributions(name="torch", path=packages):
            if (release := torch.version.partition("+")[0]) in TORCHES:
                return release
    return None


def engine_files(*, cuda: bool, torch: str = DEFAULT_TORCH) -> tuple[Path, ...]:
    """The engine's requirements, those without dependencies, the constraints, and the files that the first includes.

    Raises BootstrapError without ``cuda`` for another torch than the default.
    """
    if not cuda and torch != DEFAULT_TORCH:
        raise BootstrapError(
            f"torch {torch} is for engines on GPUs: use the step engine-cuda, or AGENT_RL_TORCH={DEFAULT_TORCH}"
        )
    device = f"-cuda{TORCHES[torch]}" if cuda else ""
    names = [f"requirements{device}", f"requirements{device}-nodeps", f"constraints{device}"]
    names += ["requirements-cuda-common", "requirements-common"] if cuda else ["requirements-common"]
    return tuple(ENGINE / f"{name}.txt" for name in names)


def log_step(text: str) -> None:
    print(f"\033[1m==>\033[0m {text}" if sys.stdout.isatty() else f"==> {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command and show its output. Raises BootstrapError if it fails."""
    if subprocess.run([str(part) for part in command], cwd=ROOT).returncode != 0:
        raise BootstrapError(f"command failed, see its output above: {' '.join(map(str, command))}")


def build_once(
    venv: Path, requirements: Sequence[Path], build: Callable[[], None], label: str, variant: str = ""
) -> None:
    """Run ``build`` unless the stamp in ``venv`` matches these files, this Python version and the variant."""
    content = b"".join(path.read_bytes() for path in requirements) + (sys.version + variant).encode()
    digest = hashlib.sha256(content).hexdigest()
    stamp = venv / ".agent-rl-ready"
    if stamp.is_file() and stamp.read_text() == digest:
        log_step(f"{label}: up to date ({venv.name})")
        return
    log_step(f"{label}: installing into {venv.name} (a few minutes the first time)")
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    build()
    stamp.write_text(digest)
    log_step(f"{label}: ready after {time.monotonic() - started:.0f} s")


def make_venv(venv: Path) -> Path:
    """Create ``venv`` if it is missing and return the path of its pip."""
    if not (venv / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", venv)
    return venv / "bin" / "pip"


def train_extra(torch: str) -> str:
    """The extra with the trainer's packages for ``torch``."""
    return f"train{TORCHES[torch]}"


def build_trainer(torch: str) -> None:
    pip, extras = make_venv(TRAINER), f".[{train_extra(torch)},dev]"
    # torch first: another package's version range would otherwise select the newest CUDA build.
    run(pip, "install", "--quiet", "--progress-bar=on", f"torch=={torch}")
    run(pip, "install", "--quiet", "--progress-bar=on", "-c", TRAINER_CONSTRAINTS, "--editable", extras)


def build_trainer_once(torch: str) -> None:
    files, build = [PYPROJECT, TRAINER_CONSTRAINTS], partial(build_trainer, torch)
    build_once(TRAINER, files, build, "trainer environment", train_extra(torch))


def trainer_packages(torch: str) -> list[str]:
    """The requirements of the extra for ``torch`` of the installed agent-rl."""
    requirements = [text.partition(";") for text in importlib.metadata.requires("agent-rl") or ()]
    return [package.strip() for package, _, marker in requirements if f'extra == "{train_extra(torch)}"' in marker]


def add_trainer_packages(torch: str) -> None:
    """Install the trainer's packages into the current environment, torch first."""
    for packages in ([f"torch=={torch}"], trainer_packages(torch)):
        run(sys.executable, "-m", "pip", "install", "--quiet", "--progress-bar=on", *packages)
    log_step("trainer packages: ready")


def build_engine(torch: str, *, cuda: bool) -> None:
    """Install the files of a device; for ``cuda`` these include kernels."""
    pip, (requirements, nodeps, constraints, *_) = make_venv(engine_venv()), engine_files(cuda=cuda, torch=torch)
    run(pip, "install", "--quiet", "--progress-bar=on", f"torch=={torch}")
    run(pip, "install", "--quiet", "--no-deps", "--progress-bar=on", "--requirement", nodeps)
    run(pip, "install", "--quiet", "--progress-bar=on", "-c", constraints, "-r", requirements)


def build_engine_once(torch: str, *, cuda: bool) -> None:
    files, build = engine_files(cuda=cuda, torch=torch), partial(build_engine, torch, cuda=cuda)
    build_once(engine_venv(), files, build, "engine environment")


def build_cuda_release() -> None:
    """Install the packages of SGLang for GPUs above those of the engine environment on a CPU."""
    if not engine_python().exists():
        raise BootstrapError("the engine environment is missing: run the step engine first")
    python = make_venv(CUDA_RELEASE).with_name("python")
    below = subprocess.check_output([engine_python(), "-c", _SITE_PACKAGES], text=True).strip()
    above = subprocess.check_output([python, "-c", _SITE_PACKAGES], text=True).strip()
    (Path(above) / "engine.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    constraints = engine_files(cuda=True)[2]
    pinned = [line for line in constraints.read_text().split("\n") if line.partition("==")[0] in CUDA_RELEASE_PACKAGES]
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--progress-bar=on", *pinned)


def build_docs() -> None:
    """Install the site generator only. The documentation does not import the project."""
    import tomllib  # not at module level: Python before 3.11 lacks it, and main() reports the required version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = project["optional-dependencies"]["docs"]
    run(make_venv(DOCS), "install", "--quiet", "--progress-bar=on", "-c", DOCS_CONSTRAINTS, *packages)


def build_agents() -> None:
    """Install the agent program of the tests. It runs in sandboxes with the trainer environment's Python."""
    options = ("--no-deps", "--upgrade", "--target", MINI_SWE_AGENT)
    run(make_venv(TRAINER), "install", "--quiet", "--progress-bar=on", *options, "-r", MINI_SWE_AGENT_REQUIREMENTS)


def docker_answers() -> bool:
    """Whether a container engine responds within 5 seconds."""
    if not shutil.which("docker"):
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=5).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def ensure_sandbox() -> None:
    """Require bubblewrap or a container engine. Installs bubblewrap if run as root on Debian."""
    if shutil.which("bwrap"):
        log_step("sandbox: bubblewrap is installed")
    elif os.geteuid() == 0 and shutil.which("apt-get"):
        log_step("sandbox: installing bubblewrap")
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "bubblewrap", "git")
    elif docker_answers():
        log_step(
            "sandbox: a container engine responds; the quickstart is faster with bubblewrap (apt install bubblewrap)"
        )
    else:
        raise BootstrapError(
            "no container engine responds and bubblewrap is missing: install one (apt install bubblewrap)"
        )


def main(steps: Sequence[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file may run on an older interpreter
        print(f"Python 3.11 or newer is required, this is {sys.version.split()[0]}; try: make PYTHON=python3.11 setup")
        return 2
    actions = {
        "trainer": lambda: build_trainer_once(chosen_torch()),
        "engine": lambda: build_engine_once(chosen_torch(), cuda=NVIDIA.exists()),
        # for another machine, as in a container image
        "engine-cuda": lambda: build_engine_once(chosen_torch(), cuda=True),
        "engine-cuda-release": lambda: build_once(
            CUDA_RELEASE, [*engine_files(cuda=False), *engine_files(cuda=True)], build_cuda_release, "SGLang for GPUs"
        ),
        "trainer-packages": lambda: add_trainer_packages(chosen_torch()),
        "docs": lambda: build_once(DOCS, [PYPROJECT, DOCS_CONSTRAINTS], build_docs, "documentation environment"),
        "sandbox": ensure_sandbox,
        "agents": lambda: build_once(MINI_SWE_AGENT, [MINI_SWE_AGENT_REQUIREMENTS], build_agents, "agent program"),
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
