"""SGLang's kernels against the pinned torch and SGLang, without a GPU: their symbols and their names.

``python -m scripts.record_kernel_symbols`` renews the record.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agent_rl import bootstrap
from agent_rl.bootstrap import TORCHES
from scripts.record_cuda_metadata import engine_requirements
from scripts.record_kernel_symbols import PACKAGES, exported_symbols, module_names
from scripts.record_kernel_symbols import RECORD as RECORD_FILE

RECORD = json.loads(RECORD_FILE.read_text())
SCRIPT = bootstrap.ROOT / "tests" / "tools" / "emulated_cuda.py"
A, B = TORCHES
PAIRS = {torch: {name: str(line) for name, line in engine_requirements(torch).items()} for torch in TORCHES}
"""The requirements of the engine for GPUs by torch and name, as NAME==VERSION where they are pinned."""
KERNELS = ("sglang-kernel", "torchvision")
"""What links against torch."""
MODULES = (
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.kernels.ops.activation.activation",  # the doctor compiles one of its kernels
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.entrypoints.http_server",
)
_NEWER_CHECK = "c10_cuda_check_implementation"


def missing(kernels: str, torch: str) -> list[str]:
    """The symbols that ``kernels``, a release, need and ``torch`` does not export."""
    return sorted(set(RECORD["needed"][kernels]) - set(RECORD["exported"][f"torch=={torch}"]))


@pytest.mark.parametrize("torch", TORCHES)
def test_the_pairs_torch_exports_what_its_kernels_need(torch: str) -> None:
    kernels = [PAIRS[torch][name] for name in KERNELS]
    assert {one: missing(one, torch) for one in kernels} == {one: [] for one in kernels}
    assert all(len(RECORD["needed"][one]) > 50 for one in kernels)


@pytest.mark.parametrize(("kernels", "torch"), [(A, B), (B, A)])
def test_kernels_of_the_other_pair_do_not_load(kernels: str, torch: str) -> None:
    found = missing(PAIRS[kernels]["sglang-kernel"], torch)
    assert any(_NEWER_CHECK in symbol for symbol in found)
    assert any("CUDAErrorLogCapture" in symbol for symbol in found) is (kernels == B)


@pytest.mark.megatron
def test_the_installed_torch_exports_what_is_recorded_of_its_release() -> None:
    """Except what only a build for CUDA has."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    exported = exported_symbols((Path(spec.submodule_search_locations[0]) / "lib").glob("*.so"))
    recorded = set(RECORD["exported"][f"torch=={version('torch').partition('+')[0]}"])
    other = {symbol for symbol in recorded - exported if "cuda" not in symbol.lower()}
    assert other == set()
    assert len(recorded & exported) > 100


def imported(python: Path, releases: Iterable[str], path: str = "") -> dict[str, Any]:
    """What ``emulated_cuda.py`` finds with ``releases`` installed; ``path``: packages before the environment's."""
    names = {module: names for release in releases for module, names in RECORD["names"][release].items()}
    job = json.dumps({"modules": MODULES, "names": names})
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), str(SCRIPT)], input=job, capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_the_server_of_torch_2_14_imports_on_a_gpu_with_its_packages_and_only_with_them() -> None:
    """The tests' environment has its release of SGLang."""
    found = imported(bootstrap.engine_python(), [PAIRS[B][name] for name in PACKAGES])
    assert found["faults"] == {}
    assert {"sgl_kernel.kvcacheio", "flashinfer.comm"} <= set(found["imported"])
    assert found["without"] == "ModuleNotFoundError: No module named 'sgl_kernel'"


@pytest.mark.exhaustive
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_the_server_of_torch_2_13_imports_on_a_gpu_with_its_packages_and_only_with_them(tmp_path: Path) -> None:
    """Downloads its packages that differ from the tests' environment."""
    different = [PAIRS[A][name] for name in ("sglang", "transformers", "tokenizers")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={tmp_path}", *different]
    subprocess.run(command, check=True)
    found = imported(bootstrap.engine_python(), [PAIRS[A][name] for name in PACKAGES], str(tmp_path))
    assert found["faults"] == {}
    assert "flashinfer.sampling" in found["imported"]
    assert found["without"] == "ModuleNotFoundError: No module named 'flashinfer'"


def test_names_are_read_through_star_imports_and_branches(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    lines = (
        "try:\n    from kernels.part import *\nexcept ImportError:\n    spare = 1\nif spare:\n    import os as system\n"
    )
    (package / "__init__.py").write_text(lines)
    (package / "part.py").write_text("def run():\n    hidden = 1\nclass Kernel: ...\nsize: int = 2\n")
    assert module_names(package) == {
        "kernels": ["Kernel", "run", "size", "spare", "system"],
        "kernels.part": ["Kernel", "run", "size"],
    }
