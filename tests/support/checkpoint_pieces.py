"""Parameters of a checkpoint in full, for tests that look at what was saved."""

from __future__ import annotations

import math

from agent_rl.train.checkpoint.piece_files import FlatRange, ParamShard, PieceReader, _full_parameter


def whole_part(part: ParamShard) -> FlatRange:
    """All of ``part``."""
    return FlatRange(part, 0, math.prod(part.shape))


def whole_parameters(reader: PieceReader) -> list[ParamShard]:
    """Every parameter that the files hold something of, uncut."""
    return [_full_parameter(stretches[0][0].part) for stretches in reader._by_name.values()]
