"""Builds the real tasks: ``python -m envs.swe.real --out .cache/tasks/real.jsonl``.

For each package of :mod:`.releases` both source releases are downloaded, the new release's tests are run in a box
against the old code (the named test must fail) and against the new code (it must pass), and what passed with the new
code becomes the expected output. Only the download uses the network, and what is there already is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from envs.context import EnvContext
from envs.swe.boxes import box_spec, run_tests
from envs.swe.grading import verify_record
from envs.swe.patches import diff_files
from envs.swe.pytest_log import parse_summary
from envs.swe.records import SweRecord, commit_content, write_jsonl
from envs.swe.releases import RELEASES, Release
from envs.swe.sources import read_jsonl
from envs.types import EnvsError
from sandbox import ImageMissingError, SandboxError, SandboxSpec, open_backend

SITE_REQUIREMENTS = ("pytest==8.3.5", "markupsafe", "pretend")
_DOWNLOAD_TIMEOUT = 600.0
_MAX_FILE_BYTES = 1 << 20

Say = Callable[[str], None]


class BuildError(EnvsError):
    """A real task could not be built: the message names the package and the step."""


def build(out: Path, backend_name: str = "auto", say: Say = print) -> list[SweRecord]:
    """Write the real tasks to ``out`` and return them; those it holds already are kept.

    Raises ``BuildError``, ``EnvsError`` or ``SandboxError``.
    """
    done = {record.id: record for record in read_jsonl(out)} if out.is_file() else {}
    if any(release.task_id not in done for release in RELEASES):
        asyncio.run(_try_sandbox(backend_name))
    site = make_site(out.parent / "site", say)
    for release in RELEASES:
        if release.task_id in done:
            say(f"{release.task_id}: already built")
            continue
        record = draft(release, out.parent / "sdists", site.name, say)
        done[release.task_id] = asyncio.run(_examine(record, release, out.parent, backend_name, say))
        write_jsonl(out, done.values())
    say(f"{len(done)} real tasks in {out}")
    return list(done.values())


def make_site(folder: Path, say: Say = print) -> Path:
    """A folder of the packages that the tests need in the box, for its ``PYTHONPATH``."""
    if folder.is_dir():
        say(f"packages for the tests: already in {folder}")
        return folder
    say(f"packages for the tests: installing {', '.join(SITE_REQUIREMENTS)} into {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".site."))
    try:
        _pip("install", "--no-compile", "--only-binary", ":all:", "--target", str(fresh), *SITE_REQUIREMENTS)
        fresh.chmod(0o755)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def draft(release: Release, sdists: Path, site: str, say: Say = print) -> SweRecord:
    """The record of a release, its expected output still to be measured."""
    old = read_sdist(download(release.package, release.old, sdists, say))
    new = read_sdist(download(release.package, release.new, sdists, say))
    hidden = {path: text for path, text in new.items() if _below(path, release.tests)}
    before, after = _code(old, release), _code(new, release)
    changed = tuple(path for path in sorted({*before, *after}) if before.get(path) != after.get(path))
    gold = diff_files(before, after)
    return SweRecord(
        repo_name=release.package,
        task_id=release.task_id,
        commit_hash=release.new,
        parsed_commit_content=commit_content(before, after, f"{release.package} {release.old} to {release.new}"),
        expected_output_json=json.dumps({release.fails: "PASSED"}),
        problem_statement=f"[ISSUE]\n{release.issue}\n[/ISSUE]",
        modified_files=changed,
        relevant_files=changed,
        num_non_test_files=len(changed),
        num_non_test_lines=sum(_is_changed_line(line) for line in gold.split("\n")),
        files=old,
        tests=hidden,
        test_command=_test_command(release),
        gold_patch=gold,
        site_packages=site,
    )


def download(package: str, version: str, folder: Path, say: Say = print) -> Path:
    """The source release ``package==version``, downloaded into ``folder`` unless it is there."""
    target = folder / f"{package}-{version}.tar.gz"
    if target.is_file():
        say(f"{package} {version}: already downloaded")
        return target
    say(f"{package} {version}: downloading the source release")
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), f"{package}=={version}")
    if not target.is_file():
        raise BuildError(f"{package} {version}: pip left no {target}")
    return target


def read_sdist(path: Path) -> dict[str, str]:
    """The text files of a source release, without its top folder. Binary, hidden and metadata files are left out."""
    files: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts[1:]
            if not member.isfile() or member.size > _MAX_FILE_BYTES or not parts or _is_metadata(parts):
                continue
            content = archive.extractfile(member)
            assert content is not None  # isfile() holds
            try:
                files["/".join(parts)] = content.read().decode()
            except UnicodeDecodeError:
                continue
    return files


async def _try_sandbox(backend_name: str) -> None:
    """Start a box before anything is downloaded. Raises ``SandboxError`` where none can be had."""
    backend = open_backend(backend_name, run_id=f"real-{uuid.uuid4().hex[:8]}")
    try:
        await backend.start(SandboxSpec())
    finally:
        await backend.close()


async def _examine(record: SweRecord, release: Release, site_root: Path, backend_name: str, say: Say) -> SweRecord:
    """The record with its measured expected output, verified."""
    backend = open_backend(backend_name, run_id=f"real-{uuid.uuid4().hex[:8]}")
    context = EnvContext(backend, limits=SandboxSpec(memory_mb=1024, cpus=2.0))
    try:
        say(f"{record.id}: running the new tests with the old code ({backend.name})")
        before = await _statuses(context, record, "", site_root)
        if before.get(release.fails) == "PASSED":
            raise BuildError(f"{record.id}: {release.fails} passes with the old code")
        say(f"{record.id}: running the new tests with the new code, twice")
        runs = [await _statuses(context, record, record.gold, site_root) for _ in range(2)]
        passed = {test: "PASSED" for test in runs[0] if all(run.get(test) == "PASSED" for run in runs)}
        if release.fails not in passed:
            raise BuildError(f"{record.id}: {release.fails} does not pass with the new code")
        expected = json.dumps(passed, ensure_ascii=False)
        execution = json.dumps({"old_commit_statuses": before, "new_commit_statuses": runs[0]}, ensure_ascii=False)
        update = {"expected_output_json": expected, "execution_result_content": execution}
        checked = await verify_record(context, record.model_copy(update=update), site_root=site_root)
        fixed = sum(before.get(test) != "PASSED" for test in passed)
        say(f"{record.id}: {len(passed)} tests expected to pass, {fixed} of them fail with the old code")
        return checked
    finally:
        await backend.close()


async def _statuses(context: EnvContext, record: SweRecord, patch: str, site_root: Path) -> Mapping[str, str]:
    run = await run_tests(context, record, box_spec(context, record, site_root), patch)
    statuses = parse_summary(run.log)
    if not statuses:
        raise BuildError(f"{record.id}: the tests gave no summary ({run.account})")
    return statuses


def _test_command(release: Release) -> str:
    options = "-rA --no-fold-skipped --tb=no -q --color=no -p no:cacheprovider"
    return f'PYTHONPATH="{release.root}:$PYTHONPATH" python3 -m pytest {options} {release.run or release.tests}'


def _code(files: Mapping[str, str], release: Release) -> dict[str, str]:
    return {
        path: text for path, text in files.items() if _below(path, release.code) and not _below(path, release.tests)
    }


def _below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def _is_changed_line(line: str) -> bool:
    return line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))


def _is_metadata(parts: tuple[str, ...]) -> bool:
    return parts[-1] == "PKG-INFO" or any(part.startswith(".") or part.endswith(".egg-info") for part in parts)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        raise BuildError(f"pip {arguments[0]} {arguments[-1]} failed: {last}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"pip {arguments[0]} {arguments[-1]}: no end within {_DOWNLOAD_TIMEOUT:.0f} s") from None


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit code 2 and one line for what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m envs.swe.real", description="Build the real tasks.")
    parser.add_argument("--out", type=Path, default=Path(".cache/tasks/real.jsonl"), help="the JSONL file to write")
    parser.add_argument("--backend", default="auto", help="the sandbox where the tests run (default %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        build(arguments.out, arguments.backend)
    except ImageMissingError as error:
        print(f"error: {error}, or with: make image", file=sys.stderr)
        return 2
    except (EnvsError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
