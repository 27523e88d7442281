"""Parameters of a checkpoint in full, for tests that look at what was saved."""

from __future__ import annotations

import math

from agent_rl.train.checkpoint.pieces import Part, PieceReader, Stretch, _uncut


def whole_part(part: Part) -> Stretch:
    """All of ``part``."""
    return Stretch(part, 0, math.prod(part.shape))


def whole_parameters(reader: PieceReader) -> list[Part]:
    """Every parameter that the files hold something of, uncut."""
    return [_uncut(stretches[0][0].part) for stretches in reader._by_name.values()]
