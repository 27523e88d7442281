"""One trajectory, down to its tokens and their experts. Arrays are read of the one that is asked for, and not kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import read_row, read_rows
from agent_rl.rollout.records import arrays_path, folded, messages_of, read_arrays, read_branch, rows_path
from agent_rl.rollout.token_details import Differing, StoredDetail, details_path, read_detail, read_loads
from agent_rl.types import Branch
from agent_rl.viewer.index import EVAL, Index, Shelf, file_stamp, log_of
from agent_rl.viewer.token_text import Pieces
from r3 import archive
from r3.routing import RoutingError

Answer = dict[str, Any]
Which = tuple[int, int]
"""The number of a trajectory in its shelf, and of its branch."""
MOST_ROWS = 512
_LAYOUT = ("moe_layers", "num_experts", "top_k")
_NOTHING: Answer = {"tokens": [], "pieces": None, "sampled": [], "versions": [], "logprobs": [], "detail": None}


class Reader:
    """Reads the trajectories of ``index``."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._pieces: tuple[str, Pieces | None, list[str]] = ("", None, [])

    def whole(self, shelf: Shelf, number: int) -> Answer:
        """Everything of a trajectory but its routes. Raises AgentRlError where its row is damaged."""
        if shelf.n == EVAL:
            return self._of_log(shelf, number)
        row, notes = _row(shelf, number), list(shelf.notes)
        count = shelf.columns["branches"][number]
        branches = [self._branch(shelf, (number, branch), row, notes) for branch in range(count)]
        story = _story(row)
        _place(story["turns"], [branch["sampled"] for branch in branches])
        return {
            **_head(shelf, number, row),
            **story,
            "branches": branches,
            "notes": list(dict.fromkeys(notes)),
        }

    def routes(self, shelf: Shelf, which: Which, start: int, stop: int | None) -> Answer | None:
        """Rows of a branch's routes; None where it has none. Raises AgentRlError where they are damaged."""
        number, _ = which
        routing = None if shelf.n == EVAL else _branch_of(shelf, _row(shelf, number), which[1]).routing
        if routing is None:
            return None
        start = min(start, routing.tokens)
        stop = min(start + MOST_ROWS, routing.tokens, routing.tokens if stop is None else max(stop, start))
        detail = _detail(shelf, which, [])
        return {
            "id": f"{shelf.n}-{number}",
            "from": start,
            "to": stop,
            "rows": routing.tokens,
            "layers": routing.moe_layers,
            "top_k": routing.top_k,
            "num_experts": routing.num_experts,
            "experts": np.sort(routing.experts[start:stop], axis=2).tolist(),
            "present": routing.present[start:stop].tolist(),
            "spans": [
                {
                    "start": max(span.start, start),
                    "stop": min(span.stop, stop),
                    "version": span.weight_version,
                    "engine": span.engine,
                    "kind": span.kind.value,
                }
                for span in routing.spans
                if span.start < stop and span.stop > start
            ],
            **_of_both(detail, lambda differing: _by_row(differing, start, stop)),
            "notes": [],
        }

    def layer_map(self, shelf: Shelf, which: Which) -> Answer:
        """The layers of all tokens whose experts differ, as ``[row, layer]``."""
        notes: list[str] = []
        detail = _detail(shelf, which, notes)
        found = _of_both(detail, _pairs)
        layers = next((d.layers for d in _both(detail).values() if d is not None and d.layers is not None), None)
        if detail is not None and layers is None:
            notes.append("which layers differ was not kept, only their number: too many do")
        return {
            "id": f"{shelf.n}-{which[0]}",
            "layers": 0 if layers is None else layers.shape[1],
            "rows": 0 if layers is None else layers.shape[0],
            **found,
            "notes": notes,
        }

    def _branch(self, shelf: Shelf, which: Which, row: Mapping[str, Any], notes: list[str]) -> Answer:
        described = row.get("branches", [{}] * (which[1] + 1))[which[1]]
        found = {key: described.get(key, value) for key, value in (("parent", None), ("shared", 0), ("cause", "start"))}
        try:
            return {**found, **self._tokens(shelf, which, row, notes)}
        except (AgentRlError, OSError) as error:
            notes.append(f"its tokens cannot be read: {error}")
            return {**found, **_NOTHING}

    def _tokens(self, shelf: Shelf, which: Which, row: Mapping[str, Any], notes: list[str]) -> Answer:
        branch = _branch_of(shelf, row, which[1], routes=False)
        mask, detail = branch.loss_mask, _detail(shelf, which, notes)
        if detail is not None and len(detail.gap) != int(mask.sum()):
            notes.append(f"its detail is of {len(detail.gap)} sampled tokens, it has {int(mask.sum())}")
            detail = None
        if detail is None and row.get("training_status") == "uniform":
            notes.append("not evaluated by the trainer: all rewards of its group are equal")
        return {
            "tokens": branch.tokens,
            "pieces": self._texts(branch.tokens.tolist(), notes),
            "sampled": _spans(mask),
            "versions": [[span.start, span.stop, span.version] for span in branch.versions],
            "logprobs": branch.logprobs[mask],
            "detail": None if detail is None else _values(detail),
        }

    def _texts(self, ids: Sequence[int], notes: list[str]) -> list[str] | None:
        path = self._index.directory / "tokenizer.json"
        stamp = file_stamp(path)
        if stamp != self._pieces[0] or not stamp:
            self._pieces = (stamp, *_opened(path, stamp))
        notes += self._pieces[2]
        pieces = self._pieces[1]
        return None if pieces is None else pieces.texts(ids)

    def _of_log(self, shelf: Shelf, number: int) -> Answer:
        """A sample of an evaluation's directory, which keeps no tokens."""
        path, notes = log_of(shelf, number), ["the directory of an evaluation keeps no tokens"]
        result = shelf.results[number]
        row: dict[str, Any] = {"messages": [], "turns": [], "error": result.error, "patch": result.patch}
        if path.is_file():
            row |= json.loads(path.read_bytes())
        else:
            notes.append("it has no log: it was not graded")
        log = path.with_suffix(".log")
        row["test_log"] = log.read_text(errors="replace") if log.is_file() else ""
        row["seconds"], row["stop"] = result.seconds, result.stop
        row["suspected_hack"] = list(result.suspected_hack)
        return {**_head(shelf, number, row), **_story(row), "branches": [], "notes": notes}


