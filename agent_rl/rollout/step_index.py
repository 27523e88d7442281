"""``<stem>.index.json.zst``: a step's or an evaluation's trajectories in a few numbers each, column by column.

A list of 100,000 trajectories is made of these, not of their rows. A sidecar that is absent or of another format is
made again of the rows: it holds nothing that they don't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zstandard

from agent_rl.rollout.jsonl_zst import Place
from agent_rl.utils.run_files import write_atomic

FORMAT = 1
_LEVEL = 6
SUFFIX = ".index.json.zst"
COLUMNS = (
    *(
        "group",
        "task",
        "reward",
        "resolved",
        "stop",
        "turns",
        "tokens",
        "sampled",
        "hacks",
        "training_status",
        "advantage",
    ),
    *("branches", "versions", "seconds", "began", "failures", "format"),
    *("worst_gap", "worst_gap_without_replay"),
)


def sidecar_path(stem: Path) -> Path:
    return stem.with_name(stem.name + SUFFIX)


def write_sidecar(stem: Path, rows: Iterable[Mapping[str, Any]], places: Sequence[Place]) -> None:
    """Write the sidecar of ``rows``, which are at ``places`` of their file."""
    found = {"format": FORMAT, "columns": columns(rows), "places": places}
    write_atomic(sidecar_path(stem), zstandard.ZstdCompressor(level=_LEVEL).compress(orjson.dumps(found)))


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The :data:`COLUMNS` of ``rows``. Raises what a damaged row raises: KeyError, TypeError, AttributeError."""
    table = [summary(row) for row in rows]
    return {name: [line[name] for line in table] for name in COLUMNS}


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row in a few numbers. Format 2 knows of no training status."""
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
        "format": row.get("format", 2),
    }


def sizes(row: Mapping[str, Any]) -> dict[str, int]:
    """How many branches a row has, and how many tokens and sampled tokens they hold. Format 2 knows of no sampled
    tokens beside its turns'."""
    older = {"tokens": row["arrays"]["tokens"], "sampled": sum(turn["completion_tokens"] for turn in row["turns"])}
    branches = row.get("branches", [older])
    counted = {name: sum(branch[name] for branch in branches) for name in ("tokens", "sampled")}
    return {**counted, "branches": len(branches)}


def read_sidecar(stem: Path) -> tuple[dict[str, list[Any]], list[Place]] | None:
    """The columns and places of the sidecar under ``stem``; None where there is none that this version reads."""
    try:
        found = orjson.loads(zstandard.ZstdDecompressor().decompress(sidecar_path(stem).read_bytes()))
        if found["format"] != FORMAT:
            return None
        return {name: found["columns"][name] for name in COLUMNS}, [(at, number) for at, number in found["places"]]
    except (OSError, ValueError, KeyError, TypeError, zstandard.ZstdError):
        return None


def _text(text: str) -> str:
    """``text`` without lone surrogates, which orjson refuses."""
    return text.encode("utf-8", "replace").decode()
