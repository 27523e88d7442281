"""docs/research/red-team.md names every attack that there is, what stops it and how it ends."""

from __future__ import annotations

import pytest

from tests.redteam.table import GROUPS, PAGE, page

pytestmark = pytest.mark.redteam


def test_the_page_names_every_attack() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: PYTHONPATH=.:tests python -m tests.redteam.table"


def test_there_are_at_least_forty_attacks_and_each_is_stopped_or_stands() -> None:
    attacks = [(group.title, name) for group in GROUPS for name in group.attacks]
    assert len(set(attacks)) == len(attacks) >= 40
    assert {group.ends for group in GROUPS} == {"reward 0", "refused", "harmless", "stands"}
    assert all(all(group.attacks.values()) for group in GROUPS)
    print(f"{len(attacks)} attacks in {len(GROUPS)} groups")
