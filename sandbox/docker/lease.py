"""Leases in a container engine: the owners of its containers, and heartbeats that every client of the engine can read.

Labels cannot be changed, so each heartbeat creates a new empty volume and removes the last one; the volume's age is the
time since the last beat. Both times come from the engine's clock, so clocks of two machines are never compared.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from datetime import datetime
from typing import Any

import docker.errors

from sandbox.docker.client import EngineClient, remove_container, translate_errors
from sandbox.errors import SandboxLostError
from sandbox.lease import Lease, Owner

RUN_LABEL = "agent-rl.run"
OWNER_LABEL = "agent-rl.owner"
_PREFIX = "agent-rl-lease"


class EngineLease:
    """The heartbeat of one run in the engine. Blocking."""

    def __init__(self, api: EngineClient, owner: Owner) -> None:
        self._api, self._labels = api, {RUN_LABEL: owner.run_id, OWNER_LABEL: owner.to_json()}
        self._volume: str | None = None

    def renew(self) -> None:
        """Beat once. Raises ``SandboxLostError`` if the engine does not respond."""
        translate_errors(self._renew, SandboxLostError)

    def end(self) -> None:
        """Remove the heartbeat."""
        volume, self._volume = self._volume, None
        if volume is not None:
            translate_errors(lambda: _remove_volume(self._api, volume), SandboxLostError)

    def _renew(self) -> None:
        previous, self._volume = self._volume, f"{_PREFIX}-{uuid.uuid4().hex}"
        self._api.create_volume(self._volume, labels=self._labels)
        if previous is not None:
            _remove_volume(self._api, previous)


def engine_leases(api: EngineClient, backend: str) -> list[Lease]:
    """Return the leases of all runs with containers or a heartbeat in the engine."""
    sandboxes: dict[Owner, list[str]] = defaultdict(list)
    running: set[Owner] = set()
    for container in api.containers(all=True, filters={"label": OWNER_LABEL}):
        if owner := _parse_owner(container):
            sandboxes[owner].append(container["Id"])
            if container["State"] == "running":
                running.add(owner)
    now = datetime.fromisoformat(_to_iso(api.info()["SystemTime"]))
    silence: dict[Owner, float] = {}
    for volume in _list_volumes(api):
        if owner := _parse_owner(volume):
            age = (now - datetime.fromisoformat(_to_iso(volume["CreatedAt"]))).total_seconds()
            silence[owner] = min(age, silence.get(owner, age))
    leases = []
    for owner in {**sandboxes, **silence}:
        # All containers have stopped and the owner is of another boot: the machine has restarted since.
        stopped = not owner.same_boot and owner in sandboxes and owner not in running
        seconds = float("inf") if stopped else silence.get(owner)
        leases.append(Lease(backend, owner, tuple(sandboxes[owner]), seconds, api.base_url))
    return leases


def remove_lease(api: EngineClient, lease: Lease) -> int:
    """Remove the containers of a lease, then its heartbeat; return the number of removed containers."""
    removed = sum(remove_container(api, sandbox) for sandbox in lease.sandboxes)
    for volume in _list_volumes(api):
        if _parse_owner(volume) == lease.owner:
            _remove_volume(api, volume["Name"])
    return removed


def _list_volumes(api: EngineClient) -> list[dict[str, Any]]:
    return api.volumes(filters={"label": OWNER_LABEL})["Volumes"] or []


def _parse_owner(labelled: dict[str, Any]) -> Owner | None:
    try:
        return Owner.from_json(labelled["Labels"][OWNER_LABEL])
    except ValueError:
        return None


def _remove_volume(api: EngineClient, name: str) -> None:
    # NotFound: the user pruned the engine's volumes, or another reaper removed it.
    with contextlib.suppress(docker.errors.NotFound):
        api.remove_volume(name)


def _to_iso(time: str) -> str:
    """Convert an RFC 3339 time of the engine to the form that Python 3.11 parses, with microseconds."""
    whole, point, rest = time.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    return f"{whole}.{rest[: min(digits, 6)]:0<6}{rest[digits:]}" if point else whole
