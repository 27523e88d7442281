"""Git diffs: made from file contents, split by file, and cleared of what would tamper with the tests."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath

from envs.swe.diff.line_diff import hunks

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
"""Names (of a file or of any directory above it) that decide how tests are found, run or reported."""

_INSTALLATION = (".pth", ".egg-info", ".dist-info", ".egg-link", ".egg")
"""Endings of names that bring code into an interpreter, or plugins into pytest, without being imported."""

MAX_FILES = 5000
"""File patches that one patch may have; one with more is undone as a whole."""

_MAX_PATH = 4096
_MAX_QUOTED = 4 * _MAX_PATH + 8
_HEADER = "diff --git "
_MODE = r"(?:100644|100755|120000)"
# Everything that git writes between a file patch's header and its hunks; [0-9], as \d takes the digits of any script.
_HEAD = re.compile(
    rf"(?P<mode>(?P<new>new file mode {_MODE}\n)|(?P<gone>deleted file mode {_MODE}\n)"
    rf"|old mode {_MODE}\nnew mode {_MODE}\n)?"
    rf"(?:index [0-9a-f]{{3,64}}\.\.[0-9a-f]{{3,64}}(?: {_MODE})?\n)?"
    r"(?:--- (?P<before>[^\n]+)\n\+\+\+ (?P<after>[^\n]+)\n)?"
)
_OPPOSITE = {"": "", "new": "deleted", "deleted": "new"}
_HUNK_RANGES = re.compile(r"@@ -(\S+) \+(\S+) @@")
_HUNK = re.compile(r"@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@")
_QUOTED = r'"(?:[^"\\\x00-\x1f\x7f-\U0010ffff]|\\(?:[abtnvfr"\\]|[0-3][0-7]{2}))*"'
_QUOTED_HEADER = re.compile(rf"({_QUOTED}) ({_QUOTED})")
_TWO_NAMES = ("rename from ", "rename to ", "rename old ", "rename new ", "copy from ", "copy to ")

IMPORTED_BY_TESTS = (frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy", "iniconfig"}) - {"test"}
"""Modules that a new one at the top of the repository would shadow while the tests run. Whether a directory further
down is on the import path is not known here; the run's report names what was shadowed from there (:mod:`.witness`)."""


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a git diff that changes one file. ``path`` is the path afterwards, ``text`` ends with a newline.

    ``paths`` are all the paths it names: a rename has two, and so has a header that says one thing and means another.
    ``rebuilt`` is the change written anew from what was understood of it. Where that is not the whole, ``unusable``
    says why and ``rebuilt`` is empty.
    """

    path: str
    text: str
    paths: frozenset[str]
    rebuilt: str = ""
    is_new: bool = False
    unusable: str = ""


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
    """Whether a path looks like a test's: a test directory above it, or a test's file name."""
    *directories, name = PurePosixPath(path).parts
    return (
        bool({"test", "tests"} & set(directories))
        or name.startswith("test_")
        or name.endswith(("_test.py", "_tests.py"))
    )


def diff_files(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The git diff that takes the files ``old`` to ``new`` (path -> content; absent means no such file)."""
    return "".join(diff_file(path, old.get(path), new.get(path)) for path in sorted(set(old) | set(new)))


def diff_file(path: str, old: str | None, new: str | None, modes: tuple[str, str] = ("100644", "100644")) -> str:
    """The git diff of one file, with its ``modes`` before and afterwards."""
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
    # Only \n ends a line in git; str.splitlines would also break at \r, form feeds and more.
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def reversed_patch(patch: str) -> str:
    """The git diff that takes back what ``patch`` does. Raises ``ValueError`` where that is not understood whole."""
    parts = list(islice(split_patch(patch), MAX_FILES + 1))
    if not parts or len(parts) > MAX_FILES:
        raise ValueError(f"patch: {len(parts)} file patches; right would be a git diff of 1 to {MAX_FILES} files")
    if odd := next((part for part in parts if not part.rebuilt), None):
        raise ValueError(f"patch: {odd.path}: {odd.unusable}; right would be changes to text, as git diff shows them")
    return "".join(_reversed(part) for part in parts)