def loads(shelf: Shelf) -> Answer:
    """How many tokens each expert got in a step."""
    found = read_loads(shelf.stem)
    notes = (
        [] if found is not None else ["no loads were kept: monitoring.token_detail was off, or there were no routes"]
    )
    return {
        "n": shelf.n,
        "layers": 0 if found is None else found.shape[0],
        "num_experts": 0 if found is None else found.shape[1],
        "loads": None if found is None else found.tolist(),
        "notes": notes,
    }


def layout_of(index: Index) -> Answer:
    """The model's MoE layers, experts and experts a token, of the newest step that can be read; None without routes."""
    for shelf in reversed(index.shelves.values()):
        if shelf.n.isdecimal() and len(shelf):
            with contextlib.suppress(AgentRlError, RoutingError, OSError, KeyError, TypeError):
                return _layout(shelf)
    return dict.fromkeys(_LAYOUT)


def _layout(shelf: Shelf) -> Answer:
    path = rows_path(shelf.stem)
    key = next((row["arrays"]["key"] for row in read_rows(path) if row["arrays"]["routes"]), None)
    if key is None:
        return dict.fromkeys(_LAYOUT)
    (routes,) = read_arrays(arrays_path(path), [f"{key}/routes"]).values()
    header = archive.header_of(routes.data, where=str(path))
    return {name: getattr(header, name) for name in _LAYOUT}


def _row(shelf: Shelf, number: int) -> dict[str, Any]:
    path = rows_path(shelf.stem)
    if shelf.places is not None:
        return read_row(path, shelf.places[number])
    found = next((row for at, row in enumerate(read_rows(path)) if at == number), None)
    if found is None:
        raise AgentRlError(f"{path}: it has no row {number} any more")
    return found


def _branch_of(shelf: Shelf, row: Mapping[str, Any], branch: int, *, routes: bool = True) -> Branch:
    path = arrays_path(rows_path(shelf.stem))
    return read_branch(row, branch, lambda name: read_arrays(path, [name])[name], routes=routes)


def _detail(shelf: Shelf, which: Which, notes: list[str]) -> StoredDetail | None:
    try:
        found = read_detail(shelf.stem, *which)
    except AgentRlError as error:
        notes.append(str(error))
        return None
    if (
        found is None
        and shelf.columns["training_status"][which[0]] == "trained"
        and not details_path(shelf.stem).is_file()
    ):
        notes.append("what the trainer saw of its tokens was not kept: monitoring.token_detail was off")
    return found


