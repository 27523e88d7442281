"""Names that both a rehearsed rank's process and what reads its answer use."""

from __future__ import annotations

from typing import Literal

ENGINES = "engines"
"""The group in which weights are sent to engines."""

STEP = ("rest of a step", "old log-probs", "reference", "update", "step")
"""The phases of a global step; the first is what is done between the others."""
OUT = ("export", "publish", "refused publish")
"""The phases in which weights leave the trainer: to a directory, to engines, and to engines of which one takes none."""

Owner = Literal["weights", "gradients", "optimizer", "activations", "temporaries", "copies", "other state"]
"""Who holds memory of the GPU. ``activations`` are kept for a backward pass, ``copies`` of weights are on their way
out, ``temporaries`` are what nobody else holds."""
