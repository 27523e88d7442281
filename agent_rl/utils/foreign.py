"""Files of a run's directory as data. The directory may come from someone else: nothing is read through a link, from a
pipe or device, or beyond a size, and YAML has no aliases, which expand to any size."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent_rl.errors import AgentRlError
from sandbox import SandboxError
from sandbox.nofollow_io import SandboxRequired, read_file_nofollow

MAX_BYTES = 512 << 20
"""Limit of a file that is read whole."""
MAX_FILE_BYTES = 64 << 30
"""Limit of a file of which parts are read."""
CONFIG_BYTES = 128 << 10
"""Limit of ``config.yaml``: YAML is parsed at 60 kB/s."""


def read(root: Path, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of the file ``name`` below ``root``. Raises FileNotFoundError, and AgentRlError for anything but a
    regular file of at most ``max_bytes`` without a link on its way."""
    if ".." in name.split("/"):
        raise AgentRlError(f"{name}: leads out of its directory")
    if not os.path.lexists(root / name):
        raise FileNotFoundError(2, "no such file", str(root / name))
    try:
        return read_file_nofollow(root.resolve(), name.split("/"), max_bytes=max_bytes, path=name)
    except SandboxRequired:
        raise AgentRlError(f"{name}: a link; links in a run's directory are not followed") from None
    except SandboxError as error:
        raise AgentRlError(str(error)) from None


def require_regular(path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Raise AgentRlError if ``path`` exists and is a link, below a link, larger than ``max_bytes`` or not a file."""
    try:
        found = path.lstat()
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode) or path.parent.is_symlink():
        raise AgentRlError(f"{path.name}: a link; links in a run's directory are not followed")
    if not stat.S_ISREG(found.st_mode):
        raise AgentRlError(f"{path.name}: not a regular file")
    if found.st_size > max_bytes:
        raise AgentRlError(f"{path.name}: {found.st_size} bytes, more than the {max_bytes} allowed")


def read_config(root: Path) -> dict[str, Any]:
    """The mapping in ``config.yaml``. Raises OSError if there is none, AgentRlError if it is damaged."""
    try:
        config = yaml.load(read(root, "config.yaml", CONFIG_BYTES).decode(), _NoAliases)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise AgentRlError("config.yaml: damaged") from None
    return dict(config) if isinstance(config, Mapping) else {}


class _NoAliases(yaml.SafeLoader):
    """Safe YAML without aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)
