"""Candidates from a package's releases: a release's tests with the code of the one before."""

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
from envs.swe.task_synthesis.candidate import (
    Candidate,
    Change,
    Fallen,
    draft,
    egg_info,
    import_root,
    is_code,
    is_test_module,
)
from envs.swe.task_synthesis.checkout import Checkout, read_release
from envs.swe.task_synthesis.requirements import requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages, pip, pip_error, run_watched

MOST_CHANGED = 60
_SDIST_MB = 256
_SECONDS = 300.0
_FINAL = re.compile(r"\d+(\.\d+)*(\.post\d+)?")
_CHANGES = re.compile(r"(?:docs?/)?(?:[\w-]*change[\w-]*|history|news|releases?)(?:\.(?:md|rst|txt))?", re.IGNORECASE)


@dataclass
class Releases:
    """Steps from one release of ``package`` to the next; their source releases are kept in ``sdists``.

    ``steps`` are pairs of versions; without any they are all of the index, the newest first.
    """

    package: str
    sdists: Path
    sites: SitePackages
    steps: Sequence[tuple[str, str]] = ()
    _steps: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"from-releases {self.package}"

    @property
    def left_out(self) -> Mapping[str, int]:
        return {}

    async def candidates(self) -> Sequence[str]:
        steps = self.steps or await self._all_steps()
        self._steps = {f"{old} {new}": (old, new) for old, new in steps}
        return list(self._steps)

    async def draft(self, key: str) -> Candidate:
        old, new = [read_release(await download(self.package, version, self.sdists)) for version in self._steps[key]]
        root = import_root(old.files)
        hidden = {path: text for path, text in new.files.items() if _is_changed_test(path, text, old)}
        files = {**old.files, **egg_info(old.files, self.package, root, old.commit)}
        change = Change(
            repo=self.package,
            task_id=f"{self.package}-{new.commit}",
            files=files,
            fixed=_changed_code(old, new),
            hidden=hidden,
            run=sorted(filter(is_test_module, hidden)),
            commit=new.commit,
            message=_told(old, new),
            root=root,
        )
        if not change.run:
            raise Fallen("changes no test")
        return draft(change, await self.sites.of(requirements_of(new.files, self.package, new.metadata)))

    async def _all_steps(self) -> list[tuple[str, str]]:
        """The steps between final releases that have a source release. Raises ``Fallen`` where there are none."""
        with _scratch(self.sdists) as fresh:
            listing = ["index", "versions", "--no-binary", ":all:", self.package]
            code, output = await pip(listing, watched=fresh, mb=_SDIST_MB, seconds=_SECONDS)
        found = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
        if code != 0 or found is None:
            raise Fallen("no source release", pip_error(output))
        final = [version.strip() for version in found[1].split(",") if _FINAL.fullmatch(version.strip())]
        return [(old, new) for new, old in pairwise(final)]


async def download(package: str, version: str, directory: Path) -> Path:
    """The source release in ``directory``, downloaded unless it is there. None of its code is run. Raises
    ``Fallen``."""
    target = directory / f"{package}-{version}.tar.gz"
    if target.is_file():
        return target
    with _scratch(directory) as fresh:
        program = str(Path(__file__).with_name("fetch_source.py"))
        wanted = ["--no-deps", "--no-binary", ":all:", "--dest", str(fresh / "got"), f"{package}=={version}"]
        command = [sys.executable, program, "--disable-pip-version-check", "--quiet", "download", *wanted]
        code, output = await run_watched(command, watched=fresh, mb=_SDIST_MB, seconds=_SECONDS)
        got = sorted((fresh / "got").glob("*.tar.gz"))
        if code != 0 or not got:
            raise Fallen("no source release", f"{package} {version}: {pip_error(output)}")
        got[0].rename(target)
    return target


@contextmanager
def _scratch(above: Path) -> Iterator[Path]:
    """A directory below another one, removed in the end."""
    above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above, prefix=".pip.", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _is_changed_test(path: str, text: str, old: Checkout) -> bool:
    return (is_test_path(path) or is_test_module(path)) and old.files.get(path) != text


def _changed_code(old: Checkout, new: Checkout) -> Mapping[str, str | None]:
    paths = sorted(path for path in {*old.files, *new.files} if is_code(path) and not is_test_module(path))
    changed = {path: new.files.get(path) for path in paths if old.files.get(path) != new.files.get(path)}
    if not changed:
        raise Fallen("changes no code")
    if len(changed) > MOST_CHANGED:
        raise Fallen("changes too many files", str(len(changed)))
    return changed


def _told(old: Checkout, new: Checkout) -> str:
    """What the list of changes says of the new release: the lines that the old one's did not have."""
    for path in sorted(filter(_CHANGES.fullmatch, new.files)):
        known = set(old.files.get(path, "").splitlines())
        if lines := [line for line in new.files[path].splitlines() if line not in known]:
            return "\n".join(lines[:80]).strip()
    return ""
