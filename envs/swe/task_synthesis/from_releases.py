"""Candidates from a package's releases: the tests of a release with the code of the previous one."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from envs.swe.diff.git_diff import is_test_path
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected, CodeChange, make_candidate
from envs.swe.task_synthesis.checkout import Checkout, read_release
from envs.swe.task_synthesis.files import is_code, is_test_module, with_egg_info
from envs.swe.task_synthesis.requirements import requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages, pip_error, run_limited, run_pip

MAX_CHANGED_FILES = 60
_SDIST_MB = 256
_SECONDS = 300.0
_FINAL = re.compile(r"\d+(\.\d+)*(\.post\d+)?")
_CHANGES = re.compile(r"(?:docs?/)?(?:[\w-]*change[\w-]*|history|news|releases?)(?:\.(?:md|rst|txt))?", re.IGNORECASE)


@dataclass
class ReleaseSource:
    """Steps from one release of ``package`` to the next. Source releases are stored in ``sdists``.

    ``steps`` are pairs of versions (old, new). Without any, all steps of the package index are used, newest first.
    """

    package: str
    sdists: Path
    site_packages: SitePackages
    steps: Sequence[tuple[str, str]] = ()
    omitted: Mapping[str, int] = field(default_factory=dict)
    _steps_by_key: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"from-releases {self.package}"

    async def candidate_keys(self) -> Sequence[str]:
        steps = self.steps or await self._all_steps()
        self._steps_by_key = {f"{old} {new}": (old, new) for old, new in steps}
        return list(self._steps_by_key)

    async def candidate(self, key: str) -> Candidate:
        old, new = [
            read_release(await download(self.package, version, self.sdists)) for version in self._steps_by_key[key]
        ]
        hidden = {path: text for path, text in new.files.items() if _is_changed_test(path, text, old)}
        change = CodeChange(
            repo=self.package,
            task_id=f"{self.package}-{new.commit}",
            files=with_egg_info(old.files, self.package, old.commit),
            fixed=_changed_code(old, new),
            hidden=hidden,
            commit=new.commit,
            message=_changelog_entry(old, new),
        )
        requirements = requirements_of(new.files, self.package, new.metadata)
        return make_candidate(change, await self.site_packages.install(requirements))

    async def _all_steps(self) -> list[tuple[str, str]]:
        """The steps between final releases with a source release. Raises ``CandidateRejected`` if there are none."""
        with _temporary_directory(self.sdists) as fresh:
            listing = ["index", "versions", "--no-binary", ":all:", self.package]
            code, output = await run_pip(listing, watched=fresh, mb=_SDIST_MB, seconds=_SECONDS)
        match = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
        if code != 0 or match is None:
            raise CandidateRejected("no source release", pip_error(output))
        final = [version.strip() for version in match[1].split(",") if _FINAL.fullmatch(version.strip())]
        return [(old, new) for new, old in pairwise(final)]


async def download(package: str, version: str, directory: Path) -> Path:
    """Return the source release in ``directory``, downloaded if it is missing. Runs none of its code.

    Raises ``CandidateRejected``.
    """
    target = directory / f"{package}-{version}.tar.gz"
    if target.is_file():
        return target
    with _temporary_directory(directory) as fresh:
        program = str(Path(__file__).with_name("fetch_source.py"))
        arguments = ["--no-deps", "--no-binary", ":all:", "--dest", str(fresh / "got"), f"{package}=={version}"]
        command = [sys.executable, program, "--disable-pip-version-check", "--quiet", "download", *arguments]
        code, output = await run_limited(command, watched=fresh, mb=_SDIST_MB, seconds=_SECONDS)
        archives = sorted((fresh / "got").glob("*.tar.gz"))
        if code != 0 or not archives:
            raise CandidateRejected("no source release", f"{package} {version}: {pip_error(output)}")
        archives[0].rename(target)
    return target


@contextmanager
def _temporary_directory(parent: Path) -> Iterator[Path]:
    """A new directory in ``parent``, removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".pip.", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _is_changed_test(path: str, text: str, old: Checkout) -> bool:
    return (is_test_path(path) or is_test_module(path)) and old.files.get(path) != text


def _changed_code(old: Checkout, new: Checkout) -> Mapping[str, str | None]:
    paths = sorted(path for path in {*old.files, *new.files} if is_code(path) and not is_test_module(path))
    changed = {path: new.files.get(path) for path in paths if old.files.get(path) != new.files.get(path)}
    if not changed:
        raise CandidateRejected("changes no code")
    if len(changed) > MAX_CHANGED_FILES:
        raise CandidateRejected("changes too many files", str(len(changed)))
    return changed


def _changelog_entry(old: Checkout, new: Checkout) -> str:
    """The lines of the changelog that are new in the new release, at most 80."""
    for path in sorted(filter(_CHANGES.fullmatch, new.files)):
        known = set(old.files.get(path, "").splitlines())
        if lines := [line for line in new.files[path].splitlines() if line not in known]:
            return "\n".join(lines[:80]).strip()
    return ""
