"""``<stem>.index.json.zst``: the trajectories of a step or an evaluation as a few numbers each, stored by column.

Lists of 100,000 trajectories are built from these files. A missing step index, or one of another format, is rebuilt
from the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zstandard

from agent_rl.rollout.jsonl_zst import RowPosition, decompress
from agent_rl.utils.run_files import write_atomic

FORMAT = 1
_LEVEL = 6
_MAX_BYTES = 1 << 30
SUFFIX = ".index.json.zst"
COLUMNS = (
    *("group", "task", "reward", "resolved", "stop", "turns", "tokens", "sampled", "hacks", "training_status"),
    *("advantage", "branches", "versions", "seconds", "began", "failures", "format"),
    *("worst_gap", "worst_gap_without_replay"),
)


def step_index_path(stem: Path) -> Path:
    return stem.with_name(stem.name + SUFFIX)


def write_step_index(stem: Path, rows: Iterable[Mapping[str, Any]], positions: Sequence[RowPosition]) -> None:
    """Write the index of ``rows``, which are at ``positions`` of their file."""
    index = {"format": FORMAT, "columns": columns(rows), "places": positions}
    write_atomic(step_index_path(stem), zstandard.ZstdCompressor(level=_LEVEL).compress(orjson.dumps(index)))


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The :data:`COLUMNS` of ``rows``. Raises KeyError, TypeError or AttributeError for a damaged row."""
    table = [summary(row) for row in rows]
    return {name: [line[name] for line in table] for name in COLUMNS}


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """The index entry of one row."""
    return {
        "group": row["group"]["index"],
        "task": _text(row["task_id"]),
        **{name: row[name] for name in ("reward", "resolved", "stop", "seconds")},
        "turns": len(row["turns"]),
        **sizes(row),
        "hacks": len(row["suspected_hack"]),
        **{name: row.get(name) for name in ("training_status", "advantage", "worst_gap", "worst_gap_without_replay")},
        "versions": len(row["weight_versions"]),
        "began": row.get("began") or None,
        "failures": row["group"]["infrastructure_failures"],
        "format": row["format"],
    }


def sizes(row: Mapping[str, Any]) -> dict[str, int]:
    """Number of branches of a row, and of their tokens and sampled tokens."""
    branches = row["branches"]
    counted = {name: sum(branch[name] for branch in branches) for name in ("tokens", "sampled")}
    return {**counted, "branches": len(branches)}


def read_step_index(stem: Path) -> tuple[dict[str, list[Any]], list[RowPosition]] | None:
    """The columns and row positions under ``stem``; None if there is no index in this format."""
    try:
        index = orjson.loads(decompress(step_index_path(stem).read_bytes(), _MAX_BYTES))
        if index["format"] != FORMAT:
            return None
        return {name: index["columns"][name] for name in COLUMNS}, [(start, row) for start, row in index["places"]]
    except (OSError, ValueError, KeyError, TypeError, zstandard.ZstdError):
        return None


def _text(text: str) -> str:
    """``text`` without lone surrogates, which orjson rejects."""
    return text.encode("utf-8", "replace").decode()
