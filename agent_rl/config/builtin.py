"""The configs and starting models that ship with the package."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from agent_rl.errors import UserError

_PACKAGE = Path(__file__).parent.parent
CONFIGS = _PACKAGE / "configs"
MODELS = {name: _PACKAGE / "demo_model" / "data" / name for name in ("tiny-moe", "paper-moe")}
"""Model names that a config may use instead of a path, with their directories."""
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def shipped_configs() -> dict[str, str]:
    """Each shipped config's name and the comment in its first line, sorted by name."""
    files = sorted(CONFIGS.glob("*.yaml"))
    return {file.stem: file.read_text().partition("\n")[0].removeprefix("# ") for file in files}


def find_config(name: Path, directory: Path = Path()) -> Path:
    """The file ``name`` in ``directory``, else the shipped config of that name. ``.yaml`` may be omitted."""
    shipped = CONFIGS / name.with_suffix(".yaml")
    if (directory / name).is_file() or name.parent != Path() or not shipped.is_file():
        return directory / name
    return shipped


def find_model(directory: Path) -> Path:
    """The shipped model named ``directory`` if no directory of that name exists, else ``directory``.

    A shipped model below the working directory is returned as a relative path, so that a run's record stays valid if
    both are moved.
    """
    shipped = MODELS.get(str(directory))
    if shipped is None or directory.exists():
        return directory
    return shipped.relative_to(Path.cwd()) if shipped.is_relative_to(Path.cwd()) else shipped


def install_model(out: Path, name: str = "tiny-moe") -> bool:
    """Copy the shipped model ``name`` to ``out`` atomically. Returns False if it exists already.

    Raises UserError if ``out`` contains other files, or if the package lacks the model's data.
    """
    if all((out / file).is_file() for file in MODEL_FILES):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists but contains no complete model; remove it or choose another directory")
    data = MODELS[name]
    missing = [file for file in MODEL_FILES if not (data / file).is_file()]
    if missing:
        raise UserError(f"{data}: the shipped model lacks {', '.join(missing)}; reinstall the package")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        copy = Path(scratch) / "model"
        shutil.copytree(data, copy, ignore=lambda _, names: set(names) - set(MODEL_FILES))
        os.replace(copy, out)
    return True
