"""The environments for GPUs against the recorded metadata of their releases: no GPU and no network is needed.

``python -m scripts.record_cuda_metadata`` renews the record.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agent_rl import bootstrap
from agent_rl.bootstrap import DEFAULT_TORCH, TORCHES
from scripts.record_cuda_metadata import KERNELS as TRAINER_KERNELS
from scripts.record_cuda_metadata import METADATA, PYTHONS, engine_requirements, read_requirements

RECORD = json.loads(METADATA.read_text())
KERNELS = ("sglang-kernel", "flashinfer-python", "nvidia-ml-py", "cuda-python", "torch-memory-saver", "ninja")
"""What SGLang's server imports or runs on a GPU only."""
A, B = TORCHES
CUDA = {torch: engine_requirements(torch) for torch in TORCHES}
CPU = read_requirements(path for path in bootstrap.engine_files(cuda=False) if not path.name.startswith("constraints"))
EXTRAS = tomllib.loads(bootstrap.PYPROJECT.read_text())["project"]["optional-dependencies"]


def pinned(requirement: Requirement) -> str | None:
    exact = [item.version for item in requirement.specifier if item.operator == "=="]
    return exact[0] if exact else None


def needs(release: str) -> dict[str, Requirement]:
    """The recorded requirements of ``release`` on Linux x86_64, by name."""
    environment = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    lines = [Requirement(line) for line in RECORD["requires"][release]]
    found = [line for line in lines if line.marker is None or line.marker.evaluate(environment)]
    return {canonicalize_name(line.name): line for line in found}


def nccl(torch: str) -> str | None:
    return pinned(needs(f"torch=={torch}")["nvidia-nccl-cu13"])


def problems(engine: Mapping[str, Requirement], trainer_torch: str) -> list[str]:
    """Why an engine environment with these requirements does not work on a GPU beside this trainer."""
    found = [f"{name} is missing" for name in KERNELS if name not in engine]
    for name in ("sglang", "sglang-kernel"):
        if name not in engine:
            continue
        for needed, line in needs(str(engine[name])).items():
            version = pinned(engine[needed]) if needed in engine else None
            if version is not None and not line.specifier.contains(version):
                found.append(f"{engine[name]} needs {line.name}{line.specifier}, the pin is {version}")
    torch = pinned(engine["torch"])
    assert torch is not None
    if nccl(torch) != nccl(trainer_torch):
        found.append(f"NCCL is {nccl(torch)} in the engine and {nccl(trainer_torch)} in the trainer")
    return found


@pytest.mark.parametrize("torch", TORCHES)
def test_the_environments_for_gpus_hold_together(torch: str) -> None:
    assert pinned(CUDA[torch]["torch"]) == torch
    assert problems(CUDA[torch], torch) == []


@pytest.mark.parametrize("torch", TORCHES)
def test_the_trainers_extras_differ_by_torch_only(torch: str) -> None:
    first, *others = EXTRAS[bootstrap.train_extra(torch)]
    assert first == f"torch=={torch}"
    assert others == EXTRAS["train"][1:]


def test_the_environment_for_cpus_is_refused_on_a_gpu() -> None:
    found = problems(CPU, A)
    assert "sglang-kernel is missing" in found
    assert "sglang==0.5.23 needs torch==2.14.1, the pin is 2.13.0" in found


def test_kernels_of_another_torch_are_refused() -> None:
    mixed = CUDA[A] | {"sglang-kernel": CUDA[B]["sglang-kernel"]}
    assert "sglang-kernel==0.4.10 needs torch==2.14.1, the pin is 2.13.0" in problems(mixed, A)


def test_two_releases_of_nccl_are_refused() -> None:
    assert problems(CUDA[B], A) == ["NCCL is 2.30.7 in the engine and 2.29.7 in the trainer"]
    assert problems(CUDA[A], B) == ["NCCL is 2.29.7 in the engine and 2.30.7 in the trainer"]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("torch", TORCHES)
def test_the_environments_for_gpus_resolve_to_their_pins(torch: str, python: str) -> None:
    engine, trainer = RECORD["engine"][torch][python], RECORD["trainer"][torch][python]
    assert [name for name, line in CUDA[torch].items() if not line.specifier.contains(engine[name])] == []
    constraints = read_requirements([bootstrap.engine_files(cuda=True, torch=torch)[2]])
    assert {name: pinned(line) for name, line in constraints.items()}.items() <= engine.items()
    for line in map(Requirement, EXTRAS[bootstrap.train_extra(torch)]):
        assert trainer[line.name] == pinned(line)
    assert engine["torch"] == trainer["torch"] == torch
    assert engine["nvidia-nccl-cu13"] == trainer["nvidia-nccl-cu13"] == nccl(torch)


