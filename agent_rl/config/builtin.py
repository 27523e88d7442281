"""What comes with the package: configs and starting models that go by their names."""

from __future__ import annotations

from pathlib import Path

_HOME = Path(__file__).parent.parent
CONFIGS = _HOME / "configs"
MODELS = {name: _HOME / "demo_model" / "data" / name for name in ("tiny-moe", "paper-moe")}
"""Folders of the models that a config may name instead of a path."""


def shipped_configs() -> dict[str, str]:
    """Name -> what its file's first line says of it, sorted by name."""
    files = sorted(CONFIGS.glob("*.yaml"))
    return {file.stem: file.read_text().partition("\n")[0].removeprefix("# ") for file in files}


def find_config(name: Path, folder: Path = Path()) -> Path:
    """The file ``name`` in ``folder``, else the shipped config of that name, with or without ``.yaml``."""
    shipped = CONFIGS / name.with_suffix(".yaml")
    if (folder / name).is_file() or name.parent != Path() or not shipped.is_file():
        return folder / name
    return shipped


def find_model(folder: Path) -> Path:
    """``folder``, or the shipped model where that is a shipped model's name and no folder's.

    The latter from the working folder where it is below it, so that a run's record holds when both are moved.
    """
    shipped = MODELS.get(str(folder))
    if shipped is None or folder.exists():
        return folder
    return shipped.relative_to(Path.cwd()) if shipped.is_relative_to(Path.cwd()) else shipped
