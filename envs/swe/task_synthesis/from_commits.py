"""Candidates from a repository's history: commits that change code and its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envs.swe.diff.git_diff import is_test_path
from envs.swe.task_synthesis.candidate import (
    Candidate,
    Change,
    Fallen,
    as_text,
    draft,
    egg_info,
    import_root,
    is_code,
    is_lfs,
    is_test_module,
)
from envs.swe.task_synthesis.checkout import left_out, texts
from envs.swe.task_synthesis.git import LINK, SUBMODULE, Commit, FileChange, Git
from envs.swe.task_synthesis.requirements import name_of_project, requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages

MOST_CHANGED = 30
"""Files of code that a commit may change: one that changes more has no issue that names them all."""


@dataclass
class History:
    """The commits of a repository ``repo``, the newest ``count`` of them."""

    git: Git
    sites: SitePackages
    repo: str
    count: int = 500
    left_out: Mapping[str, int] = field(default_factory=dict)
    _commits: dict[str, Commit] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"from-git {self.repo}"

    async def candidates(self) -> Sequence[str]:
        self._commits = {commit.hash: commit for commit in await self.git.log(self.count)}
        if not self._commits:
            raise Fallen("no commits")
        tree = await self.git.tree(next(iter(self._commits)))
        files = await self.git.contents(tree)
        self.left_out = left_out(tree, files)
        if not any(map(is_test_module, files)):
            raise Fallen("no tests", "no file test_*.py or *_test.py")
        return list(self._commits)

    async def draft(self, key: str) -> Candidate:
        commit = self._commits[key]
        code, tests = _sorted_out(commit)
        tree = await self.git.tree(commit.parents[0])
        files = texts(await self.git.contents(tree))
        fixed = {change.path: text for change, text in zip(code, await self._after(code), strict=True)}
        hidden = {change.path: text for change, text in zip(tests, await self._after(tests), strict=True) if text}
        name = name_of_project(files) or self.repo
        root = import_root(files)
        change = Change(
            repo=self.repo,
            task_id=f"{self.repo}-{commit.hash[:12]}",
            files=files | egg_info(files, name, root),
            fixed=fixed,
            hidden=hidden,
            run=sorted(filter(is_test_module, hidden)),
            commit=commit.hash,
            message=commit.message,
            root=root,
        )
        return draft(change, await self.sites.of(requirements_of({**files, **hidden}, name)))

    async def _after(self, changes: Sequence[FileChange]) -> list[str | None]:
        """The texts after the commit, None for a file that it removes. Raises ``Fallen`` for what no record holds."""
        kept = [change.new for change in changes if change.modes[1] != "000000"]
        blobs = await self.git.blobs(kept)
        return [_new_text(change, blobs) for change in changes]


def _sorted_out(commit: Commit) -> tuple[list[FileChange], list[FileChange]]:
    """The changes of code and of tests. Raises ``Fallen`` where they make no task."""
    code = [change for change in commit.changes if is_code(change.path)]
    tests = [change for change in commit.changes if is_test_path(change.path)]
    if not code:
        raise Fallen("changes no code")
    if not any(is_test_module(change.path) and change.modes[1] != "000000" for change in tests):
        raise Fallen("changes no test")
    if len(code) > MOST_CHANGED:
        raise Fallen("changes too many files", str(len(code)))
    if len(commit.parents) != 1:
        raise Fallen("has no parent")
    if any(SUBMODULE in change.modes for change in commit.changes):
        raise Fallen("changes a submodule")
    return code, tests


def _new_text(change: FileChange, blobs: Mapping[str, bytes]) -> str | None:
    if change.modes[1] == "000000":
        return None
    if change.modes[1] == LINK:
        raise Fallen("changes a link", change.path)
    data = blobs[change.new]
    if is_lfs(data):
        raise Fallen("changes a file in LFS", change.path)
    text = as_text(data)
    if text is None:
        raise Fallen("changes a binary file", change.path)
    return text
