"""Patches: made, split, screened; git itself is the judge."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe.diff.git_diff import diff_files, patched_paths, reversed_patch, screen, split_patch

paths = st.sampled_from(["a.py", "pkg/b.py", "pkg/deep/c.txt", "with space.md", "é.py"])
contents = st.text(st.sampled_from(list("ab \t\r\n\f\x85é+-@\\")), max_size=40)
trees = st.dictionaries(paths, contents, max_size=4)


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode())


def read_tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_bytes().decode() for p in root.rglob("*") if p.is_file()}


def git_apply(root: Path, patch: str) -> None:
    run = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=root, input=patch.encode(), capture_output=True, timeout=30
    )
    assert run.returncode == 0, run.stderr.decode()


@settings(max_examples=40, deadline=None)
@given(trees, trees)
def test_git_applies_what_diff_files_makes(old: dict[str, str], new: dict[str, str]) -> None:
    patch = diff_files(old, new)
    assert patched_paths(patch) == {path for path in {*old, *new} if old.get(path) != new.get(path)}
    if not patch:
        return
    with tempfile.TemporaryDirectory() as directory:
        write_tree(Path(directory), old)
        git_apply(Path(directory), patch)
        assert read_tree(Path(directory)) == new


@given(trees, trees)
def test_split_patch_keeps_the_text(old: dict[str, str], new: dict[str, str]) -> None:
    patch = diff_files(old, new)
    assert "".join(part.text for part in split_patch(patch)) == patch


def change(path: str, *, new: bool = False) -> str:
    return diff_files({} if new else {path: "a\n"}, {path: "b\n"})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("conftest.py", "test infrastructure"),
        ("deep/down/conftest.py", "test infrastructure"),
        ("setup.cfg", "test infrastructure"),
        ("lib/sitecustomize.py", "test infrastructure"),
        ("setup.py", "test infrastructure"),
        ("evil.pth", "test infrastructure"),
        ("evil.egg-info/entry_points.txt", "test infrastructure"),
        (".venv/lib/python3.9/site-packages/_pytest/runner.py", "test infrastructure"),
        ("r2e_tests/test_1.py", "test infrastructure"),
        ("tests/test_hidden.py", "hidden test"),
        ("tests", "hidden test"),
        ("tests/test_hidden.py/x", "hidden test"),
        ("pytest.py", "shadows"),
        ("json/__init__.py", "shadows"),
    ],
)
def test_tampering_is_rejected_with_a_reason(path: str, reason: str) -> None:
    honest = change("src/fix.py")
    screened = screen(split_patch(honest + change(path, new=True)), hidden=["tests/test_hidden.py"])
    assert screened.text == honest
    assert len(screened.rejected) == 1
    assert screened.rejected[0].startswith(f"{path}: {reason}")


@pytest.mark.parametrize("path", ["src/json.py", "src/types/__init__.py"])
def test_honest_changes_are_accepted(path: str) -> None:
    patch = change(path, new=True)
    assert screen(split_patch(patch), hidden=["tests/test_hidden.py"]).text == patch


def test_changes_to_other_tests_are_left_out_without_suspicion() -> None:
    patch = change("src/fix.py") + change("tests/test_other.py", new=True) + change("other/tests/data.txt")
    screened = screen(split_patch(patch), hidden=["tests/test_hidden.py", "test_top.py"])
    assert screened.text == change("src/fix.py")
    assert screened.rejected == ()


def test_an_existing_module_named_like_a_standard_one_may_be_changed() -> None:
    assert screen(split_patch(change("code.py")), hidden=()).rejected == ()


def test_paths_of_the_gold_patch_may_change() -> None:
    patch = change("setup.cfg")
    assert screen(split_patch(patch), hidden=(), gold=change("setup.cfg")).text == patch


def test_binary_changes_and_nested_repositories_are_left_out() -> None:
    binary = (
        "diff --git a/x.so b/x.so\nnew file mode 100755\nindex 000..1b2\nBinary files /dev/null and b/x.so differ\n"
    )
    nested = "diff --git a/n b/n\nnew file mode 160000\nindex 000..1b2\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+Sub\n"
    screened = screen(split_patch(binary + nested + change("a.py")), hidden=())
    assert screened.text == change("a.py")
    assert screened.rejected == ("x.so: binary change, undone", "n: nested repository, undone")


def test_a_line_that_looks_like_a_header_inside_a_hunk_does_not_split() -> None:
    patch = diff_files({"a": "diff --git a/x b/x\n"}, {"a": "diff --git a/y b/y\n"})
    assert [part.path for part in split_patch(patch)] == ["a"]


HIDDEN = "tests/test_hidden.py"
HUNK = "@@ -1 +1 @@\n-a\n+b\n"
SMUGGLED = {
    "a rename of a hidden test": f"diff --git a/{HIDDEN} b/x.py\nrename from {HIDDEN}\nrename to x.py\n",
    "a rename to a conftest": "diff --git a/x.py b/conftest.py\nrename from x.py\nrename to conftest.py\n",
    "a copy to a conftest": "diff --git a/x.py b/p/conftest.py\ncopy from x.py\ncopy to p/conftest.py\n",
    "a header that lies": f"diff --git a/x.py b/x.py\n--- a/conftest.py\n+++ b/conftest.py\n{HUNK}",
    "a second patch behind a hunk": f"{change('x.py')}--- a/conftest.py\n+++ b/conftest.py\n{HUNK}",
    "a hunk longer than it says": "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,0 +1 @@\n-a\n+b\n",
}


@pytest.mark.parametrize("patch", SMUGGLED.values(), ids=SMUGGLED)
def test_patch_with_inconsistent_names_is_rejected(patch: str) -> None:
    screened = screen(split_patch(change("ok.py") + patch), hidden=[HIDDEN])
    assert screened.text == change("ok.py")
    assert len(screened.rejected) == 1


@settings(max_examples=40, deadline=None)
@given(trees, trees)
def test_git_changes_only_the_patched_paths(old: dict[str, str], new: dict[str, str]) -> None:
    patch = diff_files(old, new)
    if not patch:
        return
    run = subprocess.run(
        ["git", "apply", "--numstat", "-z", "-"], input=patch.encode(), capture_output=True, timeout=30
    )
    touched = {line.split(b"\t", 2)[2].decode() for line in run.stdout.split(b"\0") if line}
    assert touched == patched_paths(patch)
    assert screen(split_patch(patch), hidden=()).text == patch


@settings(max_examples=40, deadline=None)
@given(trees, trees)
def test_reversed_patch_restores_the_files(old: dict[str, str], new: dict[str, str]) -> None:
    if (patch := diff_files(old, new)) == "":
        return
    with tempfile.TemporaryDirectory() as directory:
        write_tree(Path(directory), new)
        git_apply(Path(directory), reversed_patch(patch))
        assert read_tree(Path(directory)) == old
    assert reversed_patch(reversed_patch(patch)) == patch
