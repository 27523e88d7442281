"""Git diffs: made from file contents, split by file, and cleared of what would tamper with the tests."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

TEST_INFRASTRUCTURE = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "setup.py",
        "pyproject.toml",
        "sitecustomize.py",
        "usercustomize.py",
        "run_tests.sh",
        "r2e_tests",
        ".venv",
        "site-packages",
    }
)
"""Names (of a file or of any folder above it) that decide how tests are found, run or reported."""

_INSTALLATION = (".pth", ".egg-info", ".dist-info", ".egg-link", ".egg")
"""Endings of names that bring code into an interpreter, or plugins into pytest, without being imported."""

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")

IMPORTED_BY_TESTS = (frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy", "iniconfig"}) - {"test"}
"""Modules that a new one at the top of the repository would shadow while the tests run. Whether a folder further down
is on the import path is not known here; the run's report names what was shadowed from there (:mod:`.witness`)."""


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a git diff that changes one file. ``text`` ends with a newline; ``path`` is the path afterwards.

    ``paths`` are all the paths it names: a rename has two, and so has a header that says one thing and means another.
    ``unusable`` says why the change cannot be carried as text, or is empty.
    """

    path: str
    text: str
    paths: frozenset[str]
    unusable: str = ""

    @property
    def is_new(self) -> bool:
        return "\nnew file mode " in self.text.split("\n@@", 1)[0]


@dataclass(frozen=True, slots=True)
class Screened:
    """A patch after screening: ``text`` is what may be graded, ``undone`` says what was left out and why.

    ``own_tests`` are test files of the agent's own that were left out too: an honest thing to write, but a broken one
    would keep the hidden tests beside it from being collected.
    """

    text: str
    undone: tuple[str, ...]
    own_tests: tuple[str, ...] = ()


def is_test_path(path: str) -> bool:
    """Whether a path looks like a test's: a test folder above it, or a test's file name."""
    *folders, name = PurePosixPath(path).parts
    return (
        bool({"test", "tests"} & set(folders)) or name.startswith("test_") or name.endswith(("_test.py", "_tests.py"))
    )


def diff_files(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The git diff that takes the files ``old`` to ``new`` (path -> content; absent means no such file)."""
    return "".join(_diff_file(path, old.get(path), new.get(path)) for path in sorted(set(old) | set(new)))


def _diff_file(path: str, old: str | None, new: str | None) -> str:
    if old == new:
        return ""
    head = [f"diff --git a/{path} b/{path}\n"]
    if old is None:
        head.append("new file mode 100644\n")
    elif new is None:
        head.append("deleted file mode 100644\n")
    before = "/dev/null" if old is None else f"a/{path}"
    after = "/dev/null" if new is None else f"b/{path}"
    lines = difflib.unified_diff(_lines(old or ""), _lines(new or ""), before, after)
    body = [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(head + body)


def _lines(text: str) -> list[str]:
    # Only \n ends a line in git; str.splitlines would also break at \r, form feeds and more.
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def split_patch(patch: str) -> Iterator[FilePatch]:
    """The file patches of a git diff. Text before the first header is dropped."""
    current: list[str] = []
    for line in _lines(patch):
        if line.startswith("diff --git ") and current:
            yield _file_patch(current)
            current = []
        if current or line.startswith("diff --git "):
            current.append(line if line.endswith("\n") else f"{line}\n")
    if current:
        yield _file_patch(current)


def _file_patch(lines: list[str]) -> FilePatch:
    start = next((index for index, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    head = [line.rstrip("\n") for line in lines[:start]]
    path = _header_path(head[0])
    named = {path, *(name for line in head[1:] if (name := _named(line)))}
    if head[0].startswith("diff --git a/"):
        named.add(head[0].removeprefix("diff --git a/").partition(" b/")[0])
    return FilePatch(path, "".join(lines), frozenset(named), _unusable(head, lines[start:]))


def _unusable(head: list[str], hunks: list[str]) -> str:
    if any(line.startswith(("Binary files ", "GIT binary patch")) for line in head):
        return "binary change"
    if any(re.search(r"(mode|^index \S+) 160000$", line) for line in head):
        return "nested repository"
    # What follows a hunk's last line is read by git as a patch of its own, of whatever file it names.
    return "" if _are_hunks(hunks) else "malformed change"


def _are_hunks(lines: list[str]) -> bool:
    """Whether the lines are hunks and nothing else, each as long as its header says."""
    old = new = 0
    for line in lines:
        if old > 0 or new > 0:
            old -= line[0] in " -\n"
            new -= line[0] in " +\n"
            if line[0] not in " +-\\\n" or old < 0 or new < 0:
                return False
        elif match := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in match.groups())
        elif not line.startswith("\\ "):
            return False
    return old == new == 0


def _named(line: str) -> str:
    """The path that a line of a file patch's head names, or an empty string."""
    for start in ("--- ", "+++ ", "rename from ", "rename to ", "copy from ", "copy to "):
        if line.startswith(start):
            name = line.removeprefix(start).removesuffix("\t")
            if name == "/dev/null":
                return ""
            return name[2:] if start in ("--- ", "+++ ") and name.startswith(("a/", "b/")) else name
    return ""


def _header_path(header: str) -> str:
    """The path in ``diff --git a/X b/X``; a quoted header (control characters in the name) is returned as it is."""
    names = header.removeprefix("diff --git ")
    half = (len(names) - 1) // 2
    if names[half : half + 3] == " b/" and names.startswith("a/") and names[2:half] == names[half + 3 :]:
        return names[2:half]
    return names.partition(" b/")[2] if names.startswith("a/") else names


def patched_paths(patch: str) -> frozenset[str]:
    """The paths that a git diff changes."""
    return frozenset(path for part in split_patch(patch) for path in part.paths)


def screen(patch: str, *, hidden: Collection[str], allowed: Collection[str]) -> Screened:
    """Leave out the changes that could tamper with the grading.

    ``hidden`` are the hidden tests' paths, ``allowed`` the paths that the gold patch changes (these are always kept).
    """
    kept: list[str] = []
    undone: list[str] = []
    own_tests: list[str] = []
    for part in split_patch(patch):
        foreign = sorted(part.paths - frozenset(allowed))
        reason = part.unusable or next(filter(None, (_tampering(path, part.is_new, hidden) for path in foreign)), "")
        if reason:
            undone.append(f"{part.path}: {reason}, undone")
        elif any(_beside(path, hidden) for path in foreign):
            own_tests.append(part.path)
        else:
            kept.append(part.text)
    return Screened("".join(kept), tuple(undone), tuple(own_tests))


def _beside(path: str, hidden: Collection[str]) -> bool:
    """Whether ``path`` is a test's and lies in or below a folder (not the top one) that holds a hidden test."""
    folders = {test.rpartition("/")[0] for test in hidden} - {""}
    return is_test_path(path) and any(path.startswith(f"{folder}/") for folder in folders)


def _tampering(name: str, is_new: bool, hidden: Collection[str]) -> str:
    path = PurePosixPath(name)
    if name.startswith('"') or any(ord(letter) < 32 for letter in name):
        return "unusual file name"
    if any(name == test or test.startswith(f"{name}/") or name.startswith(f"{test}/") for test in hidden):
        return "hidden test"
    if TEST_INFRASTRUCTURE & set(path.parts) or any(part.endswith(_INSTALLATION) for part in path.parts):
        return "test infrastructure"
    top = path.parts[0]
    if is_new and path.parts in ((top,), (top, "__init__.py")) and top.removesuffix(".py") in IMPORTED_BY_TESTS:
        return "shadows a module that the tests import"
    return ""
