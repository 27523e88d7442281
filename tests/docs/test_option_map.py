"""docs/from-verl-and-slime.md names options that our config has, row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support import doc_pages as pages

from agent_rl.config.loader import load_config

PAGE = pages.ROOT / "docs/from-verl-and-slime.md"
CONFIG = pages.ROOT / "configs/quickstart.yaml"
HEAD = "| verl | slime | here |"


def rows() -> Iterator[tuple[str, list[str]]]:
    """The last cell of every row, and what stands in it as code."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and line != HEAD:
            cell = line.strip("| ").rsplit("|", 1)[1]
            yield line, re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(("line", "overrides"), list(rows()))
def test_a_rows_last_column_is_a_config(line: str, overrides: list[str]) -> None:
    assert overrides, line
    load_config(CONFIG, [override.replace("DIR", ".") for override in overrides])
