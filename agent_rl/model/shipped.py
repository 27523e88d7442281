"""The starting model that ships with the package: a warmed-up tiny Qwen3-MoE of a few megabytes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from agent_rl.errors import UserError
from agent_rl.packaged import MODELS

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_DATA = MODELS["tiny-moe"]


def install_model(out: Path) -> bool:
    """Copy the shipped model to ``out``, which appears whole or not at all; False where it is there already.

    Raises ``UserError`` where ``out`` holds something else, or the package came without its data.
    """
    if all((out / name).is_file() for name in FILES):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there, but holds no complete model; remove it or name another folder")
    missing = [name for name in FILES if not (_DATA / name).is_file()]
    if missing:
        raise UserError(f"{_DATA}: the shipped model lacks {', '.join(missing)}; make one with --from-scratch")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        copy = Path(scratch) / "model"
        shutil.copytree(_DATA, copy, ignore=lambda _, names: set(names) - set(FILES))
        os.replace(copy, out)
    return True
