"""``agent-rl show``: what agents did, turn by turn, from the directory of a run or an evaluation, or from one file.

::

    runs/<name>/ ── trajectories/step-NNNNNN.jsonl.zst ─┐
    an evaluation's directory ── logs/<task>/<n>.json ─────┼─▶ episodes ── --task, --sample ─▶ one: its turns; more:
    a list either kind of file ────────────────────────────────┘
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_rl.errors import AgentRlError, UserError
from agent_rl.rollout.jsonl_zst import SUFFIX, read_rows
from agent_rl.rollout.records import DIRECTORY, messages_of, steps_on_disk, trajectories_path
from sandbox import printable

CALL_TAGS = ("<tool_call>", "<function=")
LISTED = 40
"""Episodes in a list; the line below it says how many there are."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One episode: the ``sample``-th of its task in its file, and the ``row`` that was written of it."""

    task_id: str
    sample: int
    row: Mapping[str, Any]

    @property
    def outcome(self) -> str:
        reward = self.row.get("reward")
        resolved = "resolved" if self.row.get("resolved") else "not resolved"
        return resolved if reward is None else f"{resolved}, reward {reward:g}"


def show(
    path: Path, *, step: int | None, task: str | None, sample: int | None, as_list: bool, console: Console
) -> None:
    """Print the episode of ``path`` that is asked for, or a list where there are more. Raises UserError."""
    file = _file_of(path, step)
    try:
        _show(path, file, list(_episodes(file)), task=task, sample=sample, as_list=as_list, console=console)
    except UserError:
        raise
    except (AgentRlError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: no trajectories that can be shown ({type(error).__name__}: {error})") from None


def _show(
    path: Path,
    file: Path,
    found: Sequence[Shown],
    *,
    task: str | None,
    sample: int | None,
    as_list: bool,
    console: Console,
) -> None:
    chosen = [e for e in found if task in (None, e.task_id) and sample in (None, e.sample)]
    if not chosen:
        tasks = sorted({episode.task_id for episode in found})
        raise UserError(f"{file}: no such episode among its {len(found)}; tasks: {', '.join(tasks[:5])} ...")
    if len(chosen) == 1 and not as_list:
        console.print(_episode(chosen[0]))
        return
    console.print(_list(file, chosen))
    hidden = f"{len(chosen) - LISTED} more; " if len(chosen) > LISTED else ""
    first = chosen[0]
    command = shlex.join(["agent-rl", "show", str(path), "--task", first.task_id, "--sample", str(first.sample)])
    console.print(Text(f"{hidden}one of them: {command}"), soft_wrap=True)
    if steps := [] if path.is_file() else steps_on_disk(path):
        console.print(Text(f"steps: {steps[0]} to {steps[-1]} (--step)"))


def _file_of(path: Path, step: int | None) -> Path:
    """The file or directory that holds the episodes: of a run the step that is asked for, or its last one."""
    if path.is_file():
        return path
    if steps := steps_on_disk(path):
        if step is not None and step not in steps:
            raise UserError(f"--step {step}: {path} has trajectories of steps {steps[0]} to {steps[-1]}")
        return trajectories_path(path, steps[-1] if step is None else step)
    if (path / "logs").is_dir() and (path / "results.jsonl").is_file():
        return path
    below = sorted({file.parent for name in ("results.jsonl", DIRECTORY) for file in path.glob(f"*/**/{name}")})
    hint = f"; there are some in {below[0]}" if below else ""
    raise UserError(
        f"{path}: neither a run's directory with trajectories, nor an evaluation's, nor a file of one{hint}"
    )


def _episodes(file: Path) -> Iterator[Shown]:
    """The episodes in a JSONL of trajectories, in one log of an evaluation, or in all logs of its directory."""
    if file.is_dir():
        logs = (json.loads(log.read_text()) for log in sorted(file.glob("logs/*/*.json")))
        yield from (Shown(row["task_id"], row["sample"], row) for row in logs)
    elif file.name.endswith((".jsonl", SUFFIX)):
        yield from _numbered({**row, "messages": messages_of(row)} for row in read_rows(file))
    else:
        row = json.loads(file.read_text())
        yield Shown(row["task_id"], row["sample"], row)


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[Shown]:
    seen: Counter[str] = Counter()
    for row in rows:
        yield Shown(row["task_id"], seen[row["task_id"]], row)
        seen[row["task_id"]] += 1


def _list(file: Path, episodes: Sequence[Shown]) -> Table:
    table = Table("task", "sample", "outcome", "stop", "turns", "seconds", title=str(file), title_justify="left")
    for episode in episodes[:LISTED]:
        row = episode.row
        turns = str(len(row["turns"]))
        table.add_row(
            Text(episode.task_id), str(episode.sample), episode.outcome, row["stop"], turns, f"{row['seconds']:.1f}"
        )
    return table


def _episode(episode: Shown) -> RenderableType:
    row = episode.row
    head = f"{episode.task_id}, sample {episode.sample}: {episode.outcome}; {row['stop'] or row.get('error', '')}"
    parts: list[RenderableType] = [_plain(head, "bold")]
    for message in row["messages"]:
        if message["role"] == "assistant":
            break
        parts += [Rule(message["role"], align="left"), _plain(message["content"])]
    for number, turn in enumerate(row["turns"], 1):
        parts += _turn(number, turn)
    parts.append(Rule("end", align="left"))
    if hacks := row.get("suspected_hack"):
        parts.append(_plain(f"suspected hack: {', '.join(hacks)}", "red"))
    return Group(*parts, _plain(f"{head}; {len(row['turns'])} turns in {row['seconds']:.1f} s", "bold"))


def _turn(number: int, turn: Mapping[str, Any]) -> list[RenderableType]:
    """What the model wrote, the call that was read from it, and what it was shown in return."""
    call = f"calls {turn['tool']}" if turn["tool"] else "makes no call"
    times = f"{turn['generate_seconds']:.1f} s to write, {turn['tool_seconds']:.1f} s to run"
    parts: list[RenderableType] = [
        Rule(Text(f"turn {number} {call} ({turn['completion_tokens']} tokens, {times})"), align="left"),
        _plain(_before_call(turn) or "(nothing but the call)"),
    ]
    for name, value in turn["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        parts += [Text(f"{name}:", style="cyan"), Padding(_plain(text, "cyan"), (0, 0, 0, 2))]
    observed = "red" if turn["parse_failure"] else "dim"
    return [
        *parts,
        Text("observed:", style=observed),
        Padding(_plain(turn["observation"] or "(nothing)", observed), (0, 0, 0, 2)),
    ]


def _before_call(turn: Mapping[str, Any]) -> str:
    """What the model wrote, without the call that was read from it: its arguments are shown by themselves."""
    text = str(turn["text"])
    if not turn["tool"]:
        return text
    return min((text.partition(tag)[0] for tag in CALL_TAGS), key=len).rstrip()


def _plain(text: str, style: str = "") -> Text:
    """``text`` without what would steer a terminal or could not be encoded for it."""
    return Text(printable(text), style=style)
