"""Command ``python -m sandbox.reap``: removes the sandboxes of killed runs.

A run does the same when it starts. This command needs no run and no config: use it by hand, from a timer, or with
``--every`` beside the runs. It covers every backend of this machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sandbox.errors import SandboxError, SandboxUnavailableError
from sandbox.lease import Lease

BACKEND_NAMES = ("bubblewrap", "docker", "podman")


@dataclass(frozen=True, slots=True)
class LeaseStore:
    """The leases of one backend on this machine. ``leases`` lists them; ``remove`` removes the sandboxes of a lease
    and returns how many."""

    leases: Callable[[], list[Lease]]
    remove: Callable[[Lease], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 after a one-line error)."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.reap", description="Remove the sandboxes of dead runs.")
    parser.add_argument("--backend", choices=BACKEND_NAMES, action="append", help="backend (default: all usable ones)")
    parser.add_argument("--list", action="store_true", help="show the runs; remove nothing")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="repeat at this interval")
    options = parser.parse_args(argv)
    try:
        while True:
            for name in options.backend or BACKEND_NAMES:
                _reap(name, remove=not options.list, required=options.backend is not None)
            if options.every is None:
                return 0
            time.sleep(options.every)
    except SandboxError as error:
        print(f"sandbox reap: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _reap(backend: str, *, remove: bool, required: bool) -> None:
    try:
        store = open_lease_store(backend)
    except SandboxUnavailableError as error:
        if required:
            raise
        print(f"{backend}: {error}", flush=True)
        return
    for lease in store.leases():
        removed = f"; removed {store.remove(lease)}" if lease.dead and remove else ""
        print(
            f"{backend}: run {lease.owner.run_id}, {len(lease.sandboxes)} sandbox(es), {lease.status}{removed}",
            flush=True,
        )


def open_lease_store(backend: str) -> LeaseStore:
    """Return the leases of ``backend``. Raises ``SandboxUnavailableError`` if this machine cannot use it."""
    if backend == "bubblewrap":
        from sandbox.bubblewrap.backend import default_base
        from sandbox.bubblewrap.run_dir import dir_leases
        from sandbox.bubblewrap.run_dir import remove_lease as remove_dir

        return LeaseStore(partial(dir_leases, default_base()), remove_dir)
    from sandbox.docker.client import connect, translate_errors
    from sandbox.docker.lease import engine_leases, remove_lease

    api = connect(backend)
    return LeaseStore(
        lambda: translate_errors(partial(engine_leases, api, backend), SandboxError),
        lambda lease: translate_errors(partial(remove_lease, api, lease), SandboxError),
    )


if __name__ == "__main__":
    sys.exit(main())
