"""``agent-rl rows``: writes episodes as chat rows for supervised fine-tuning, one JSON object a line.

``messages`` have OpenAI's form, with ``reasoning_content`` and ``tool_calls``. Rows of a run also have ``tokens`` and
``loss_mask`` of the trajectory: the tokens that the engine sampled and no others have mask 1. ``tokenizer`` names the
tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agent_rl.commands.show import READ_ERRORS, EpisodeRecord, episodes
from agent_rl.errors import UserError
from agent_rl.rollout.readable_turns import conversation
from agent_rl.rollout.records import arrays_path, read_arrays, read_branch, steps_on_disk, trajectories_path
from agent_rl.types import Branch
from agent_rl.utils.run_files import write_atomic

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Which episodes become rows: ``unresolved`` ones too, and at most ``per_task`` of a task (None: all)."""

    unresolved: bool = False
    per_task: int | None = None


def write_rows(source: Path, out: Path, choice: RowChoice) -> str:
    """Write the episodes of the run or evaluation ``source`` to the new file ``out``; returns what was written, in one
    line. Raises UserError."""
    if out.exists():
        raise UserError(f"{out}: exists already")
    lines, counts, tasks = list[bytes](), Counter[str](), Counter[str]()
    tokenizer = tokenizer_name(source)
    for file in episode_files(source):
        try:
            for episode in episodes(file):
                if (reason := _left_out(episode, choice, tasks)) is not None:
                    counts[reason] += 1
                    continue
                tasks[episode.task_id] += 1
                lines += [orjson.dumps(row) + b"\n" for row in _rows(file, episode, tokenizer)]
        except READ_ERRORS as error:
            raise UserError(f"{file}: no readable trajectories ({type(error).__name__}: {error})") from None
    if not lines:
        raise UserError(f"{source}: no episode to write ({_listed(counts)})")
    write_atomic(out, b"".join(lines))
    return f"{out}: {len(lines)} rows of {len(tasks)} tasks ({_listed(counts)})"


def tokenizer_name(directory: Path) -> str | None:
    """A name of the tokenizer in the directory of a run or model; None where it has none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def episode_files(source: Path) -> Sequence[Path]:
    """The files of trajectories of a run, or the directory of an evaluation."""
    if steps := steps_on_disk(source):
        return [trajectories_path(source, step) for step in steps]
    if (source / "logs").is_dir() and (source / "results.jsonl").is_file():
        return [source]
    raise UserError(f"{source}: expected the directory of a run with trajectories, or of an evaluation")


def _left_out(episode: EpisodeRecord, choice: RowChoice, tasks: Counter[str]) -> str | None:
    """Why ``episode`` becomes no row; None if it does."""
    if not episode.row["turns"]:
        return "without a turn"
    if not _has_all_messages(episode.row):
        return "of several branches"
    if not (episode.row["resolved"] or choice.unresolved):
        return "not resolved"
    return "beyond --per-task" if choice.per_task == tasks[episode.task_id] else None


def _has_all_messages(row: Mapping[str, Any]) -> bool:
    """Whether the messages of all branches are known: not those of an agent program's further branches, nor those after
    a summary in an evaluation's directory."""
    if "branches" in row:
        return all("messages" in branch for branch in row["branches"][1:])
    return not any(turn.get("summary") for turn in row["turns"])


def _rows(file: Path, episode: EpisodeRecord, tokenizer: str | None) -> Iterator[Json]:
    """The rows of an episode, one a branch. A turn that a compaction kept is in the messages of two branches and has
    loss mask 1 in the first."""
    row = episode.row
    fields = {"task_id": episode.task_id, "reward": row.get("reward"), "resolved": row["resolved"]}
    if "branches" not in row:
        yield {**fields, "messages": messages_of(row)}
        return
    for number, branch in enumerate(branches(file, row)):
        messages = branch.messages if number else row["messages"]
        yield {
            **fields,
            "messages": list(_messages(messages, row["turns"])),
            "tokens": branch.tokens.tolist(),
            "loss_mask": branch.loss_mask.astype(int).tolist(),
            "tokenizer": tokenizer,
        }


def branches(file: Path, row: Mapping[str, Any]) -> list[Branch]:
    """The branches of the trajectory ``row`` in ``file``, without routes."""
    read = functools.partial(_array, arrays_path(file))
    return [read_branch(row, number, read, routes=False) for number in range(len(row["branches"]))]


def messages_of(row: Mapping[str, Any]) -> list[Json]:
    """The conversation of an episode's first branch in OpenAI's form."""
    return list(_messages(row["messages"], row["turns"]))


def _array(path: Path, name: str) -> Any:
    return read_arrays(path, [name])[name]


def _messages(messages: Sequence[Mapping[str, str]], turns: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    spoken, calls = zip(turns, conversation(turns), strict=True), list[Json]()
    number = 0
    for message in messages:
        if message["role"] == "assistant":
            turn = next(said for turn, said in spoken if turn["text"] == message["content"])
            calls = [_call(number + index, call) for index, call in enumerate(turn["calls"])]
            number += len(calls)
            thoughts = {"reasoning_content": turn["thoughts"]} if turn["thoughts"] else {}
            yield {"role": "assistant", "content": turn["said"], **thoughts, **({"tool_calls": calls} if calls else {})}
        elif message["role"] == "tool" and calls:
            yield {**message, "tool_call_id": calls[0]["id"]}
        else:
            yield {**message, "role": "user" if message["role"] == "tool" else message["role"]}


def _call(number: int, call: Mapping[str, Any]) -> Json:
    arguments = orjson.dumps(call["arguments"]).decode()
    return {"id": f"call_{number}", "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _listed(counts: Counter[str]) -> str:
    return "left out: " + (", ".join(f"{count} {reason}" for reason, count in counts.most_common()) or "none")
