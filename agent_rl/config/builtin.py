"""What comes with the package: configs and starting models that go by their names."""

from __future__ import annotations

from pathlib import Path

_HOME = Path(__file__).parent.parent
CONFIGS = _HOME / "configs"
MODELS = {name: _HOME / "demo_model" / "data" / name for name in ("tiny-moe", "paper-moe")}
"""Directories of the models that a config may name instead of a path."""


def shipped_configs() -> dict[str, str]:
    """Name -> what its file's first line says of it, sorted by name."""
    files = sorted(CONFIGS.glob("*.yaml"))
    return {file.stem: file.read_text().partition("\n")[0].removeprefix("# ") for file in files}


def find_config(name: Path, directory: Path = Path()) -> Path:
    """The file ``name`` in ``directory``, else the shipped config of that name, with or without ``.yaml``."""
    shipped = CONFIGS / name.with_suffix(".yaml")
    if (directory / name).is_file() or name.parent != Path() or not shipped.is_file():
        return directory / name
    return shipped


def find_model(directory: Path) -> Path:
    """``directory``, or the shipped model where that is a shipped model's name and no directory's.

    The latter from the working directory where it is below it, so that a run's record holds when both are moved.
    """
    shipped = MODELS.get(str(directory))
    if shipped is None or directory.exists():
        return directory
    return shipped.relative_to(Path.cwd()) if shipped.is_relative_to(Path.cwd()) else shipped
