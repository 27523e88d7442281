"""One trajectory with its tokens and their experts. Arrays are read for each request and not cached."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import read_row, read_rows
from agent_rl.rollout.readable_turns import conversation
from agent_rl.rollout.records import arrays_path, fold_messages, read_arrays, read_branch, row_messages, rows_path
from agent_rl.rollout.token_details import Differing, StoredDetail, details_path, read_detail, read_loads
from agent_rl.types import Branch
from agent_rl.utils import foreign
from agent_rl.viewer.index import EVAL, Index, StepIndex, file_stamp, log_of, require_regular_files
from agent_rl.viewer.token_text import TokenTexts
from r3 import archive
from r3.routing import RoutingError

Json = dict[str, Any]
BranchId = tuple[int, int]
"""The index of a trajectory in its step index, and of its branch."""
MAX_ROWS = 512
_LAYOUT = ("moe_layers", "num_experts", "top_k")
_HEAD_COLUMNS = ("group", "task", "reward", "resolved", "training_status", "advantage")
_NO_TOKENS: Json = {"tokens": [], "pieces": None, "sampled": [], "versions": [], "logprobs": [], "detail": None}


class Reader:
    """Reads the trajectories of ``index``."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._token_texts: tuple[str, TokenTexts | None, list[str]] = ("", None, [])

    def trajectory(self, index: StepIndex, number: int) -> Json:
        """A trajectory without its routes. Raises AgentRlError if its row is damaged."""
        if index.n == EVAL:
            return self._from_log(index, number)
        row, notes = _row(index, number), list(index.notes)
        count = index.columns["branches"][number]
        branches = [self._branch(index, (number, branch), row, notes) for branch in range(count)]
        conversation = _conversation(row)
        if not any(turn["branch"] for turn in conversation["turns"]):  # an agent program's are not recorded
            _assign_branches(conversation["turns"], [branch["sampled"] for branch in branches])
        return {**_head(index, number, row), **conversation, "branches": branches, "notes": list(dict.fromkeys(notes))}

    def routes(self, index: StepIndex, branch_id: BranchId, start: int, stop: int | None) -> Json | None:
        """Rows of a branch's routes; None without routes. Raises AgentRlError if they are damaged."""
        number, _ = branch_id
        routing = None if index.n == EVAL else _branch_of(index, _row(index, number), branch_id[1]).routing
        if routing is None:
            return None
        start = min(start, routing.tokens)
        stop = min(start + MAX_ROWS, routing.tokens, routing.tokens if stop is None else max(stop, start))
        detail = _detail(index, branch_id, [])
        return {
            "id": f"{index.n}-{number}",
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
            **_map_both(detail, lambda differing: _by_row(differing, start, stop)),
            "notes": [],
        }

    def layer_map(self, index: StepIndex, branch_id: BranchId) -> Json:
        """The ``[row, layer]`` pairs in which the experts of engine and trainer differ."""
        notes: list[str] = []
        detail = _detail(index, branch_id, notes)
        found = _map_both(detail, _pairs)
        layers = next((d.layers for d in _both(detail).values() if d is not None and d.layers is not None), None)
        if detail is not None and layers is None:
            notes.append("only the number of differing layers was recorded, because there are too many")
        return {
            "id": f"{index.n}-{branch_id[0]}",
            "layers": 0 if layers is None else layers.shape[1],
            "rows": 0 if layers is None else layers.shape[0],
            **found,
            "notes": notes,
        }

    def _branch(self, index: StepIndex, branch_id: BranchId, row: Mapping[str, Any], notes: list[str]) -> Json:
        described = row.get("branches", [{}] * (branch_id[1] + 1))[branch_id[1]]
        found = {key: described.get(key, value) for key, value in (("parent", None), ("shared", 0), ("cause", "start"))}
        try:
            return {**found, **self._tokens(index, branch_id, row, notes)}
        except (AgentRlError, OSError) as error:
            notes.append(f"tokens cannot be read: {error}")
            return {**found, **_NO_TOKENS}

    def _tokens(self, index: StepIndex, branch_id: BranchId, row: Mapping[str, Any], notes: list[str]) -> Json:
        branch = _branch_of(index, row, branch_id[1], routes=False)
        mask, detail = branch.loss_mask, _detail(index, branch_id, notes)
        if detail is not None and len(detail.gap) != int(mask.sum()):
            notes.append(f"its detail has {len(detail.gap)} sampled tokens, the trajectory {int(mask.sum())}")
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
        if stamp != self._token_texts[0] or not stamp:
            self._token_texts = (stamp, *_open_tokenizer(path, stamp))
        notes += self._token_texts[2]
        texts = self._token_texts[1]
        return None if texts is None else texts.texts(ids)

    def _from_log(self, index: StepIndex, number: int) -> Json:
        """A sample of an evaluation's directory, which has no tokens."""
        notes = ["the directory of an evaluation has no tokens"]
        row = _logged(index, number, notes)
        return {**_head(index, number, row), **_conversation(row), "branches": [], "notes": notes}


