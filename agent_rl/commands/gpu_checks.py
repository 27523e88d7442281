"""What a run on this machine's GPUs needs, for ``agent-rl doctor``: driver, tool chain, kernels, links, limits."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_rl.config import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.utils.concurrency import MAX_OPEN_FILES

MIN_DRIVER, MIN_NVCC, MIN_COMPILER = 580, 13, 11
MIN_SHARED_BYTES = 64 << 30
_SHARED = Path("/dev/shm")
_SECONDS = 120.0
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
_PROBE = """
import json, pynvml, sgl_kernel, torch
print(json.dumps({"torch": torch.__version__, "nccl": torch.cuda.nccl.version(), "cuda": torch.cuda.is_available()}))
"""
_TRAINER_PROBE = _PROBE.replace("pynvml, sgl_kernel, ", "")
_COMPILED_PROBE = """
import json, time, torch
from sglang.kernels.ops.activation.activation import silu_and_mul
begun, rows = time.perf_counter(), torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
found, (gate, up) = silu_and_mul(rows).float(), rows.float().chunk(2, dim=-1)
error = (found - torch.nn.functional.silu(gate) * up).abs().max().item()
print(json.dumps({"error": error, "seconds": time.perf_counter() - begun}))
"""
_COMPILE_SECONDS, _COMPILED_ERROR = 600.0, 0.1

GpuCheck = Callable[[RunConfig], str]


def needs_gpus(config: RunConfig) -> bool:
    """Whether ``config`` puts its trainer or its launched engines on GPUs of this machine."""
    engine, train = config.engine, config.train
    local_engine = engine.launched and engine.placement == "local"
    trainer = train.device == "cuda" and train.ray_address is None
    return trainer or (local_engine and (engine.device == "cuda" or engine.colocate))


def check_driver(config: RunConfig) -> str:
    """The GPUs and their driver. Raises ConfigError without a GPU or with an older driver."""
    if shutil.which(_QUERY[0]) is None:
        raise ConfigError("the config asks for GPUs and this machine has no nvidia-smi: install an NVIDIA driver")
    rows = [line.partition(",") for line in _output(*_QUERY).splitlines()]
    if not rows:
        raise ConfigError("the config asks for GPUs and nvidia-smi lists none")
    driver = rows[0][0]
    if _major(driver) < MIN_DRIVER:
        raise ConfigError(f"driver {driver}: CUDA 13 needs driver {MIN_DRIVER} or newer")
    return f"{len(rows)} x {rows[0][2].strip()}, driver {driver}"


def check_tool_chain(config: RunConfig) -> str:
    """The programs with which SGLang compiles kernels at their first use. Raises ConfigError where one is missing."""
    python = Path(config.engine.python)
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    programs = {name: shutil.which(name, path=path) for name in ("nvcc", "g++", "ninja")}
    if missing := [name for name, program in programs.items() if program is None]:
        raise ConfigError(f"not installed: {', '.join(missing)}; SGLang compiles kernels at their first use")
    found = {name: _output(str(program), "--version") for name, program in programs.items()}
    release = re.search(r"release (\d+)", found["nvcc"])
    compiler = re.search(r"\) (\d+)\.", found["g++"])
    for name, match, least in (("nvcc", release, MIN_NVCC), ("g++", compiler, MIN_COMPILER)):
        if match is None or int(match.group(1)) < least:
            raise ConfigError(f"{name} {match.group(1) if match else 'of unknown release'}: {least} or newer is needed")
    return f"nvcc {release and release.group(1)}, g++ {compiler and compiler.group(1)}, ninja {found['ninja'].strip()}"


def check_kernels(config: RunConfig) -> str:
    """SGLang's kernels, imported in the engine's interpreter, and torch and NCCL, which must be those of the trainer.
    Raises ConfigError."""
    engine, trainer = _probe(config.engine.python, _PROBE), _probe(sys.executable, _TRAINER_PROBE)
    for name in ("torch", "nccl"):
        if engine[name] != trainer[name]:
            found = f"{name} is {engine[name]} in the engine and {trainer[name]} in the trainer"
            raise ConfigError(f"{found}: install both with the same AGENT_RL_TORCH")
    if not engine["cuda"]:
        raise ConfigError(f"torch {engine['torch']} in {config.engine.python} finds no GPU")
    return f"sgl_kernel imported, torch {engine['torch']}, NCCL {engine['nccl']} in both environments"


def check_compiled_kernel(config: RunConfig) -> str:
    """One kernel that SGLang compiles at its first use, compared with torch. Raises ConfigError."""
    found = _probe(config.engine.python, _COMPILED_PROBE, _COMPILE_SECONDS)
    if not found["error"] <= _COMPILED_ERROR:  # NaN is wrong as well
        raise ConfigError(f"SGLang's compiled silu_and_mul differs from torch's by {found['error']:.3g}")
    return f"silu_and_mul compiled and correct, {found['seconds']:.0f} s"


def check_links(config: RunConfig) -> str:
    """How the GPUs reach each other. Raises ConfigError where NVLink connects only some of them."""
    rows = [line.split() for line in _output("nvidia-smi", "topo", "-m").splitlines()]
    rows = [row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0] if row else "") and "X" in row]
    links = {f"GPU{one}-GPU{two}": rows[one][two] for one in range(len(rows)) for two in range(one)}
    without = [pair for pair, kind in links.items() if not kind.startswith("NV")]
    if without and len(without) < len(links):
        raise ConfigError(f"NVLink connects some GPUs only; without it: {', '.join(without[:4])}")
    if without:
        return f"{len(rows)} GPUs without NVLink ({', '.join(sorted(set(links.values())))}): all exchanges use PCIe"
    return f"{len(rows)} GPUs, {', '.join(sorted(set(links.values()))) or 'no link needed'}"


def check_limits(config: RunConfig) -> str:
    """The limits of pinned memory, shared memory and open files. Raises ConfigError where one is too low."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        raise ConfigError(f"ulimit -l is {soft >> 10} KiB: NCCL and offloading pin memory, set it to unlimited")
    size = shutil.disk_usage(_SHARED).total
    if size < MIN_SHARED_BYTES:
        raise ConfigError(f"{_SHARED} has {size >> 30} GiB: {MIN_SHARED_BYTES >> 30} GiB or more are needed")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MAX_OPEN_FILES:
        raise ConfigError(f"ulimit -Hn is {files}: set the hard limit of open files to {MAX_OPEN_FILES} or more")
    return f"pinned memory unlimited, {_SHARED} {size >> 30} GiB, open files {files if files >= 0 else 'unlimited'}"


GPU_CHECKS: dict[str, GpuCheck] = {
    "gpu": check_driver,
    "gpu tool chain": check_tool_chain,
    "gpu kernels": check_kernels,
    "gpu compiled kernel": check_compiled_kernel,
    "gpu links": check_links,
    "gpu limits": check_limits,
}


def _probe(python: str, code: str, seconds: float = _SECONDS) -> dict[str, Any]:
    return dict(json.loads(_output(python, "-c", code, seconds=seconds).splitlines()[-1]))


def _output(*command: str, seconds: float = _SECONDS) -> str:
    """What ``command`` prints. Raises ConfigError where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]}: {error}") from None
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"{command[0]}: {reason[0]}")
    return done.stdout


def _major(text: str) -> int:
    return int(text.partition(".")[0]) if text.partition(".")[0].isdigit() else 0
