"""Makes git diffs from file contents, splits them by file, and screens them for changes that tamper with the tests."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import PurePosixPath

from envs.swe.diff.line_diff import hunks

TEST_INFRASTRUCTURE = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "run_tests.sh"),
        *("setup.cfg", "setup.py", "pyproject.toml", "sitecustomize.py", "usercustomize.py"),
        *("r2e_tests", ".venv", "site-packages"),
    }
)
"""Names of files and directories that control how tests are collected, run or reported."""

_INSTALLATION_SUFFIXES = (".pth", ".egg-info", ".dist-info", ".egg-link", ".egg")
"""Suffixes of files that load code into Python or plugins into pytest without an import."""

MAX_FILES = 5000
"""Largest number of file patches in a patch; a larger patch is rejected as a whole."""

_MAX_PATH = 4096
_MAX_QUOTED = 4 * _MAX_PATH + 8
_HEADER = "diff --git "
_MODE = r"(?:100644|100755|120000)"
# All lines that git writes between a file patch's header and its hunks. [0-9], because \d matches Unicode digits.
_HEAD = re.compile(
    rf"(?P<mode>(?P<new>new file mode {_MODE}\n)|(?P<deleted>deleted file mode {_MODE}\n)"
    rf"|old mode {_MODE}\nnew mode {_MODE}\n)?"
    rf"(?:index [0-9a-f]{{3,64}}\.\.[0-9a-f]{{3,64}}(?: {_MODE})?\n)?"
    r"(?:--- (?P<before>[^\n]+)\n\+\+\+ (?P<after>[^\n]+)\n)?"
)
_OPPOSITE = {"": "", "new": "deleted", "deleted": "new"}
_SIGNS = {"+": "-", "-": "+"}
_HUNK_RANGES = re.compile(r"@@ -(\S+) \+(\S+) @@")
_HUNK = re.compile(r"@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@")
_QUOTED = r'"(?:[^"\\\x00-\x1f\x7f-\U0010ffff]|\\(?:[abtnvfr"\\]|[0-3][0-7]{2}))*"'
_QUOTED_HEADER = re.compile(rf"({_QUOTED}) ({_QUOTED})")
_NOT_TEXT = ("binary change", "nested repository")
_TWO_NAMES = ("rename from ", "rename to ", "rename old ", "rename new ", "copy from ", "copy to ")

IMPORTED_BY_TESTS = (frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy", "iniconfig"}) - {"test"}
"""Modules that a new file in the repository's top directory would shadow while the tests run."""


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a git diff that changes one file. ``path`` is the new path; ``text`` ends with a newline.

    ``paths`` are all paths that it names: two for a rename or an inconsistent header. ``rebuilt`` is the change written
    again from its parsed form. If parsing does not cover all of it, ``unusable`` has the reason, ``rebuilt`` is empty.
    """

    path: str
    text: str
    paths: frozenset[str]
    rebuilt: str = ""
    is_new: bool = False
    unusable: str = ""


@dataclass(frozen=True, slots=True)
class ScreenedPatch:
    """A patch after screening: ``text`` is the part to grade, which changes ``paths``; ``rejected`` has one line
    per omitted file, except for the agent's tests: writing them is honest, but they can break the hidden tests.
    """

    text: str
    rejected: tuple[str, ...]
    paths: frozenset[str] = frozenset()


def is_test_path(path: str) -> bool:
    """Whether a path looks like a test file: it is below a test directory or has a test's file name."""
    *directories, name = PurePosixPath(path).parts
    return (
        bool({"test", "tests"} & set(directories))
        or name.startswith("test_")
        or name.endswith(("_test.py", "_tests.py"))
    )


