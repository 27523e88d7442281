"""docs/architecture.md has the import table and the figures that the tree has."""

from __future__ import annotations

import re

from support import import_graph
from support.doc_pages import ROOT
from test_architecture import BASE, INSIDE_AGENT_RL

PAGE = (ROOT / "docs/architecture.md").read_text()


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_the_import_table() -> None:
    printed = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows("Inside agent_rl")}
    above_the_base = {part: allowed - BASE for part, allowed in INSIDE_AGENT_RL.items() if allowed >= BASE}
    assert printed == above_the_base


def test_the_page_has_the_figures_of_the_structure() -> None:
    printed = {row[0]: row[2] for row in rows("The structure before and after its redesign")}
    counted = import_graph.figures(ROOT)
    assert printed["circles of modules that import each other"] == str(counted["circles of modules"]) == "0"
    copied = "settings that were declared again in a copy of the config"
    assert printed[copied] == str(counted["settings declared in a copy of the config"]) == "0"
