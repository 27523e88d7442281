"""Arguments that many commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a name of `agent-rl config list`.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Overrides of the config.")
]
