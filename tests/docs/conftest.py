"""Lets the tests here use the traced step of the tests of r3."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "r3"))
