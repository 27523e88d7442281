"""Removes what killed runs left behind, from outside of any run: ``python -m sandbox.reap``.

A run removes the sandboxes of dead ones when it starts. This command does the same without one: by hand, from a
timer, or beside the runs with ``--every``. It looks at each kind of sandbox that this machine has, and needs nothing
of a run's configuration.
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

KINDS = ("bubblewrap", "docker", "podman")


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of sandboxes on this machine. ``leases`` lists them; ``remove`` removes one's sandboxes and returns
    how many."""

    leases: Callable[[], list[Lease]]
    remove: Callable[[Lease], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (2: a missing part, told in one line)."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.reap", description="Remove the sandboxes of dead runs.")
    parser.add_argument("--backend", choices=KINDS, action="append", help="only this kind (default: all that answer)")
    parser.add_argument("--list", action="store_true", help="only show the runs, remove nothing")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="go on, once in so many seconds")
    options = parser.parse_args(argv)
    try:
        while True:
            for kind in options.backend or KINDS:
                _visit(kind, remove=not options.list, asked=options.backend is not None)
            if options.every is None:
                return 0
            time.sleep(options.every)
    except SandboxError as error:
        print(f"sandbox reap: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _visit(kind: str, *, remove: bool, asked: bool) -> None:
    try:
        place = open_place(kind)
    except SandboxUnavailableError as error:
        if asked:
            raise
        print(f"{kind}: {error}", flush=True)
        return
    for lease in place.leases():
        removed = f"; removed {place.remove(lease)}" if lease.dead and remove else ""
        print(
            f"{kind}: run {lease.owner.run_id}, {len(lease.sandboxes)} sandbox(es), {lease.verdict}{removed}",
            flush=True,
        )


def open_place(kind: str) -> Place:
    """The sandboxes of ``kind``. Raises ``SandboxUnavailableError`` where there can be none here."""
    if kind == "bubblewrap":
        from sandbox.bubblewrap.backend import default_base
        from sandbox.bubblewrap.run_dir import dir_leases
        from sandbox.bubblewrap.run_dir import remove_lease as remove_dir

        return Place(partial(dir_leases, default_base()), remove_dir)
    from sandbox.docker.engine import connect, converted
    from sandbox.docker.lease import engine_leases, remove_lease

    api = connect(kind)
    return Place(
        lambda: converted(partial(engine_leases, api, kind), SandboxError),
        lambda lease: converted(partial(remove_lease, api, lease), SandboxError),
    )


if __name__ == "__main__":
    sys.exit(main())