def _reversed(part: FilePatch) -> str:
    lines = _lines(part.rebuilt)
    start = next((index for index, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    head = _HEAD.fullmatch("".join(lines[1:start]))
    assert head is not None, "what was rebuilt is understood"
    return "".join([_head(part.path, _reversed_mode(head["mode"] or ""), start < len(lines)), *_back(lines[start:])])


def _reversed_mode(mode: str) -> str:
    """A head's lines on modes, taken back: a new file is deleted, and the old mode is the new one."""
    if mode.startswith("old"):
        old, new = (line.split()[-1] for line in mode.splitlines())
        return f"old mode {new}\nnew mode {old}\n"
    kind, space, rest = mode.partition(" ")
    return f"{_OPPOSITE[kind]}{space}{rest}"


def _back(lines: Iterable[str]) -> Iterator[str]:
    """Hunks taken back: within each run of changed lines those that come back stand before those that go."""
    gone: list[str] = []
    new: list[str] = []
    into = gone
    for line in lines:
        if line[0] in "+-":
            into = gone if line[0] == "+" else new
            into.append(f"{'-' if line[0] == '+' else '+'}{line[1:]}")
        elif line[0] == "\\" and (gone or new):
            into.append(line)
        else:
            yield from (*gone, *new)
            gone, new = [], []
            yield _HUNK_RANGES.sub(r"@@ -\2 +\1 @@", line) if line.startswith("@@ ") else line
    yield from (*gone, *new)


def split_patch(patch: str) -> Iterator[FilePatch]:
    """The file patches of a git diff. Text before the first header is dropped."""
    _, *parts = f"\n{patch}".split(f"\n{_HEADER}")
    for number, part in enumerate(parts, 1):
        ended = number == len(parts) and part.endswith("\n")  # each other part's last line end was split off
        yield _file_patch(_lines(f"{_HEADER}{part}" if ended else f"{_HEADER}{part}\n"))


def _file_patch(lines: list[str]) -> FilePatch:
    start = next((index for index, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    head = "".join(lines[1:start])
    before, path = _header_paths(lines[0].removeprefix("diff --git ").removesuffix("\n"))
    named = frozenset({before, path, *(name for line in lines[1:start] if (name := _named(line)))})
    known, hunks = _HEAD.fullmatch(head), _hunks(lines[start:])
    if reason := _unusable(head, named):
        return FilePatch(path, "".join(lines), named, unusable=reason)
    # What follows a hunk's last line is read by git as a patch of its own, of whatever file it names.
    if known is None or hunks is None or not _names_fit(known, path, bool(hunks)):
        return FilePatch(path, "".join(lines), named, unusable="malformed change")
    rebuilt = "".join([_head(path, known["mode"] or "", bool(hunks)), *hunks])
    return FilePatch(path, "".join(lines), named, rebuilt, is_new=known["new"] is not None)


def _unusable(head: str, named: Collection[str]) -> str:
    """Why a file patch cannot be carried, as far as its head's lines say, or an empty string."""
    lines = head.split("\n")
    if any(line.startswith(("Binary files ", "GIT binary patch")) for line in lines):
        return "binary change"
    if any(line.endswith(" 160000") and line.startswith(("new", "old", "deleted", "index")) for line in lines):
        return "nested repository"
    if len(named) > 1 or any(line.startswith(_TWO_NAMES) for line in lines):
        return "more than one name"
    return ""


def _names_fit(head: re.Match[str], path: str, has_hunks: bool) -> bool:
    """Whether the names before and after are the header's, or none where there is no file; there with hunks alone."""
    if not has_hunks:
        return head["before"] is None
    before = "/dev/null" if head["new"] else f"a/{path}"
    after = "/dev/null" if head["gone"] else f"b/{path}"
    return (_unquoted(head["before"] or ""), _unquoted(head["after"] or "")) == (before, after)


def _head(path: str, mode: str, has_hunks: bool) -> str:
    """The head of a file patch, from the header on. ``mode`` are its lines on modes."""
    header = f"diff --git a/{path} b/{path}\n{mode}"
    if not has_hunks:
        return header
    before = "/dev/null" if mode.startswith("new file") else f"a/{path}"
    after = "/dev/null" if mode.startswith("deleted") else f"b/{path}"
    return f"{header}--- {before}\n+++ {after}\n"


def _hunks(lines: list[str]) -> list[str] | None:
    """The lines as hunks written anew, or None where they are not hunks alone, each as long as its header says."""
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


def _named(line: str) -> str:
    """The path that a line of a file patch's head names, or an empty string."""
    for start in ("--- ", "+++ ", *_TWO_NAMES):
        if line.startswith(start):
            name = _unquoted(line.removeprefix(start).removesuffix("\n"))
            if name == "/dev/null":
                return ""
            return name[2:] if start in ("--- ", "+++ ") and name.startswith(("a/", "b/")) else name
    return ""


def _unquoted(name: str) -> str:
    """A name as git writes it, without the tab at its end and without its quotes."""
    name = name.removesuffix("\t")
    if len(name) > _MAX_QUOTED or not re.fullmatch(_QUOTED, name):
        return name
    content: bytes = ast.literal_eval(f"b{name}")
    return content.decode(errors="surrogateescape")


def _header_paths(names: str) -> tuple[str, str]:
    """The paths before and after in ``a/X b/Y``. What is neither that nor quoted is returned as it is, twice."""
    if len(names) < 2 * _MAX_QUOTED and (quoted := _QUOTED_HEADER.fullmatch(names)):
        before, after = (_unquoted(name) for name in quoted.groups())
        return before.removeprefix("a/"), after.removeprefix("b/")
    half = (len(names) - 1) // 2
    if names[half : half + 3] == " b/" and names.startswith("a/") and names[2:half] == names[half + 3 :]:
        return names[2:half], names[2:half]
    before, between, after = names.partition(" b/")
    return (before[2:], after) if names.startswith("a/") and between else (names, names)


def patched_paths(patch: str) -> frozenset[str]:
    """The paths that a git diff changes."""
    return frozenset(path for part in split_patch(patch) for path in part.paths)


def screen(patch: Iterable[FilePatch], *, hidden: Collection[str], gold: str = "") -> Screened:
    """Leave out the changes that could tamper with the grading, and write the others anew.

    ``hidden`` are the hidden tests' paths. The paths that ``gold`` changes may be changed, and its own file patches
    are kept as they stand, renames too.
    """
    parts = list(islice(patch, MAX_FILES + 1))
    if len(parts) > MAX_FILES:
        return Screened("", (f"the patch changes more than {MAX_FILES} files, undone",))
    tests = _Tests.of(hidden)
    golden = {part.text: part for part in split_patch(gold)}
    allowed = frozenset(path for part in golden.values() for path in part.paths)
    kept: list[str] = []
    undone: list[str] = []
    own_tests: list[str] = []
    for part in parts:
        foreign = sorted(part.paths - allowed)
        reason = "" if part.text in golden and not _is_no_text(part) else part.unusable
        reason = reason or next(filter(None, (_tampering(path, part.is_new, tests) for path in foreign)), "")
        if reason:
            undone.append(f"{part.path}: {reason}, undone")
        elif any(tests.beside(path) for path in foreign):
            own_tests.append(part.path)
        else:
            kept.append(part.text if part.text in golden else part.rebuilt)
    return Screened("".join(kept), tuple(undone), tuple(own_tests))


def _is_no_text(part: FilePatch) -> bool:
    return part.unusable in ("binary change", "nested repository")


@dataclass(frozen=True, slots=True)
class _Tests:
    """The hidden tests' paths, so that a path is compared with all of them at once."""

    paths: frozenset[str]
    above: frozenset[str]
    """Every directory above a hidden test, the top one left out."""
    directories: frozenset[str]
    """The directories that hold one, the top one left out."""
    depths: frozenset[int]
    """How many parts the paths and directories have."""

    @classmethod
    def of(cls, hidden: Collection[str]) -> _Tests:
        paths = [PurePosixPath(path) for path in hidden]
        directories = {path.parent for path in paths if path.parent.parts}
        return cls(
            paths=frozenset(map(str, paths)),
            above=frozenset(str(directory) for path in paths for directory in path.parents if directory.parts),
            directories=frozenset(map(str, directories)),
            depths=frozenset(len(path.parts) for path in (*paths, *directories)),
        )

    def touched_by(self, path: str) -> bool:
        """Whether ``path`` is a hidden test, above one or below one."""
        return path in self.paths or path in self.above or self._is_below(path, self.paths)

    def beside(self, path: str) -> bool:
        """Whether ``path`` is a test's and lies in or below a directory that holds a hidden test."""
        return is_test_path(path) and self._is_below(path, self.directories)

    def _is_below(self, path: str, places: Collection[str]) -> bool:
        parts = path.split("/")
        return any("/".join(parts[:depth]) in places for depth in self.depths if depth < len(parts))


def _tampering(name: str, is_new: bool, tests: _Tests) -> str:
    if is_unusual(name):
        return "unusual file name"
    if tests.touched_by(name):
        return "hidden test"
    parts = name.split("/")
    if not TEST_INFRASTRUCTURE.isdisjoint(parts) or any(part.endswith(_INSTALLATION) for part in parts):
        return "test infrastructure"
    if is_new and parts in ([parts[0]], [parts[0], "__init__.py"]):
        return "shadows a module that the tests import" if parts[0].removesuffix(".py") in IMPORTED_BY_TESTS else ""
    return ""


def is_unusual(name: str) -> bool:
    """Whether a name is one that git would quote, or no plain path below the working directory."""
    if len(name) > _MAX_PATH or not name.isprintable() or any(mark in name for mark in '"\\'):
        return True
    return any(part in ("", ".", "..", ".git") for part in name.split("/"))