def _head(shelf: Shelf, number: int, row: Mapping[str, Any]) -> Answer:
    columns = shelf.columns
    own = [at for at, group in enumerate(columns["group"]) if group == columns["group"][number]]
    format_2 = row.get("format") == 2 or "began" not in row
    return {
        "id": f"{shelf.n}-{number}",
        "n": shelf.n,
        "step": shelf.step,
        "group": columns["group"][number],
        "siblings": [f"{shelf.n}-{at}" for at in own],
        "task": columns["task"][number],
        "env": row.get("env", ""),
        "reward": columns["reward"][number],
        "resolved": columns["resolved"][number],
        "stop": row["stop"],
        "error": row.get("error", ""),
        "training_status": columns["training_status"][number],
        "advantage": columns["advantage"][number],
        "hacks": row["suspected_hack"],
        "patch": row.get("patch", ""),
        "tests": row.get("tests", {}),
        "test_log": row.get("test_log", ""),
        "times": {
            "began": row.get("began") or None,
            "queue": row.get("queue_seconds"),
            "start": row.get("start_seconds"),
            "grade_began": None if format_2 else row["grade_began"] or None,
            "grade": row.get("grade_seconds"),
            "total": row["seconds"],
        },
    }


def _story(row: Mapping[str, Any]) -> Answer:
    """The messages and the turns, which name their messages."""
    turns = row["turns"]
    messages = messages_of(row)
    answers: dict[int, int] = {}
    observed: dict[int, int] = {}
    for at, message in enumerate(folded([dict(m) for m in messages], [(t["text"], t["observation"]) for t in turns])):
        if isinstance(content := message["content"], Mapping):
            (answers if "turn" in content else observed).setdefault(content.get("turn", content.get("observed")), at)
    return {
        "messages": messages,
        "turns": [
            {
                **turn,
                "branch": 0,
                "message": answers.get(number),
                "observation_message": observed.get(number),
                "span": _span(turn),
                "began": turn.get("began"),
            }
            for number, turn in enumerate(turns)
        ],
    }


def _span(turn: Mapping[str, Any]) -> list[int] | None:
    count, start = turn["completion_tokens"], turn["prompt_tokens"]
    return [start, start + count] if count else None


def _place(turns: Sequence[Answer], sampled: Sequence[Sequence[Sequence[int]]]) -> None:
    """Give each turn its branch: the first that sampled tokens where the turn did, and that no turn took for these."""
    taken: set[tuple[int, int]] = set()
    for turn in turns:
        if turn["span"] is None:
            continue
        start, stop = turn["span"]
        for branch, spans in enumerate(sampled):
            if (branch, start) not in taken and any(first <= start and stop <= last for first, last in spans):
                turn["branch"] = branch
                taken.add((branch, start))
                break


def _spans(mask: NDArray[np.bool_]) -> list[list[int]]:
    """Where the mask is set: ``[start, stop]`` each."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def _values(detail: StoredDetail) -> Answer:
    numbers = {name: None if found is None else found.numbers for name, found in _both(detail).items()}
    return {
        "gap": _single(detail.gap),
        "gap_without_replay": _single(detail.gap_without_replay),
        "entropy": _single(detail.entropy),
        "flags": detail.flags,
        **numbers,
    }


def _single(values: NDArray[np.float16] | None) -> NDArray[np.float32] | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def _both(detail: StoredDetail | None) -> dict[str, Differing | None]:
    if detail is None:
        return {"differs": None, "differs_without_replay": None}
    return {"differs": detail.differs, "differs_without_replay": detail.differs_without_replay}


def _of_both(detail: StoredDetail | None, make: Callable[[NDArray[np.bool_]], Any]) -> Answer:
    return {
        name: None if found is None or found.layers is None else make(found.layers)
        for name, found in _both(detail).items()
    }


def _by_row(layers: NDArray[np.bool_], start: int, stop: int) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in layers[start:stop]]


def _pairs(layers: NDArray[np.bool_]) -> list[list[int]]:
    return np.argwhere(layers).tolist()


def _opened(path: Path, stamp: str) -> tuple[Pieces | None, list[str]]:
    if not stamp:
        return None, ["the run's directory has no tokenizer.json: tokens are shown as numbers"]
    try:
        return Pieces(path), []
    except AgentRlError as error:
        return None, [f"tokens are shown as numbers: {error}"]
