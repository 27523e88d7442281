"""Importing this puts the checkout and its ``tests`` on the path, for benchmarks that use what tests share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/r3 and others have the names of packages
