"""Git diffs: made from file contents, split by file, and cleared of what would tamper with the tests."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

TEST_INFRASTRUCTURE = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "usercustomize.py",
        "run_tests.sh",
        "r2e_tests",
    }
)
"""Names (of a file or of any folder above it) that decide how tests are found, run or reported."""

IMPORTED_BY_TESTS = (frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy", "iniconfig"}) - {"test"}
"""Modules that a new one at the top of the repository would shadow while the tests run."""


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a git diff that changes one file. ``text`` ends with a newline; ``path`` is the path afterwards."""

    path: str
    text: str

    @property
    def is_new(self) -> bool:
        return "\nnew file mode " in self.text.split("\n@@", 1)[0]

    @property
    def unusable(self) -> str:
        """Why the change cannot be carried as text, or an empty string."""
        head = self.text.split("\n@@", 1)[0]
        if "\nBinary files " in head or "\nGIT binary patch" in head:
            return "binary change"
        return "nested repository" if " 160000" in head or "mode 160000" in head else ""


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
    """The file patches of a ``git diff --no-renames``. Text before the first header is dropped."""
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
    return FilePatch(_header_path(lines[0].rstrip("\n")), "".join(lines))


def _header_path(header: str) -> str:
    """The path in ``diff --git a/X b/X``; a quoted header (control characters in the name) is returned as it is."""
    names = header.removeprefix("diff --git ")
    half = (len(names) - 1) // 2
    if names[half : half + 3] == " b/" and names.startswith("a/") and names[2:half] == names[half + 3 :]:
        return names[2:half]
    return names.partition(" b/")[2] if names.startswith("a/") else names


def patched_paths(patch: str) -> frozenset[str]:
    """The paths that a git diff changes."""
    return frozenset(part.path for part in split_patch(patch))


def screen(patch: str, *, hidden: Collection[str], allowed: Collection[str]) -> Screened:
    """Leave out the changes that could tamper with the grading.

    ``hidden`` are the hidden tests' paths, ``allowed`` the paths that the gold patch changes (these are always kept).
    """
    kept: list[str] = []
    undone: list[str] = []
    own_tests: list[str] = []
    for part in split_patch(patch):
        reason = part.unusable or ("" if part.path in allowed else _tampering(part, hidden))
        if reason:
            undone.append(f"{part.path}: {reason}, undone")
        elif part.path not in allowed and _beside(part.path, hidden):
            own_tests.append(part.path)
        else:
            kept.append(part.text)
    return Screened("".join(kept), tuple(undone), tuple(own_tests))


def _beside(path: str, hidden: Collection[str]) -> bool:
    """Whether ``path`` is a test's and lies in or below a folder (not the top one) that holds a hidden test."""
    folders = {test.rpartition("/")[0] for test in hidden} - {""}
    return is_test_path(path) and any(path.startswith(f"{folder}/") for folder in folders)


def _tampering(part: FilePatch, hidden: Collection[str]) -> str:
    path = PurePosixPath(part.path)
    if part.path.startswith('"') or any(ord(letter) < 32 for letter in part.path):
        return "unusual file name"
    if any(
        part.path == test or test.startswith(f"{part.path}/") or part.path.startswith(f"{test}/") for test in hidden
    ):
        return "hidden test"
    if TEST_INFRASTRUCTURE & set(path.parts) or path.suffix == ".pth":
        return "test infrastructure"
    top = path.parts[0]
    if part.is_new and path.parts in ((top,), (top, "__init__.py")) and top.removesuffix(".py") in IMPORTED_BY_TESTS:
        return "shadows a module that the tests import"
    return ""
