"""The engine environment for GPUs against the recorded metadata of its releases: no GPU and no network is needed.

``python -m scripts.record_cuda_metadata`` renews the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agent_rl import bootstrap
from scripts.record_cuda_metadata import METADATA, PYTHONS

RECORD = json.loads(METADATA.read_text())
KERNELS = ("sglang-kernel", "flashinfer-python", "nvidia-ml-py", "cuda-python", "torch-memory-saver", "ninja")
"""What SGLang's server imports or runs on a GPU only."""


def read_requirements(paths: Iterable[Path]) -> dict[str, Requirement]:
    """The requirements of ``paths`` by name, without comments and includes."""
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


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


TRAINER_TORCH = pinned(Requirement(bootstrap.TORCH)) or ""
CUDA, CPU = (
    read_requirements(path for path in bootstrap.engine_files(cuda=cuda) if not path.name.startswith("constraints"))
    for cuda in (True, False)
)


def test_the_environment_for_gpus_holds_together() -> None:
    assert problems(CUDA, TRAINER_TORCH) == []


def test_the_environment_for_cpus_is_refused_on_a_gpu() -> None:
    found = problems(CPU, TRAINER_TORCH)
    assert "sglang-kernel is missing" in found
    assert "sglang==0.5.23 needs torch==2.14.1, the pin is 2.13.0" in found


def test_kernels_of_another_torch_are_refused() -> None:
    mixed = CUDA | {"sglang-kernel": Requirement("sglang-kernel==0.4.10")}
    assert "sglang-kernel==0.4.10 needs torch==2.14.1, the pin is 2.13.0" in problems(mixed, TRAINER_TORCH)


def test_two_releases_of_nccl_are_refused() -> None:
    newer = {name: Requirement(f"{name}=={version}") for name, version in (("sglang", "0.5.23"), ("torch", "2.14.1"))}
    newer["sglang-kernel"] = Requirement("sglang-kernel==0.4.10")
    engine = CUDA | newer
    assert "NCCL is 2.30.7 in the engine and 2.29.7 in the trainer" in problems(engine, TRAINER_TORCH)
    assert not any("NCCL" in problem for problem in problems(engine, "2.14.1"))


@pytest.mark.parametrize("python", PYTHONS)
def test_the_environment_for_gpus_resolves_to_its_pins(python: str) -> None:
    resolved = RECORD["resolved"][python]
    assert [name for name, line in CUDA.items() if not line.specifier.contains(resolved[name])] == []
    constraints = read_requirements([bootstrap.engine_files(cuda=True)[2]])
    assert {name: pinned(line) for name, line in constraints.items()}.items() <= resolved.items()
    assert resolved["nvidia-nccl-cu13"] == nccl(TRAINER_TORCH)


@pytest.mark.parametrize(
    ("step", "device", "cuda"), [("engine", False, False), ("engine", True, True), ("engine-cuda", False, True)]
)
def test_an_nvidia_device_or_the_step_selects_the_cuda_requirements(
    step: str, device: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia, commands = tmp_path / "nvidiactl", list[str]()
    if device:
        nvidia.touch()
    monkeypatch.setattr(bootstrap, "NVIDIA", nvidia)
    monkeypatch.setattr(bootstrap, "engine_venv", lambda: tmp_path)
    monkeypatch.setattr(bootstrap, "run", lambda *command: commands.append(" ".join(map(str, command))))
    assert bootstrap.main([step]) == 0
    assert any("requirements-cuda.txt" in command for command in commands) is cuda
    assert any("constraints-cuda.txt" in command for command in commands) is cuda
