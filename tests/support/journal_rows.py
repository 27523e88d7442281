"""What a step's journal holds."""

from __future__ import annotations

from pathlib import Path

from agent_rl.rollout.jsonl_zst import read_frames
from agent_rl.rollout.records import decode_trajectory
from agent_rl.types import Trajectory


def read_journal(path: Path) -> list[Trajectory]:
    """The trajectories in a journal, whatever its header says, in the order they finished; none where it is absent."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        frames = read_frames(file)
        next(frames, None)  # the header
        payloads = [payload.partition(b"\n") for payload, _ in frames]
        return [decode_trajectory(data, str(path)) for line, _, data in payloads if data and b'"turn"' not in line]
