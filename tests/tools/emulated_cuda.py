"""Imports modules of SGLang's server as on a machine with one H100, in SGLang's environment, without a GPU.

A JSON object on stdin: ``modules`` to import, and ``names``, what each module of the packages for GPUs has. A JSON
object on stdout: ``without``, the error of the first module without these packages; ``faults``, errors by module with
them; ``imported``, the modules of these packages that were imported.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

if torch.version.cuda is None:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
}


class Kernels(MetaPathFinder, Loader):
    """Stands in for packages with their modules and names, none of which works."""

    def __init__(self, names: dict[str, list[str]]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._names else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update({name: MagicMock(name=name) for name in self._names[module.__name__]})


def fault_of(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    job, answers = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the modules print is no answer
    torch.version.cuda = "13.0"
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    without = fault_of(job["modules"][0])
    sys.meta_path.insert(0, Kernels(job["names"]))
    faults = {module: fault for module in job["modules"] if (fault := fault_of(module)) is not None}
    imported = sorted(job["names"].keys() & sys.modules.keys())
    json.dump({"without": without, "faults": faults, "imported": imported}, answers)
    answers.flush()
    os._exit(0)  # threads of the imported packages may delay an ordinary exit


if __name__ == "__main__":
    main()
