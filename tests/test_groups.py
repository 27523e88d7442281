"""Spread over processes, the suite keeps together what shares a server, a world or images."""

from __future__ import annotations

import pytest


def test_a_test_carries_the_name_of_its_group(request: pytest.FixtureRequest) -> None:
    """pytest-xdist spreads by the end of a test's id; a version that loses it would spread single tests, silently."""
    grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_groups.py") == grouped
