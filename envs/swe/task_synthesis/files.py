"""The files of a repository: what each one is, and which of them a record can contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from envs.swe.diff.agent_patch import decode_text
from envs.swe.diff.git_diff import is_test_path

MAX_FILE_BYTES = 1 << 20


def import_root(files: Mapping[str, str]) -> str:
    """The import path of a repository: ``src`` and the top directory for a src layout, else the top directory."""
    return "src:." if any(path.startswith("src/") and path.endswith(".py") for path in files) else "."


def with_egg_info(files: Mapping[str, str], name: str, version: str = "0.0.0") -> dict[str, str]:
    """The files with the metadata of an editable installation, from which code reads its own version."""
    directory = "src/" if import_root(files).startswith("src") else ""
    path = f"{directory}{name.replace('-', '_')}.egg-info/PKG-INFO"
    return {path: f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", **files}


def is_test_module(path: str) -> bool:
    """Whether the file's name marks it as a test module that pytest can collect by path."""
    name = PurePosixPath(path).name
    if name.startswith("test"):
        return name.endswith(".py") and (is_test_path(path) or name in ("tests.py", "test.py"))
    return name.endswith(("_test.py", "_tests.py"))


def is_code(path: str) -> bool:
    """Whether the file is Python source code of the project: no test, set-up or documentation."""
    top = path.partition("/")[0]
    name = PurePosixPath(path).name
    if not path.endswith(".py") or is_test_path(path) or name in ("setup.py", "conftest.py", "noxfile.py"):
        return False
    return top not in ("doc", "docs", "example", "examples", "benchmarks", "scripts") and not top.startswith(".")


def record_text(data: bytes) -> str | None:
    """The text of a file, or None if a record cannot contain it: binary, too large, or a Git LFS pointer."""
    return None if len(data) > MAX_FILE_BYTES or is_lfs_pointer(data) else decode_text(data)


def is_lfs_pointer(data: bytes) -> bool:
    """Whether a file is a Git LFS pointer."""
    return data.startswith(b"version https://git-lfs.github.com/spec/")


def text_files(contents: Mapping[str, bytes]) -> dict[str, str]:
    """The files that a record can contain, without binary files and LFS pointers."""
    texts = {path: record_text(data) for path, data in contents.items()}
    return {path: text for path, text in texts.items() if text is not None}
