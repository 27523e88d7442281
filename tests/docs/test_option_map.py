"""docs/how-to/from-verl-and-slime.md names options that our config has, row by row."""

from __future__ import annotations

import re

from support import doc_pages as pages

from agent_rl.config.loader import load_config

PAGE = pages.ROOT / "docs/how-to/from-verl-and-slime.md"
HEADS = ("| verl | slime | here |", "| prime-rl | SkyRL | here |")


def test_the_last_column_of_each_row_is_a_config() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line not in HEADS]
    assert rows
    for row in rows:
        overrides = re.findall(r"`([^`]+)`", row.strip("| ").rsplit("|", 1)[1])
        assert overrides, row
        overrides = [text.replace("reference: DIR", "reference: .") for text in overrides]
        load_config(pages.ROOT / "configs/quickstart.yaml", overrides)