def rows(index: StepIndex) -> Iterator[Mapping[str, Any]]:
    """The rows of a step or an evaluation, in order. Raises AgentRlError at a damaged one."""
    if index.n == EVAL:
        return (_logged(index, number, []) for number in range(len(index)))
    return read_rows(rows_path(index.stem)) if len(index) else iter(())


def loads(index: StepIndex) -> Json:
    """The number of tokens of each expert in a step, by layer."""
    require_regular_files(index.stem)
    found = read_loads(index.stem)
    notes = (
        []
        if found is not None
        else ["no expert loads were recorded: monitoring.token_detail was off, or there were no routes"]
    )
    return {
        "n": index.n,
        "layers": 0 if found is None else found.shape[0],
        "num_experts": 0 if found is None else found.shape[1],
        "loads": None if found is None else found.tolist(),
        "notes": notes,
    }


def model_layout(index: Index) -> Json:
    """The model's MoE layers, experts and top_k, from the newest readable step; None values without routes."""
    for step in reversed(index.step_indexes.values()):
        if step.n.isdecimal() and len(step):
            with contextlib.suppress(AgentRlError, RoutingError, OSError, KeyError, TypeError):
                return _layout(step)
    return dict.fromkeys(_LAYOUT)


def _layout(index: StepIndex) -> Json:
    path = rows_path(index.stem)
    key = next((row["arrays"]["key"] for row in read_rows(path) if row["arrays"]["routes"]), None)
    if key is None:
        return dict.fromkeys(_LAYOUT)
    (routes,) = read_arrays(arrays_path(path), [f"{key}/routes"]).values()
    header = archive.header_of(routes.data, where=str(path))
    return {name: getattr(header, name) for name in _LAYOUT}


def _row(index: StepIndex, number: int) -> dict[str, Any]:
    path = rows_path(index.stem)
    if index.positions is not None:
        return read_row(path, index.positions[number])
    found = next((row for index, row in enumerate(read_rows(path)) if index == number), None)
    if found is None:
        raise AgentRlError(f"{path}: row {number} no longer exists")
    return found


def _logged(index: StepIndex, number: int, notes: list[str]) -> dict[str, Any]:
    """The row of a sample of an evaluation's directory, from its log."""
    root, result = index.stem.parent, index.results[number]
    name = str(log_of(index, number).relative_to(root))
    row: dict[str, Any] = {"messages": [], "turns": [], "error": result.error, "patch": result.patch}
    try:
        row |= json.loads(foreign.read(root, name))
    except FileNotFoundError:
        notes.append("no log: it was not graded")
    try:
        row["test_log"] = foreign.read(root, f"{name.removesuffix('.json')}.log").decode(errors="replace")
    except FileNotFoundError:
        row["test_log"] = ""
    row["task_id"], row["seconds"], row["stop"] = result.task_id, result.seconds, result.stop
    row["suspected_hack"] = list(result.suspected_hack)
    return row


def _branch_of(index: StepIndex, row: Mapping[str, Any], branch: int, *, routes: bool = True) -> Branch:
    path = arrays_path(rows_path(index.stem))
    return read_branch(row, branch, lambda name: read_arrays(path, [name])[name], routes=routes)


def _detail(index: StepIndex, branch_id: BranchId, notes: list[str]) -> StoredDetail | None:
    try:
        found = read_detail(index.stem, *branch_id)
    except AgentRlError as error:
        notes.append(str(error))
        return None
    if (
        found is None
        and index.columns["training_status"][branch_id[0]] == "trained"
        and not details_path(index.stem).is_file()
    ):
        notes.append("the trainer's token values were not recorded: monitoring.token_detail was off")
    return found


