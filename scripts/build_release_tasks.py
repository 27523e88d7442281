"""Builds the real tasks: ``python -m scripts.build_release_tasks --out .cache/tasks/real.jsonl``.

They are steps between releases as ``agent-rl tasks from-releases`` takes them (:mod:`.harvest`), but chosen by hand,
with issues written by hand (:mod:`.releases`). Only the downloads use the network; what is there is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from envs.context import EnvContext
from envs.swe.records import SweRecord, write_jsonl
from envs.swe.sources import read_jsonl
from envs.swe.task_synthesis.candidate import Candidate, Change, Fallen, draft
from envs.swe.task_synthesis.checkout import Checkout, read_release
from envs.swe.task_synthesis.from_releases import download
from envs.swe.task_synthesis.requirements import PYTEST
from envs.swe.task_synthesis.site_packages import SitePackages
from envs.swe.task_synthesis.validation import Validation
from envs.types import EnvsError
from sandbox import ImageMissingError, SandboxError, SandboxSpec, open_backend
from scripts.release_catalog import RELEASES, Release

SITE = "site"
REQUIREMENTS = (PYTEST, "markupsafe", "pretend")

Say = Callable[[str], None]


class BuildError(EnvsError):
    """A real task could not be built: the message names the package and the step."""


async def build(out: Path, backend_name: str = "auto", say: Say = print) -> list[SweRecord]:
    """Write the real tasks to ``out`` and return them; those it holds already are kept.

    Raises ``BuildError``, ``EnvsError`` or ``SandboxError``.
    """
    done = await asyncio.to_thread(_held, out)
    backend = open_backend(backend_name, run_id=f"real-{uuid.uuid4().hex[:8]}")
    context = EnvContext(backend, limits=SandboxSpec(memory_mb=1024, cpus=2.0))
    try:
        for release in RELEASES:
            if release.task_id in done:
                say(f"{release.task_id}: already built")
                continue
            done[release.task_id] = await _build_one(release, out.parent, context, say)
            write_jsonl(out, done.values())
    finally:
        await backend.close()
    say(f"{len(done)} real tasks in {out}")
    return list(done.values())


def _held(out: Path) -> dict[str, SweRecord]:
    return {record.id: record for record in read_jsonl(out)} if out.is_file() else {}


async def _build_one(release: Release, directory: Path, context: EnvContext, say: Say) -> SweRecord:
    """The verified record of a release."""
    try:
        async with context.sandbox(context.limits):  # a missing image is told before anything is downloaded
            pass
        say(f"{release.task_id}: downloading what is not there yet")
        await SitePackages(directory, f"{sys.version_info.major}.{sys.version_info.minor}").named(SITE, REQUIREMENTS)
        paths = [
            await download(release.package, version, directory / "sdists") for version in (release.old, release.new)
        ]
        say(f"{release.task_id}: running its tests with the old and the new code ({context.backend.name})")
        record = await Validation(context, directory).judge(curated(release, *map(read_release, paths)))
    except Fallen as fallen:
        raise BuildError(f"{release.task_id}: {fallen}") from None
    if release.fails not in record.expected:
        raise BuildError(f"{release.task_id}: {release.fails} does not pass with the new code")
    say(f"{release.task_id}: {len(record.expected)} tests expected to pass")
    return record


def curated(release: Release, old: Checkout, new: Checkout) -> Candidate:
    """The draft of a release: its own directories, and its own issue."""
    in_code = sorted(path for path in {*old.files, *new.files} if _is_code(path, release))
    change = Change(
        repo=release.package,
        task_id=release.task_id,
        files=old.files,
        fixed={path: new.files.get(path) for path in in_code if old.files.get(path) != new.files.get(path)},
        hidden={path: text for path, text in new.files.items() if path.startswith(f"{release.tests}/")},
        run=[release.run or release.tests],
        commit=release.new,
        message=f"{release.package} {release.old} to {release.new}",
        root=release.root,
        issue=release.issue,
    )
    return draft(change, SITE)


def _is_code(path: str, release: Release) -> bool:
    return path.startswith(f"{release.code}/") and not path.startswith(f"{release.tests}/")


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit code 2 and one line for what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.build_release_tasks", description="Build the real tasks.")
    parser.add_argument("--out", type=Path, default=Path(".cache/tasks/real.jsonl"), help="the JSONL file to write")
    parser.add_argument("--backend", default="auto", help="the sandbox where the tests run (default %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        asyncio.run(build(arguments.out, arguments.backend))
    except ImageMissingError as error:
        print(f"error: {error}, or with: make image", file=sys.stderr)
        return 2
    except (EnvsError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
