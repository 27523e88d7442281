"""Reads the small files of a model's directory, which may come from anyone: none beyond its limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JSON_BYTES = 64 << 20
"""Limit of a JSON file; the index of a model with 60,000 experts has 30 MB."""
TOKENIZER_BYTES = 512 << 20
TEMPLATE_BYTES = 1 << 20


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a file. Raises OSError, and ValueError for a file of more than ``max_bytes``."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return data.decode()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError, and ValueError for anything else."""
    try:
        content = json.loads(read_text(path, JSON_BYTES))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it contains a {type(content).__name__}, expected an object")
    return content
