"""docs/explanation/architecture.md prints the import table that tests/test_architecture.py enforces."""

from __future__ import annotations

import re

from support.doc_pages import ROOT
from test_architecture import BASE, INSIDE_AGENT_RL


def test_the_page_has_the_import_table() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    section = page.split("\n## Inside agent_rl\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    printed = {row[0].strip(" `"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    above_the_base = {part: allowed - BASE for part, allowed in INSIDE_AGENT_RL.items() if allowed >= BASE}
    assert printed == above_the_base
