"""Honest changes: none is listed as a hack, and each patch is the change that real git sees in the same directory."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from envs.swe import SweRecord, read_jsonl
from envs.swe.diff.agent_patch import changed_paths, file_patches
from envs.swe.diff.git_diff import FilePatch, screen
from envs.swe.diff.snapshot import LIST_COMMAND, LISTING_PATH, SKIPPED_NAMES, BaseSnapshot
from envs.swe.repositories import _COMMIT
from envs.swe.sandboxes import _GIT_ENV
from sandbox import TreeFile, TreeLimits, blob_name
from sandbox.files import TreeCollector
from sandbox.nofollow_io import gather_tree_nofollow

BUILT = Path(__file__).parents[2] / ".cache/tasks/real.jsonl"
FEW, MANY = 50, 200
LINES = [f"line_{number} = {number}\n" for number in range(60)]
FILES = {
    "calc.py": "".join(LINES),
    "README.md": "calc\nno newline at the end",
    "pkg/__init__.py": "",
    "pkg/core.py": "".join(LINES[:30]) + "\n\n" + "same\n" * 20 + "".join(LINES[30:]),
    "pkg/deep/er/still/module.py": "x = 1\n",
    "pkg/crlf.txt": "one\r\ntwo\r\nthree\r\n",
    "pkg/mixed.txt": "one\r\ntwo\nthree\r",
    "docs/añb c.md": "é\n",
    "visible/calc_case.py": "def test_a(): pass\n",
    "bin/run": "#!/bin/sh\n",
    ".gitignore": "*.log\n/build/\n!keep.log\nout/*\n!out/kept/\n",
    "pkg/.gitignore": "*.tmp\n!*.log\n",
    ".gitattributes": "*.txt text=auto\n*.md text eol=crlf\n*.py -diff\n",
    "build/made.py": "made = 1\n",
    "empty": "",
}
IGNORED = (
    "x.log",
    "pkg/x.log",
    "keep.log",
    "build/new.py",
    "pkg/a.tmp",
    "out/a",
    "out/kept/a",
    "a/build/x",
    "e.egg-info/x",
)

Change = Callable[[Path, random.Random], None]


def some(root: Path, random: random.Random) -> Path:
    """One of the repository's text files, without those of rules: the base's hold here, git would take the new ones."""
    return random.choice(sorted(path for path in root.rglob("*") if is_text(root, path)))


def is_text(root: Path, path: Path) -> bool:
    inside = path.relative_to(root)
    if not path.is_file() or path.is_symlink() or inside.parts[0] in (".git", "build"):
        return False
    return path.name not in (".gitignore", "data.bin", "data")


def edit(root: Path, random: random.Random) -> None:
    path = some(root, random)
    lines = path.read_bytes().splitlines(keepends=True)
    for _ in range(random.randint(1, 5)):
        at = random.randint(0, len(lines))
        lines[at : at + random.randint(0, 3)] = random.choices(
            [b"new\n", b"\tx = 1\n", b"\n", b"same\n"], k=random.randint(0, 3)
        )
    path.write_bytes(b"".join(lines))


def add(root: Path, random: random.Random) -> None:
    name = random.choice(
        ["new.py", "ünï.txt", "with space.md", "a/b/c/d/e/f/g/h.py", "new_pkg/__init__.py", "visible/data.csv"]
    )
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(random.choice(["", "one line", "a\nb\n", "\r\n", "é\n", "\f\n\x85 \n"]), newline="")


def remove(root: Path, random: random.Random) -> None:
    some(root, random).unlink()


def rename(root: Path, random: random.Random) -> None:
    path = some(root, random)
    target = root / "moved" / path.name
    target.parent.mkdir(exist_ok=True)
    path.rename(target)


def chmod(root: Path, random: random.Random) -> None:
    path = some(root, random)
    path.chmod(0o644 if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else 0o755)


def line_ends(root: Path, random: random.Random) -> None:
    path = some(root, random)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\r\n", b"\n") if b"\r\n" in data else data.replace(b"\n", b"\r\n"))


def last_newline(root: Path, random: random.Random) -> None:
    path = some(root, random)
    data = path.read_bytes()
    path.write_bytes(data[:-1] if data.endswith(b"\n") else data + b"\n")


def link(root: Path, random: random.Random) -> None:
    path = random.choice([root / "link", root / "to_core"])
    path.unlink(missing_ok=True)
    path.symlink_to(random.choice(["calc.py", "pkg/core.py", "nowhere"]))


def kind(root: Path, random: random.Random) -> None:
    """A directory in the place of a file, a file in the place of a directory, or a link in the place of a file."""
    path = random.choice([root / "empty", root / "pkg/deep", root / "README.md"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        path.write_text("a file now\n")
    elif random.random() < 0.5:
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "inner.txt").write_text("x\n")
    else:
        path.unlink(missing_ok=True)
        path.symlink_to("calc.py")


def ignored(root: Path, random: random.Random) -> None:
    for name in random.choices(IGNORED, k=3):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("ignored, or not\n")
    cache = root / "pkg/.cache_of_a_tool"
    cache.mkdir(exist_ok=True)
    (cache / ".gitignore").write_text("# by a tool\n*\n")
    (cache / "data").write_bytes(b"\0\1")


CHANGES: tuple[Change, ...] = (edit, edit, add, remove, rename, chmod, line_ends, last_newline, link, kind, ignored)


def bash(root: Path, script: str, *arguments: str) -> str:
    env = {**os.environ, **_GIT_ENV}
    run = subprocess.run(["bash", "-c", script, "bash", *arguments], cwd=root, env=env, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode()


def commit(root: Path) -> BaseSnapshot:
    """Make ``root`` a repository of one commit as a task's sandbox does; its base, with all contents at hand."""
    bash(root, f"{_COMMIT}\n{LIST_COMMAND}")
    base = BaseSnapshot.from_listing((root / LISTING_PATH).read_bytes())
    contents = [file.data for file in read(root, {}).values() if file.data is not None]
    return BaseSnapshot(base.modes, base.blobs, base.untracked, {blob_name(data): data for data in contents})


