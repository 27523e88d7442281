"""The patch made from an agent's files: git, given it, makes the same files."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.mini.generator import generate, to_record
from envs.swe.diff.agent_patch import changed_paths, file_patches
from envs.swe.diff.git_diff import FilePatch, screen, split_patch
from envs.swe.diff.line_diff import hunks
from envs.swe.diff.snapshot import SKIPPED_NAMES, BaseSnapshot
from sandbox import TreeFile, TreeLimits, blob_name
from sandbox.files import TreeCollector
from sandbox.nofollow_io import gather_tree_nofollow

paths = st.sampled_from(["a.py", "pkg/b.py", "pkg", "pkg/deep/c.txt", "with space.md", "é.py", "x b/y"])
texts = st.text(st.sampled_from(list("ab\n\n\r\f\x85é+-@\\ ")), max_size=60)
# path -> (mode, content or target)
modes = st.sampled_from([stat.S_IFREG | 0o644, stat.S_IFREG | 0o755])
links = st.tuples(st.just(stat.S_IFLNK | 0o777), texts.filter(bool))
files = st.tuples(modes, texts) | links
trees = st.dictionaries(paths, files, max_size=4)
Files = Mapping[str, tuple[int, str]]


def fits(paths: Mapping[str, object]) -> bool:
    """Whether no path is another's directory."""
    return not any(one.startswith(f"{other}/") for one in paths for other in paths)


def write(root: Path, path: str, mode: int, content: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        target.symlink_to(content)
    else:
        target.write_bytes(content.encode())
        target.chmod(mode & 0o777)


def base_of(files: Files) -> BaseSnapshot:
    contents = {path: content.encode() for path, (_, content) in files.items()}
    blobs = {path: blob_name(content) for path, content in contents.items()}
    modes = {path: mode for path, (mode, _) in files.items()}
    return BaseSnapshot(modes, blobs, frozenset(), {blobs[path]: content for path, content in contents.items()})


def agent_patches(base: BaseSnapshot, found: Mapping[str, TreeFile]) -> list[FilePatch]:
    return list(file_patches(base, found, changed_paths(base, found), base.contents))


def read(root: Path, known: Mapping[str, str] | None = None) -> dict[str, TreeFile]:
    tree = TreeCollector(str(root), TreeLimits(), known)
    gather_tree_nofollow(root, [], tree, skip=SKIPPED_NAMES, path=str(root))
    return tree.files


def as_git_sees(files: Mapping[str, TreeFile]) -> dict[str, tuple[bool, bool, bytes | None]]:
    links = {path: stat.S_ISLNK(file.mode) for path, file in files.items()}
    return {p: (links[p], not links[p] and bool(file.mode & 0o100), file.data) for p, file in files.items()}


@settings(max_examples=60, deadline=None)
@given(trees.filter(fits), trees.filter(fits))
def test_git_applies_the_patch_to_the_agents_files(base: Files, now: Files) -> None:
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        for path, (mode, content) in base.items():
            write(Path(before), path, mode, content)
        for path, (mode, content) in now.items():
            write(Path(after), path, mode, content)
        found = read(Path(after))
        parts = agent_patches(base_of(base), read(Path(after), base_of(base).known))
        patch = "".join(part.text for part in parts)
        for read_again in (parts, split_patch(patch)):
            screened = screen(read_again, hidden=())
            assert (screened.text, screened.rejected) == (patch, ())
        if patch:
            subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=before, input=patch.encode(), check=True)
        assert as_git_sees(read(Path(before))) == as_git_sees(found)


def test_build_artifacts_are_left_out_and_binary_files_are_named(tmp_path: Path) -> None:
    base = {"a.py": "a\n", "kept.log": "old\n", ".gitignore": "*.log\nbuild/\n", "sub/.gitignore": "!yes.log\n"}
    litter = ("x.log", "build/a", "p/__pycache__/x.pyc", ".venv/a", "e.egg-info/b", "x.pyc")
    for path in (*litter, "sub/no.txt", "sub/yes.log"):
        write(tmp_path, path, stat.S_IFREG | 0o644, "new\n")
    for path, text in base.items():
        write(tmp_path, path, stat.S_IFREG | 0o644, text)
    (tmp_path / "kept.log").write_text("newer\n")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "line\nbreak").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    screened = screen(agent_patches(BaseSnapshot.from_files(base), read(tmp_path)), hidden=())
    assert [suspicion.split(":")[0] for suspicion in screened.rejected] == ["binary", "latin.txt", "line\\nbreak"]
    assert {line.split(" b/")[1] for line in screened.text.splitlines() if line.startswith("diff")} == {
        "kept.log", "sub/no.txt", "sub/yes.log"
    }  # fmt: skip


def test_limits_grow_with_the_base() -> None:
    assert BaseSnapshot.from_files({"a": "x"}).limits(10) == TreeLimits(10, files=TreeLimits().files + 1)


@pytest.mark.parametrize("other", ["a\n", "b\n"])
def test_repetitive_texts_are_compared_quickly(other: str) -> None:
    found = list(hunks(["a\n"] * 200_000, [other] * 100_000))
    assert len([line for line in found if line.startswith("-")]) >= 100_000


def test_far_edits_are_small_hunks() -> None:
    old = [f"{number}\n" for number in range(5000)]
    new = [*old[:10], "x\n", *old[10:2500], *old[2501:4990], "y\n", *old[4991:]]
    assert len(list(hunks(old, new))) == 3 * (1 + 6) + 4


def test_honest_fixes_of_generated_tasks_equal_their_gold_patches() -> None:
    for task in generate("train", 200, 0):
        record = to_record(task)
        found = {path: TreeFile(stat.S_IFREG | 0o644, text.encode()) for path, text in task.fixed.items()}
        screened = screen(
            agent_patches(BaseSnapshot.from_files(record.files), found), hidden=record.hidden, gold=record.gold
        )
        assert (screened.text, screened.rejected) == (record.gold, ())
