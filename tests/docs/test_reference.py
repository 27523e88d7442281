"""The generated parts of docs/reference are what the code says now."""

from __future__ import annotations

import pytest

from scripts.make_reference import COMMAND, REFERENCE, TABLES, page


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_what_the_script_writes(name: str) -> None:
    assert (REFERENCE / name).read_text() == page(name), f"docs/reference/{name} is out of date; run: {COMMAND}"
