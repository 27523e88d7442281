"""A file system that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of ``size`` at ``directory``; skips the test without the right to mount one."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)
