"""The starting models that ship with the package: warmed-up Qwen3-MoEs of a few megabytes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from agent_rl.config.builtin import MODELS
from agent_rl.errors import UserError

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def install_model(out: Path, name: str = "tiny-moe") -> bool:
    """Copy the shipped model ``name`` to ``out``, which appears whole or not at all; False where it is there already.

    Raises ``UserError`` where ``out`` holds something else, or the package came without its data.
    """
    if all((out / name).is_file() for name in FILES):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there, but holds no complete model; remove it or name another directory")
    data = MODELS[name]
    missing = [name for name in FILES if not (data / name).is_file()]
    if missing:
        raise UserError(f"{data}: the shipped model lacks {', '.join(missing)}; make one with --from-scratch")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        copy = Path(scratch) / "model"
        shutil.copytree(data, copy, ignore=lambda _, names: set(names) - set(FILES))
        os.replace(copy, out)
    return True