def read(root: Path, known: Mapping[str, str]) -> Mapping[str, TreeFile]:
    tree = TreeCollector(str(root), TreeLimits(), known)
    gather_tree_nofollow(root, [], tree, skip=SKIPPED_NAMES, path=str(root))
    return tree.files


def agent_patches(root: Path, base: BaseSnapshot) -> list[FilePatch]:
    found = read(root, base.known)
    return list(file_patches(base, found, changed_paths(base, found), base.contents))


BOTH = """set -e
export GIT_INDEX_FILE=.git/other-index
git read-tree HEAD
[ ! -s "$1" ] || git apply --cached --whitespace=nowarn "$1"
git write-tree
unset GIT_INDEX_FILE
git add -A
git write-tree
if [ -n "$2" ]; then git reset -q --hard; git clean -qffdx -e build/made.py; fi"""


def trees(root: Path, patch: str, *, again: bool) -> tuple[str, str]:
    """The names of git's trees: of the first commit with ``patch`` applied, and of the directory as git sees it.

    ``again`` brings the directory back to the first commit.
    """
    (root / ".git/patch").write_bytes(patch.encode())
    applied, seen = bash(root, BOTH, ".git/patch", "again" if again else "").split()
    return applied, seen


def write(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_random_honest_changes_match_git_and_are_not_rejected(tmp_path: Path, count: int) -> None:
    write(tmp_path, FILES)
    (tmp_path / "bin/run").chmod(0o755)
    (tmp_path / "to_core").symlink_to("pkg/core.py")
    (tmp_path / "data.bin").write_bytes(b"\0\1\2")
    base = commit(tmp_path)
    assert base.untracked == {"build/made.py"}
    changed = 0
    for seed in range(count):
        chance = random.Random(seed)
        picked = chance.choices(CHANGES, k=chance.randint(1, 4))
        for change in picked:
            change(tmp_path, chance)
        parts = agent_patches(tmp_path, base)
        screened = screen(parts, hidden=["tests/test_hidden.py"])
        case = f"seed {seed}: {[change.__name__ for change in picked]}"
        assert screened.rejected == (), case
        assert screened.text == "".join(part.text for part in parts), case
        applied, seen = trees(tmp_path, screened.text, again=True)
        assert applied == seen, case
        changed += bool(parts)
        (tmp_path / "build/made.py").write_text(FILES["build/made.py"])
    assert changed > 0.9 * count


@pytest.mark.skipif(not BUILT.is_file(), reason="the real tasks are not built (make real-tasks)")
@pytest.mark.parametrize("number", range(5))
def test_gold_patch_of_a_real_task_is_not_rejected(tmp_path: Path, number: int) -> None:
    record: SweRecord = read_jsonl(BUILT)[number]
    write(tmp_path, record.files)
    base = commit(tmp_path)
    (tmp_path / ".git/gold").write_bytes(record.gold.encode())
    bash(tmp_path, "git apply --whitespace=nowarn .git/gold")
    parts = agent_patches(tmp_path, base)
    for gold in (record.gold, ""):
        assert screen(parts, hidden=record.hidden, gold=gold).rejected == ()
    applied, seen = trees(tmp_path, "".join(part.text for part in parts), again=False)
    assert applied == seen


def test_ignore_rules_match_git(tmp_path: Path) -> None:
    write(tmp_path, {path: text for path, text in FILES.items() if path != "build/made.py"})
    base = commit(tmp_path)
    write(tmp_path, dict.fromkeys(IGNORED, "x\n"))
    added = bash(tmp_path, "git add -A; git diff --cached --name-only")
    assert {part.path for part in agent_patches(tmp_path, base)} == set(added.splitlines())