def diff_files(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The git diff from the files ``old`` to ``new`` (path -> content)."""
    return "".join(diff_file(path, old.get(path), new.get(path)) for path in sorted(set(old) | set(new)))


def diff_file(path: str, old: str | None, new: str | None, modes: tuple[str, str] = ("100644", "100644")) -> str:
    """The git diff of one file. None is an absent file; ``modes`` are the old and the new mode."""
    before, after = modes
    if old == new and before == after:
        return ""
    head = ""
    if old is None:
        head = f"new file mode {after}\n"
    elif new is None:
        head = f"deleted file mode {before}\n"
    elif before != after:
        head = f"old mode {before}\nnew mode {after}\n"
    body = hunks(_lines(old or ""), _lines(new or ""))
    if not all(text.endswith("\n") for text in (old, new) if text):
        body = [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in body]
    return "".join([_head(path, head, bool(body)), *body])


def _lines(text: str) -> list[str]:
    # Only \n ends a line in git; str.splitlines also splits at \r, form feeds and others.
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def reversed_patch(patch: str) -> str:
    """The inverse git diff of ``patch``. Raises ``ValueError`` if a part of it cannot be parsed."""
    parts = list(islice(split_patch(patch), MAX_FILES + 1))
    if not parts or len(parts) > MAX_FILES:
        raise ValueError(f"patch: {len(parts)} file patches; right would be a git diff of 1 to {MAX_FILES} files")
    if unparsed := next((part for part in parts if not part.rebuilt), None):
        raise ValueError(
            f"patch: {unparsed.path}: {unparsed.unusable}; right would be changes to text, as git diff shows them"
        )
    return "".join(_reversed(part) for part in parts)


def _reversed(part: FilePatch) -> str:
    lines = _lines(part.rebuilt)
    start = next((index for index, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    head = _HEAD.fullmatch("".join(lines[1:start]))
    assert head is not None, "a rebuilt patch has a valid head"
    mode = _reversed_mode(head["mode"] or "")
    return "".join([_head(part.path, mode, start < len(lines)), *_reversed_hunks("".join(lines[start:]))])


def _reversed_mode(mode: str) -> str:
    """The inverse of a head's mode lines: a new file is deleted, and the old and new mode are swapped."""
    if mode.startswith("old"):
        old, new = (line.split()[-1] for line in mode.splitlines())
        return f"old mode {new}\nnew mode {old}\n"
    kind, space, rest = mode.partition(" ")
    return f"{_OPPOSITE[kind]}{space}{rest}"


def _reversed_hunks(lines: str) -> Iterator[str]:
    """The inverse hunks. Each run of changed lines has its removed lines before its added lines."""
    with_marks = re.split(r"(?<=\n)(?!\\)", lines)  # a line with its mark of a missing newline, which begins with "\"
    for is_change, run in groupby(with_marks, key=lambda line: line[:1] in _SIGNS):
        if is_change:
            yield from sorted((f"{_SIGNS[line[0]]}{line[1:]}" for line in run), key=itemgetter(0), reverse=True)
        else:
            yield from (_HUNK_RANGES.sub(r"@@ -\2 +\1 @@", line) if line.startswith("@@ ") else line for line in run)


def split_patch(patch: str) -> Iterator[FilePatch]:
    """The file patches of a git diff. Text before the first header is ignored."""
    _, *parts = f"\n{patch}".split(f"\n{_HEADER}")
    for number, part in enumerate(parts, 1):
        has_newline = number == len(parts) and part.endswith("\n")  # the split removed it from all other parts
        yield _parse_file_patch(_lines(f"{_HEADER}{part}" if has_newline else f"{_HEADER}{part}\n"))


def _parse_file_patch(lines: list[str]) -> FilePatch:
    start = next((index for index, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    head = "".join(lines[1:start])
    before, path = _header_paths(lines[0].removeprefix("diff --git ").removesuffix("\n"))
    names = frozenset({before, path, *(name for line in lines[1:start] if (name := _path_in_head_line(line)))})
    match, hunks = _HEAD.fullmatch(head), _rebuild_hunks(lines[start:])
    if reason := _unusable_reason(head, names):
        return FilePatch(path, "".join(lines), names, unusable=reason)
    # git reads lines after the last hunk as a further patch of any file that they name.
    if match is None or hunks is None or not _names_are_consistent(match, path, bool(hunks)):
        return FilePatch(path, "".join(lines), names, unusable="malformed change")
    rebuilt = "".join([_head(path, match["mode"] or "", bool(hunks)), *hunks])
    return FilePatch(path, "".join(lines), names, rebuilt, is_new=match["new"] is not None)


def _unusable_reason(head: str, names: Collection[str]) -> str:
    """The reason in its head why a file patch cannot be used, or an empty string."""
    lines = head.split("\n")
    if any(line.startswith(("Binary files ", "GIT binary patch")) for line in lines):
        return "binary change"
    if any(line.endswith(" 160000") and line.startswith(("new", "old", "deleted", "index")) for line in lines):
        return "nested repository"
    if len(names) > 1 or any(line.startswith(_TWO_NAMES) for line in lines):
        return "more than one name"
    return ""


def _names_are_consistent(head: re.Match[str], path: str, has_hunks: bool) -> bool:
    """Whether the ``---`` and ``+++`` lines match the header, or are absent in a patch without hunks."""
    if not has_hunks:
        return head["before"] is None
    return (_unquoted(head["before"] or ""), _unquoted(head["after"] or "")) == _sides(path, head["mode"] or "")


def _head(path: str, mode: str, has_hunks: bool) -> str:
    """The lines of a file patch before its hunks. ``mode`` are its mode lines."""
    header = f"diff --git a/{path} b/{path}\n{mode}"
    if not has_hunks:
        return header
    before, after = _sides(path, mode)
    return f"{header}--- {before}\n+++ {after}\n"


def _sides(path: str, mode: str) -> tuple[str, str]:
    """The names in the ``---`` and ``+++`` lines."""
    before = "/dev/null" if mode.startswith("new") else f"a/{path}"
    return before, "/dev/null" if mode.startswith("deleted") else f"b/{path}"


def _rebuild_hunks(lines: list[str]) -> list[str] | None:
    """The normalized hunk lines, or None if a line is outside of a hunk or a hunk's length differs from its header."""
    rebuilt: list[str] = []
    old = new = 0
    for line in lines:
        mark = line[0]
        if mark == "\\" and rebuilt and not rebuilt[-1].startswith("@@"):
            line = "\\ No newline at end of file\n"
        elif old > 0 or new > 0:
            if mark == "\n":
                mark, line = " ", " \n"
            if mark == "-":
                old -= 1
            elif mark == "+":
                new -= 1
            elif mark == " ":
                old, new = old - 1, new - 1
            else:
                return None
            if old < 0 or new < 0:
                return None
        elif match := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in match.groups())
            line = f"{match.group()}\n"
        else:
            return None
        rebuilt.append(line)
    return rebuilt if old == new == 0 else None


def _path_in_head_line(line: str) -> str:
    """The path in a line of a file patch's head, or an empty string."""
    for prefix in ("--- ", "+++ ", *_TWO_NAMES):
        if line.startswith(prefix):
            name = _unquoted(line.removeprefix(prefix).removesuffix("\n"))
            if name == "/dev/null":
                return ""
            return name[2:] if prefix in ("--- ", "+++ ") and name.startswith(("a/", "b/")) else name
    return ""


def _unquoted(name: str) -> str:
    """A name in git's notation without its trailing tab and its quotes."""
    name = name.removesuffix("\t")
    if len(name) > _MAX_QUOTED or not re.fullmatch(_QUOTED, name):
        return name
    content: bytes = ast.literal_eval(f"b{name}")
    return content.decode(errors="surrogateescape")


def _header_paths(names: str) -> tuple[str, str]:
    """The old and new path in ``a/X b/Y``. Any other unquoted text is returned twice, unchanged."""
    if len(names) < 2 * _MAX_QUOTED and (quoted := _QUOTED_HEADER.fullmatch(names)):
        before, after = (_unquoted(name) for name in quoted.groups())
        return before.removeprefix("a/"), after.removeprefix("b/")
    half = (len(names) - 1) // 2
    if names[half : half + 3] == " b/" and names.startswith("a/") and names[2:half] == names[half + 3 :]:
        return names[2:half], names[2:half]
    before, separator, after = names.partition(" b/")
    return (before[2:], after) if names.startswith("a/") and separator else (names, names)


def patched_paths(patch: str) -> frozenset[str]:
    """The paths that a git diff changes."""
    return frozenset(path for part in split_patch(patch) for path in part.paths)


def screen(patch: Iterable[FilePatch], *, hidden: Collection[str], gold: str = "") -> ScreenedPatch:
    """Leave out the changes that could tamper with the grading, and rebuild the others.

    ``hidden`` are the hidden tests' paths. Changes to the paths that ``gold`` changes are allowed. File patches of
    ``gold`` itself are kept unchanged, including renames.
    """
    parts = list(islice(patch, MAX_FILES + 1))
    if len(parts) > MAX_FILES:
        return ScreenedPatch("", (f"the patch changes more than {MAX_FILES} files, undone",))
    tests = _HiddenTests.from_paths(hidden)
    gold_parts = {part.text: part for part in split_patch(gold)}
    allowed = frozenset(path for part in gold_parts.values() for path in part.paths)
    accepted: list[str] = []
    changed: set[str] = set()
    rejected: list[str] = []
    for part in parts:
        paths = sorted(part.paths - allowed)
        reason = "" if part.text in gold_parts and part.unusable not in _NOT_TEXT else part.unusable
        reason = reason or next(filter(None, (_tampering_reason(path, part.is_new, tests) for path in paths)), "")
        if reason:
            rejected.append(f"{part.path}: {reason}, undone")
        elif not any(map(is_test_path, paths)):
            accepted.append(part.text if part.text in gold_parts else part.rebuilt)
            changed |= part.paths
    return ScreenedPatch("".join(accepted), tuple(rejected), frozenset(changed))


@dataclass(frozen=True, slots=True)
class _HiddenTests:
    """The hidden tests' paths and those above them (``paths``), and the starts of the paths below them (``below``)."""

    paths: Collection[str]
    below: tuple[str, ...]

    @classmethod
    def from_paths(cls, hidden: Collection[str]) -> _HiddenTests:
        paths = [PurePosixPath(path) for path in hidden]
        above = {str(directory) for path in paths for directory in path.parents} - {"."}
        return cls(above | set(map(str, paths)), tuple(f"{path}/" for path in paths))

    def overlaps(self, path: str) -> bool:
        """Whether ``path`` is a hidden test, or a directory above or a path below one."""
        return path in self.paths or path.startswith(self.below)


def _tampering_reason(name: str, is_new: bool, tests: _HiddenTests) -> str:
    if is_unsafe_path(name):
        return "unusual file name"
    if tests.overlaps(name):
        return "hidden test"
    parts = name.split("/")
    if not TEST_INFRASTRUCTURE.isdisjoint(parts) or any(part.endswith(_INSTALLATION_SUFFIXES) for part in parts):
        return "test infrastructure"
    if is_new and parts in ([parts[0]], [parts[0], "__init__.py"]):
        return "shadows a module that the tests import" if parts[0].removesuffix(".py") in IMPORTED_BY_TESTS else ""
    return ""


def is_unsafe_path(name: str) -> bool:
    """Whether git would quote a name, or it is not a normalized path below the working directory."""
    if len(name) > _MAX_PATH or not name.isprintable() or any(mark in name for mark in '"\\'):
        return True
    return any(part in ("", ".", "..", ".git") for part in name.split("/"))
