"""What a container takes of the engine's disk, and the quota that some of its file systems can hold it to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.disk import Usage
from sandbox.docker.engine import EngineClient

_QUOTA_FILE_SYSTEMS = ("xfs", "btrfs", "zfs")
_MARGIN_MB = 256


@dataclass(frozen=True, slots=True)
class Written:
    """Where the engine keeps what a sandbox writes. ``directories`` can be read from here; ``by_engine``: its layer
    is not among them, so that the engine itself has to be asked for the layer's size."""

    directories: tuple[Path, ...]
    by_engine: bool


def written(api: EngineClient, container: str) -> Written:
    """Where the container's layer and its volumes are. Blocking."""
    found = api.inspect_container(container)
    layer = (found["GraphDriver"].get("Data") or {}).get("UpperDir")
    volumes = [mount["Source"] for mount in found.get("Mounts") or () if mount["Type"] == "volume"]
    directories = tuple(Path(each) for each in (layer, *volumes) if each and os.access(each, os.R_OK | os.X_OK))
    return Written(directories, by_engine=layer is None or Path(layer) not in directories)


def layer_size(api: EngineClient, container: str) -> Usage:
    """What the container's layer takes by the engine's own account, which does not count files. Blocking."""
    return Usage(api.layer_bytes(container))


def may_have_quota(about: Mapping[str, Any]) -> bool:
    """Whether the engine, by what it says of itself, keeps sandboxes on a file system that knows quotas."""
    status = dict(about.get("DriverStatus") or ())
    return not {about.get("Driver"), status.get("Backing Filesystem")}.isdisjoint(_QUOTA_FILE_SYSTEMS)


def is_want_of_quota(refusal: str) -> bool:
    """Whether the engine refused a container for its quota: some file systems have none unless mounted for it."""
    return any(words in refusal.lower() for words in ("storage-opt", "storage opt", "project quota"))


def quota(api: EngineClient, image: str, disk_mb: int) -> dict[str, str]:
    """The storage options that hold a sandbox to ``disk_mb`` MiB and a margin. Blocking.

    The margin leaves it to the watch to end and name a sandbox that outgrows its limit; the quota bounds what the
    sandbox can take between two looks. Btrfs counts what the sandbox shares with its image too.
    """
    shared = int(api.inspect_image(image)["Size"]) >> 20 if api.about["Driver"] == "btrfs" else 0
    return {"size": f"{disk_mb + shared + _MARGIN_MB}m"}