@pytest.mark.parametrize("torch", TORCHES)
@pytest.mark.parametrize("python", PYTHONS)
def test_optional_kernels_leave_the_trainer_as_it_is(torch: str, python: str) -> None:
    added = RECORD["trainer with kernels"][torch][python]
    assert RECORD["trainer"][torch][python].items() <= added.items()
    assert {(canonicalize_name(line.name), pinned(line)) for line in map(Requirement, TRAINER_KERNELS)} <= added.items()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The commands of the bootstrap, recorded in place of being run, on a machine without an NVIDIA device."""
    found = list[str]()
    for name in ("trainer", "engine"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("AGENT_RL_TORCH", raising=False)
    monkeypatch.setattr(bootstrap, "NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.setattr(bootstrap, "TRAINER", tmp_path / "trainer")
    monkeypatch.setattr(bootstrap, "engine_venv", lambda: tmp_path / "engine")
    monkeypatch.setattr(bootstrap, "run", lambda *command: found.append(" ".join(map(str, command))))
    return found


@pytest.mark.parametrize(
    ("step", "device", "cuda"), [("engine", False, False), ("engine", True, True), ("engine-cuda", False, True)]
)
def test_an_nvidia_device_or_the_step_selects_the_cuda_requirements(
    step: str, device: bool, cuda: bool, commands: list[str]
) -> None:
    if device:
        bootstrap.NVIDIA.touch()
    assert bootstrap.main([step]) == 0
    assert any("requirements-cuda.txt" in command for command in commands) is cuda
    assert any("constraints-cuda.txt" in command for command in commands) is cuda


def test_the_chosen_torch_selects_both_environments(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ["trainer", "engine-cuda"]
    assert bootstrap.main(steps) == 0
    assert "train,dev" in "".join(commands)
    commands.clear()
    monkeypatch.setenv("AGENT_RL_TORCH", B)
    assert bootstrap.main(steps) == 0
    installed = [command.partition(" install ")[2] for command in commands if " install " in command]
    assert [command.split()[-1] for command in installed if "torch==" in command] == [f"torch=={B}"] * 2
    assert any(command.endswith("--editable .[train-torch214,dev]") for command in installed)
    for name in ("requirements-cuda-torch214.txt", "requirements-cuda-torch214-nodeps.txt"):
        assert any(command.endswith(name) for command in installed)
    assert any("constraints-cuda-torch214.txt" in command for command in installed)
    commands.clear()
    assert bootstrap.main(steps) == 0
    assert commands == []


@pytest.mark.parametrize("environment", ["trainer", "engine"])
@pytest.mark.parametrize(("found", "kept"), [(B, B), (f"{B}+cu130", B), ("2.12.0", DEFAULT_TORCH)])
def test_without_a_choice_both_environments_keep_their_torch(
    environment: str, found: str, kept: str, commands: list[str], tmp_path: Path
) -> None:
    metadata = tmp_path / environment / "lib" / "python3.12" / "site-packages" / f"torch-{found}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {found}\n")
    assert bootstrap.main(["trainer", "engine-cuda"]) == 0
    installed = [command.split()[-1] for command in commands if "torch==" in command]
    assert installed == [f"torch=={kept}"] * 2


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("2.12.0", "AGENT_RL_TORCH=2.12.0 is not one of 2.13.0, 2.14.1"),
        (B, f"torch {B} is for engines on GPUs: use the step engine-cuda, or AGENT_RL_TORCH={DEFAULT_TORCH}"),
    ],
)
def test_a_torch_that_does_not_fit_is_refused(
    torch: str,
    reason: str,
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AGENT_RL_TORCH", torch)
    assert bootstrap.main(["engine"]) == 2
    assert capsys.readouterr().err == f"error: {reason}\n"
    assert commands == []


def test_the_default_is_the_torch_of_the_cpu_environment() -> None:
    assert pinned(CPU["torch"]) == DEFAULT_TORCH
    shared = {"sglang", "transformers", "tokenizers", "openai"}  # the suite runs with the SGLang of the other pair
    assert {name: str(CPU[name]) for name in shared} == {name: str(CUDA[B][name]) for name in shared}
