"""A fake interpreter of the engine environment, whose SGLang is :mod:`fake_server_process`.

It runs the real ``serve.py``, so tests of a server's start and end also hold for SGLang. The server appends its
arguments to ``DIR/starts``, one line for each start.
"""

from __future__ import annotations

import sys
from pathlib import Path

_LAUNCH = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from fake_server_process import main
DIR = Path({directory!r})

def load_plugins(): ...

def prepare_server_args(arguments):
    with (DIR / "starts").open("a") as file:
        file.write(" ".join(arguments) + "\\n")
    if "--die" in arguments:
        raise ValueError("no such thing as --die")
    options = dict(zip(arguments, arguments[1:]))
    return int(options["--port"]), DIR, options["--host"]

def run_server(arguments):
    asyncio.run(main(*arguments))
"""


_PATCHED = {
    "model_executor/model_runner_components/weight_updater": """class WeightUpdater:
    def load_weights_from_distributed(self, tensors): ...
""",
    "managers/scheduler_components/weight_updater": """class SchedulerWeightUpdaterManager:
    def update_weights_from_tensor(self, request): ...
class UpdateWeightsFromTensorReqOutput: ...
""",
    "managers/scheduler_components/batch_result_processor": """class SchedulerBatchResultProcessor:
    def _maybe_collect_routed_experts(self, req): ...
""",
    "model_loader/loader": "def _initialize_model(): ...",
    "entrypoints/http_server": """from types import SimpleNamespace
orjson_response = dumps_json = None
app = SimpleNamespace(routes=[SimpleNamespace(path="/generate", dependant=SimpleNamespace(call=None))])
""",
}
"""Modules of which serve.py replaces functions."""


def make_interpreter(directory: Path) -> Path:
    """Write the interpreter below ``directory``."""
    package = directory / "site" / "sglang"
    (package.parent / "sglang-0.9.dist-info").mkdir(parents=True)
    (package.parent / "sglang-0.9.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.9\n")
    package.mkdir()
    (package / "__init__.py").touch()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    (package / "launch_server.py").write_text(_LAUNCH.format(paths=paths, directory=str(directory)))
    for path, text in _PATCHED.items():
        module = package / "srt" / f"{path}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    interpreter = directory / "python"
    command = f'PYTHONPATH={package.parent} exec {sys.executable} "$@"'
    interpreter.write_text(f"#!/bin/sh\nunset SGLANG_USE_CPU_ENGINE\n{command}\n")
    interpreter.chmod(0o755)
    return interpreter
