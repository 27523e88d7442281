"""``agent-rl envs new NAME``: writes a working environment with a test and a config as a starting point."""

from __future__ import annotations

import keyword
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from envs.types import EnvsError

FIRST = "letters"
"""The name of the environment of a new project."""

RESERVED_NAMES = frozenset({"agent_rl", "envs", "r3", "sandbox", "tools"})


class TemplateError(EnvsError):
    """The files cannot be files: one line for the user."""


@dataclass(frozen=True, slots=True)
class ProjectFiles:
    """The files of a new environment and its dotted path."""

    environment: Path
    test: Path
    config: Path
    dotted_path: str

    def next_steps(self) -> str:
        """The files files and the next commands, one for each line."""
        enter = "" if self.config.parent == Path() else f"cd {shlex.quote(str(self.config.parent))}\n  "
        return (
            f"wrote {self.environment}, {self.test}, {self.config}\nnext:\n  {enter}"
            f"agent-rl envs check {self.dotted_path}\n  agent-rl eval {self.config.name} --policy gold\n"
            f"  agent-rl train {self.config.name}"
        )


def write_template(name: str, directory: Path) -> ProjectFiles:
    """Write ``<name>.py``, ``test_<name>.py`` and ``<name>.yaml`` into ``directory``.

    Raises TemplateError for a name that is not a free module name, or if a file exists.
    """
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        raise TemplateError(f"{name!r} is not a valid module name; use lower-case letters, digits and _")
    if name in RESERVED_NAMES or name in sys.stdlib_module_names:
        raise TemplateError(f"{name!r} is the name of another module; choose another name")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    files = ProjectFiles(
        directory / f"{name}.py", directory / f"test_{name}.py", directory / f"{name}.yaml", f"{name}:{class_name}"
    )
    templates = {files.environment: "environment.py.txt", files.test: "test.py.txt", files.config: "config.yaml.txt"}
    if existing := [path for path in templates if path.exists()]:
        raise TemplateError(f"{existing[0]}: exists already; choose another name or --directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, template in templates.items():
        text = (Path(__file__).parent / "project_template" / template).read_text(encoding="utf-8")
        path.write_text(text.format(name=name, class_name=class_name))
    return files
