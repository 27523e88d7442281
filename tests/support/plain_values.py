"""Dataclasses that hold arrays as values that ``==`` compares."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

CLOCKS = ("seconds", "grade_seconds", "start_seconds", "grade_began", "began", "generate_seconds", "tool_seconds")


def plain(value: Any, *ignored: str) -> Any:
    """``value`` with arrays as their type, shape and bytes, and without the fields ``ignored`` at any depth."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple | list):
        return [plain(item, *ignored) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name not in ignored]
        return {name: plain(getattr(value, name), *ignored) for name in names}
    return value
