"""Leases in a container engine: who holds its containers, with a heartbeat that whoever can ask the engine can judge.

Labels can't be changed, so a heartbeat is an empty volume made anew: its age is the last beat's. The engine's clock
tells both the volume's time and now, so no two machines' clocks are ever compared.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from datetime import datetime
from typing import Any

import docker.errors

from sandbox.docker.engine import EngineClient, converted, remove_container
from sandbox.errors import SandboxLostError
from sandbox.lease import Lease
from sandbox.owner import Owner

RUN_LABEL = "agent-rl.run"
OWNER_LABEL = "agent-rl.owner"
_PREFIX = "agent-rl-lease"


class EngineLease:
    """One run's heartbeat in the engine. Blocking calls."""

    def __init__(self, api: EngineClient, owner: Owner) -> None:
        self._api, self._labels = api, {RUN_LABEL: owner.run_id, OWNER_LABEL: owner.to_json()}
        self._volume: str | None = None

    def renew(self) -> None:
        """Beat once. Raises ``SandboxLostError`` where the engine does not answer."""
        converted(self._renew, SandboxLostError)

    def end(self) -> None:
        """Remove the heartbeat."""
        volume, self._volume = self._volume, None
        if volume is not None:
            converted(lambda: _remove_volume(self._api, volume), SandboxLostError)

    def _renew(self) -> None:
        last, self._volume = self._volume, f"{_PREFIX}-{uuid.uuid4().hex}"
        self._api.create_volume(self._volume, labels=self._labels)
        if last is not None:
            _remove_volume(self._api, last)


def engine_leases(api: EngineClient, backend: str) -> list[Lease]:
    """The leases of every run that has containers or a heartbeat in the engine."""
    sandboxes: dict[Owner, list[str]] = defaultdict(list)
    runs: set[Owner] = set()
    for container in api.containers(all=True, filters={"label": OWNER_LABEL}):
        if owner := _owner_of(container):
            sandboxes[owner].append(container["Id"])
            if container["State"] == "running":
                runs.add(owner)
    now = datetime.fromisoformat(_iso(api.info()["SystemTime"]))
    silent: dict[Owner, float] = {}
    for volume in _volumes(api):
        if owner := _owner_of(volume):
            age = (now - datetime.fromisoformat(_iso(volume["CreatedAt"]))).total_seconds()
            silent[owner] = min(age, silent.get(owner, age))
    leases = []
    for owner in {**sandboxes, **silent}:
        # The engine was started anew since then, most likely with the whole machine: none of these runs goes on.
        stopped = not owner.same_boot and owner in sandboxes and owner not in runs
        silence = float("inf") if stopped else silent.get(owner)
        leases.append(Lease(backend, owner, tuple(sandboxes[owner]), silence, api.base_url))
    return leases


def remove_lease(api: EngineClient, lease: Lease) -> int:
    """Remove a lease's containers, then its heartbeat; return how many containers went."""
    removed = sum(remove_container(api, sandbox) for sandbox in lease.sandboxes)
    for volume in _volumes(api):
        if _owner_of(volume) == lease.owner:
            _remove_volume(api, volume["Name"])
    return removed


def _volumes(api: EngineClient) -> list[dict[str, Any]]:
    return api.volumes(filters={"label": OWNER_LABEL})["Volumes"] or []


def _owner_of(thing: dict[str, Any]) -> Owner | None:
    try:
        return Owner.from_json(thing["Labels"][OWNER_LABEL])
    except ValueError:
        return None


def _remove_volume(api: EngineClient, name: str) -> None:
    # Gone already: a user has pruned the engine's volumes, or another reaper was at it.
    with contextlib.suppress(docker.errors.NotFound):
        api.remove_volume(name)


def _iso(time: str) -> str:
    """An engine's RFC 3339 time as Python 3.11 reads it, without more than microseconds."""
    whole, point, rest = time.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    return f"{whole}.{rest[: min(digits, 6)]:0<6}{rest[digits:]}" if point else whole
