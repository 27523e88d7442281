"""Candidates from the commits of a repository that change code and its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envs.swe.diff.git_diff import is_test_path
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected, CodeChange, make_candidate
from envs.swe.task_synthesis.checkout import count_omitted
from envs.swe.task_synthesis.files import (
    is_code,
    is_lfs_pointer,
    is_test_module,
    record_text,
    text_files,
    with_egg_info,
)
from envs.swe.task_synthesis.git import LINK, SUBMODULE, Commit, FileChange, Git
from envs.swe.task_synthesis.requirements import project_name, requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages

MAX_CHANGED_FILES = 30
"""Largest number of code files that a commit may change; an issue cannot describe more."""
_ABSENT = "000000"
"""git's mode of a file that does not exist."""


@dataclass
class CommitSource:
    """The newest ``count`` commits of the repository ``repo``."""

    git: Git
    site_packages: SitePackages
    repo: str
    count: int = 500
    omitted: Mapping[str, int] = field(default_factory=dict)
    _commits: dict[str, Commit] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"from-git {self.repo}"

    async def candidate_keys(self) -> Sequence[str]:
        self._commits = {commit.hash: commit for commit in await self.git.log(self.count)}
        if not self._commits:
            raise CandidateRejected("no commits")
        tree = await self.git.tree(next(iter(self._commits)))
        files = await self.git.contents(tree)
        self.omitted = count_omitted(tree, files)
        if not any(map(is_test_module, files)):
            raise CandidateRejected("no tests", "no file test_*.py or *_test.py")
        return list(self._commits)

    async def candidate(self, key: str) -> Candidate:
        commit = self._commits[key]
        code, tests = _code_and_tests(commit)
        tree = await self.git.tree(commit.parents[0])
        files = text_files(await self.git.contents(tree))
        fixed = {change.path: text for change, text in zip(code, await self._texts_after(code), strict=True)}
        hidden = {change.path: text for change, text in zip(tests, await self._texts_after(tests), strict=True) if text}
        name = project_name(files) or self.repo
        change = CodeChange(
            repo=self.repo,
            task_id=f"{self.repo}-{commit.hash[:12]}",
            files=with_egg_info(files, name),
            fixed=fixed,
            hidden=hidden,
            commit=commit.hash,
            message=commit.message,
        )
        return make_candidate(change, await self.site_packages.install(requirements_of({**files, **hidden}, name)))

    async def _texts_after(self, changes: Sequence[FileChange]) -> list[str | None]:
        """The texts after the commit, None for a removed file. Raises ``CandidateRejected`` if one is not text."""
        blobs = await self.git.blobs([change.new for change in changes if change.modes[1] != _ABSENT])
        return [None if change.modes[1] == _ABSENT else _new_text(change, blobs) for change in changes]


def _code_and_tests(commit: Commit) -> tuple[list[FileChange], list[FileChange]]:
    """The changes of code and of tests. Raises ``CandidateRejected`` if the commit cannot become a task."""
    code = [change for change in commit.changes if is_code(change.path)]
    tests = [change for change in commit.changes if is_test_path(change.path)]
    if not code:
        raise CandidateRejected("changes no code")
    if not any(is_test_module(change.path) and change.modes[1] != _ABSENT for change in tests):
        raise CandidateRejected("changes no test")
    if len(code) > MAX_CHANGED_FILES:
        raise CandidateRejected("changes too many files", str(len(code)))
    if len(commit.parents) != 1:
        raise CandidateRejected("has no parent")
    if any(SUBMODULE in change.modes for change in commit.changes):
        raise CandidateRejected("changes a submodule")
    return code, tests


def _new_text(change: FileChange, blobs: Mapping[str, bytes]) -> str:
    if change.modes[1] == LINK:
        raise CandidateRejected("changes a link", change.path)
    data = blobs[change.new]
    if is_lfs_pointer(data):
        raise CandidateRejected("changes a file in LFS", change.path)
    text = record_text(data)
    if text is None:
        raise CandidateRejected("changes a binary file", change.path)
    return text