def _head(index: StepIndex, number: int, row: Mapping[str, Any]) -> Json:
    columns = index.columns
    siblings = [index for index, group in enumerate(columns["group"]) if group == columns["group"][number]]
    return {
        "id": f"{index.n}-{number}",
        "n": index.n,
        "step": index.step,
        **{name: columns[name][number] for name in _HEAD_COLUMNS},
        "siblings": [f"{index.n}-{sibling}" for sibling in siblings],
        "env": row.get("env", ""),
        "stop": row["stop"],
        "error": row.get("error", ""),
        "hacks": row["suspected_hack"],
        "parts": row.get("parts", {}),
        "metrics": row.get("metrics", {}),
        "model_calls": row.get("model_calls", []),
        "patch": row.get("patch", ""),
        "tests": row.get("tests", {}),
        "test_log": row.get("test_log", ""),
        "times": {
            "began": row.get("began") or None,
            "queue": row.get("queue_seconds"),
            "start": row.get("start_seconds"),
            "grade_began": row.get("grade_began") or None,
            "grade": row.get("grade_seconds"),
            "total": row["seconds"],
        },
    }


def _conversation(row: Mapping[str, Any]) -> Json:
    """The messages, and the turns with the indexes of their messages."""
    turns = row["turns"]
    rewards = row.get("turn_rewards") or [None] * len(turns)
    messages = row_messages(row)
    sampled: dict[int, int] = {}
    observed: dict[int, int] = {}
    for at, message in enumerate(
        fold_messages([dict(m) for m in messages], [(t["text"], t["observation"]) for t in turns])
    ):
        if isinstance(content := message["content"], Mapping):
            (sampled if "turn" in content else observed).setdefault(content.get("turn", content.get("observed")), at)
    return {
        "messages": messages,
        "turns": [
            {
                **turn,
                "branch": turn.get("branch", 0),
                "message": sampled.get(number),
                "observation_message": observed.get(number),
                "span": _span(turn),
                "began": turn.get("began"),
                "thinking_tokens": turn.get("thinking_tokens", 0),
                "thinking_chars": turn.get("thinking_chars", 0),
                "reward": reward,
                **spoken,
            }
            for number, (turn, reward, spoken) in enumerate(zip(turns, rewards, conversation(turns), strict=True))
        ],
    }


def _span(turn: Mapping[str, Any]) -> list[int] | None:
    """The turn's tokens in its branch; None for a turn without tokens and for one that a rule left out of training."""
    count, start = turn["completion_tokens"], turn["prompt_tokens"]
    return [start, start + count + turn.get("inserted_tokens", 0)] if count and not turn.get("left_out") else None


def _assign_branches(turns: Sequence[Json], sampled: Sequence[Sequence[Sequence[int]]]) -> None:
    """Set the branch of each turn of an agent program: the first that sampled the turn's token span and is not assigned
    for it yet."""
    assigned: set[tuple[int, int]] = set()
    for turn in turns:
        if turn["span"] is None:
            continue
        start, stop = turn["span"]
        if turn.get("inserted_tokens"):  # they end the thoughts; what follows is sampled
            start += turn["thinking_tokens"]
        for branch, spans in enumerate(sampled):
            if (branch, start) not in assigned and any(first <= start and stop <= last for first, last in spans):
                turn["branch"] = branch
                assigned.add((branch, start))
                break


def _spans(mask: NDArray[np.bool_]) -> list[list[int]]:
    """The ``[start, stop]`` spans in which the mask is set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def _values(detail: StoredDetail) -> Json:
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


def _map_both(detail: StoredDetail | None, make: Callable[[NDArray[np.bool_]], Any]) -> Json:
    return {
        name: None if found is None or found.layers is None else make(found.layers)
        for name, found in _both(detail).items()
    }


def _by_row(layers: NDArray[np.bool_], start: int, stop: int) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in layers[start:stop]]


def _pairs(layers: NDArray[np.bool_]) -> list[list[int]]:
    return np.argwhere(layers).tolist()


def _open_tokenizer(path: Path, stamp: str) -> tuple[TokenTexts | None, list[str]]:
    if not stamp:
        return None, ["the run's directory has no tokenizer.json: tokens are shown as numbers"]
    try:
        return TokenTexts(path), []
    except AgentRlError as error:
        return None, [f"tokens are shown as numbers: {error}"]
