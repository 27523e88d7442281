"""Builds the real tasks: ``python -m scripts.build_release_tasks --out .cache/tasks/real.jsonl``.

They are steps between releases, as in ``agent-rl tasks from-releases``, but selected by hand and with issues written by
hand (``release_catalog.yaml``). Only the downloads use the network. Existing files are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from envs.context import EnvContext
from envs.swe.records import SweRecord, write_jsonl
from envs.swe.sources import read_jsonl
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected, CodeChange, make_candidate
from envs.swe.task_synthesis.checkout import Checkout, read_release
from envs.swe.task_synthesis.from_releases import download
from envs.swe.task_synthesis.requirements import PYTEST
from envs.swe.task_synthesis.site_packages import SitePackages
from envs.swe.task_synthesis.validation import Validation
from envs.types import EnvsError
from sandbox import ImageMissingError, SandboxError, SandboxSpec, open_backend

SITE_PACKAGES_NAME = "site"
REQUIREMENTS = (PYTEST, "markupsafe", "pretend")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Release:
    """The step of ``package`` from ``old`` to ``new``.

    ``code`` is the directory of the package's code, ``tests`` the directory of its tests (hidden, from ``new``),
    ``run`` the tests to run (default: all), ``root`` the import path. ``fails`` is one test that fails with the old
    code.
    """

    package: str
    old: str
    new: str
    code: str
    tests: str
    fails: str
    issue: str
    root: str = "."
    run: str = ""

    @property
    def task_id(self) -> str:
        return f"{self.package}-{self.new}"


RELEASES = tuple(Release(**row) for row in yaml.safe_load(Path(__file__).with_name("release_catalog.yaml").read_text()))


class BuildError(EnvsError):
    """A real task could not be built. The message names the package and the step."""


async def build(out: Path, backend_name: str = "auto", report: Report = print) -> list[SweRecord]:
    """Write the real tasks to ``out`` and return them. Tasks that are already in the file are kept.

    Raises ``BuildError``, ``EnvsError`` or ``SandboxError``.
    """
    records = await asyncio.to_thread(_existing_records, out)
    backend = open_backend(backend_name, run_id=f"real-{uuid.uuid4().hex[:8]}")
    context = EnvContext(backend, limits=SandboxSpec(memory_mb=1024, cpus=2.0))
    try:
        for release in RELEASES:
            if release.task_id in records:
                report(f"{release.task_id}: already built")
                continue
            records[release.task_id] = await _build_one(release, out.parent, context, report)
            write_jsonl(out, records.values())
    finally:
        await backend.close()
    report(f"{len(records)} real tasks in {out}")
    return list(records.values())


def _existing_records(out: Path) -> dict[str, SweRecord]:
    return {record.id: record for record in read_jsonl(out)} if out.is_file() else {}


async def _build_one(release: Release, directory: Path, context: EnvContext, report: Report) -> SweRecord:
    """The verified record of a release."""
    try:
        async with context.sandbox(context.limits):  # a missing image raises before any download
            pass
        report(f"{release.task_id}: downloading missing files")
        await SitePackages(directory, f"{sys.version_info.major}.{sys.version_info.minor}").install_as(
            SITE_PACKAGES_NAME, REQUIREMENTS
        )
        paths = [
            await download(release.package, version, directory / "sdists") for version in (release.old, release.new)
        ]
        report(f"{release.task_id}: running its tests with the old and the new code ({context.backend.name})")
        record = await Validation(context, directory).validate(catalog_candidate(release, *map(read_release, paths)))
    except CandidateRejected as error:
        raise BuildError(f"{release.task_id}: {error}") from None
    if release.fails not in record.expected:
        raise BuildError(f"{release.task_id}: {release.fails} does not pass with the new code")
    report(f"{release.task_id}: {len(record.expected)} tests expected to pass")
    return record


def catalog_candidate(release: Release, old: Checkout, new: Checkout) -> Candidate:
    """The candidate of a release, with the directories and the issue of its catalog entry."""
    code_paths = sorted(path for path in {*old.files, *new.files} if _is_code(path, release))
    change = CodeChange(
        repo=release.package,
        task_id=release.task_id,
        files=old.files,
        fixed={path: new.files.get(path) for path in code_paths if old.files.get(path) != new.files.get(path)},
        hidden={path: text for path, text in new.files.items() if path.startswith(f"{release.tests}/")},
        run=[release.run or release.tests],
        commit=release.new,
        message=f"{release.package} {release.old} to {release.new}",
        root=release.root,
        issue=release.issue,
    )
    return make_candidate(change, SITE_PACKAGES_NAME)


def _is_code(path: str, release: Release) -> bool:
    return path.startswith(f"{release.code}/") and not path.startswith(f"{release.tests}/")


def main(argv: list[str] | None = None) -> int:
    """The command line. Errors exit with code 2 and one line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.build_release_tasks", description="Build the real tasks.")
    parser.add_argument("--out", type=Path, default=Path(".cache/tasks/real.jsonl"), help="the JSONL file to write")
    parser.add_argument("--backend", default="auto", help="sandbox backend for the tests (default %(default)s)")
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
