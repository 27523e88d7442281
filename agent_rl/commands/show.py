"""``agent-rl show``: prints episodes turn by turn, from a run, an evaluation or a file.

::

    runs/<name>/trajectories/step-NNNNNN.jsonl.zst ─┐
    <evaluation>/logs/<task>/<n>.json               ├─▶ episodes ── --task, --sample ─▶ one: its turns; more: a list
    one file of either kind                         ─┘
"""

from __future__ import annotations

import functools
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_rl.errors import AgentRlError, UserError
from agent_rl.monitoring.console import cell
from agent_rl.rollout.jsonl_zst import SUFFIX, read_rows
from agent_rl.rollout.records import DIRECTORY, row_messages, steps_on_disk, trajectories_path
from agent_rl.utils import foreign
from sandbox import printable
from tools import ParseFailure, tool_format
from tools.formats import TOOL_FORMATS
from tools.types import CallScanner, MarksText

MAX_LISTED = 40
"""Episodes in a list. The line below it gives the number of hidden ones."""


MAX_TASKS = 5
"""Task ids in the message about no match."""
MAX_LOG_BYTES = 64 << 20
READ_ERRORS = (AgentRlError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions raised while reading a damaged file of episodes."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One recorded episode: sample number ``sample`` of its task, and its stored ``row``."""

    task_id: str
    sample: int
    row: Mapping[str, Any]

    @property
    def outcome(self) -> str:
        reward = self.row.get("reward")
        resolved = "resolved" if self.row.get("resolved") else "not resolved"
        return resolved if reward is None else f"{resolved}, reward {reward:g}"


@dataclass(slots=True)
class Selection:
    """What is kept of a file's episodes: the ``first`` match, rows of the list, counts, and the ids of a few tasks."""

    episodes: int = 0
    matches: int = 0
    first: EpisodeRecord = field(default_factory=lambda: EpisodeRecord("", 0, {}))
    listed: list[Sequence[Text]] = field(default_factory=list)
    tasks: set[str] = field(default_factory=set)


def show(
    path: Path, *, step: int | None, task: str | None, sample: int | None, as_list: bool, console: Console
) -> None:
    """Print the selected episode of ``path``, or a list if several match. Raises UserError."""
    file = _episode_file(path, step)
    try:
        selected = _select(episodes(file), task, sample)
        if not selected.listed:
            tasks = ", ".join(sorted(selected.tasks))
            raise UserError(f"{file}: no episode matches (it contains {selected.episodes}); tasks: {tasks} ...")
        if selected.matches == 1 and not as_list:
            console.print(_render_episode(selected.first))
        else:
            _print_list(path, file, selected, console)
    except UserError:
        raise
    except READ_ERRORS as error:
        raise UserError(f"{file}: no readable trajectories ({type(error).__name__}: {error})") from None


def _select(episodes: Iterable[EpisodeRecord], task: str | None, sample: int | None) -> Selection:
    selected = Selection()
    for episode in episodes:
        selected.episodes += 1
        if len(selected.tasks) < MAX_TASKS:
            selected.tasks.add(episode.task_id)
        if task not in (None, episode.task_id) or sample not in (None, episode.sample):
            continue
        selected.matches += 1
        if len(selected.listed) < MAX_LISTED:
            selected.listed.append(_table_row(episode))
        if selected.matches == 1:
            selected.first = episode
    return selected


def _print_list(path: Path, file: Path, selected: Selection, console: Console) -> None:
    table = Table("task", "sample", "outcome", "stop", "turns", "seconds", title=cell(str(file)), title_justify="left")
    for row in selected.listed:
        table.add_row(*row)
    console.print(table)
    hidden = f"{selected.matches - MAX_LISTED} more; " if selected.matches > MAX_LISTED else ""
    first = selected.first
    command = shlex.join(["agent-rl", "show", str(path), "--task", first.task_id, "--sample", str(first.sample)])
    console.print(cell(f"{hidden}to show one: {command}"), soft_wrap=True)
    if steps := [] if path.is_file() else steps_on_disk(path):
        console.print(Text(f"steps: {steps[0]} to {steps[-1]} (--step)"))


def _episode_file(path: Path, step: int | None) -> Path:
    """The file or directory with the episodes. For a run: the file of ``step``, by default the last one."""
    path = path.resolve()  # the user may name a link; links within the directory are not followed
    if path.is_file():
        return path
    if steps := steps_on_disk(path):
        if step is not None and step not in steps:
            raise UserError(f"--step {step}: {path} has trajectories of steps {steps[0]} to {steps[-1]}")
        return _regular(trajectories_path(path, steps[-1] if step is None else step))
    if (path / "logs").is_dir() and (path / "results.jsonl").is_file():
        return path
    below = sorted({file.parent for name in ("results.jsonl", DIRECTORY) for file in path.glob(f"**/{name}")})
    hint = f"; found some in {below[0]}" if below else ""
    raise UserError(
        f"{path}: expected the directory of a run with trajectories or of an evaluation, or one of their files{hint}"
    )


def episodes(file: Path) -> Iterator[EpisodeRecord]:
    """The episodes of a trajectory file, of one evaluation log, or of all logs of an evaluation directory."""
    if file.is_dir():
        for log in sorted(file.glob("logs/*/*.json")):
            yield logged(foreign.read(file, log.relative_to(file).as_posix(), MAX_LOG_BYTES))
    elif file.name.endswith((".jsonl", SUFFIX)):
        yield from _numbered({**row, "messages": row_messages(row)} for row in read_rows(file))
    else:
        yield logged(foreign.read(file.parent, file.name, MAX_LOG_BYTES))


def _regular(file: Path) -> Path:
    try:
        foreign.require_regular(file)
    except AgentRlError as error:
        raise UserError(f"{file}: {error}") from None
    return file


def logged(log: bytes) -> EpisodeRecord:
    """The episode in a sample's log. Raises the errors in :data:`READ_ERRORS` for anything else."""
    row = json.loads(log)
    return EpisodeRecord(row["task_id"], row["sample"], row)


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[EpisodeRecord]:
    samples: Counter[str] = Counter()
    for row in rows:
        yield EpisodeRecord(row["task_id"], samples[row["task_id"]], row)
        samples[row["task_id"]] += 1


def _table_row(episode: EpisodeRecord) -> Sequence[Text]:
    row = episode.row
    values = episode.task_id, episode.sample, episode.outcome, row["stop"], len(row["turns"]), f"{row['seconds']:.1f}"
    return [cell(str(value)) for value in values]


def _render_episode(episode: EpisodeRecord) -> RenderableType:
    row = episode.row
    head = f"{episode.task_id}, sample {episode.sample}: {episode.outcome}; {row['stop'] or row.get('error', '')}"
    parts: list[RenderableType] = [_printable_text(head, "bold")]
    for message in row["messages"]:
        if message["role"] == "assistant":
            break
        parts += [Rule(cell(message["role"]), align="left"), _printable_text(message["content"])]
    rewards = row.get("turn_rewards") or [None] * len(row["turns"])
    for number, (turn, reward) in enumerate(zip(row["turns"], rewards, strict=True), 1):
        parts += _render_turn(number, turn)
        if reward is not None:
            parts.append(_printable_text(f"reward of the turn: {reward:g}"))
    parts.append(Rule("end", align="left"))
    for name, numbers in (("reward parts", row.get("parts")), ("metrics", row.get("metrics"))):
        if numbers:
            listed = ", ".join(f"{key} {value:g}" for key, value in numbers.items())
            parts.append(_printable_text(f"{name}: {listed}"))
    for call in row.get("model_calls", ()):
        time = "cached" if call["cached"] else f"{call['seconds']:.1f} s"
        title = f"{call['client']} {call['model']}, {time}"
        last = call["messages"][-1]["content"]
        parts += [Rule(cell(title), align="left"), _printable_text(last, "dim"), _printable_text(call["response"])]
    if hacks := row.get("suspected_hack"):
        parts.append(_printable_text(f"suspected hack: {', '.join(hacks)}", "red"))
    return Group(*parts, _printable_text(f"{head}; {len(row['turns'])} turns in {row['seconds']:.1f} s", "bold"))


def _render_turn(number: int, turn: Mapping[str, Any]) -> list[RenderableType]:
    """The model's text, the parsed tool call and the observation."""
    call = f"calls {turn['tool']}" if turn["tool"] else "makes no call"
    if turn.get("summary"):
        call = "is a summary, with which a new branch begins"
    branch = f" of branch {turn['branch']}" if turn.get("branch") else ""
    times = f"generation {turn['generate_seconds']:.1f} s, tool {turn['tool_seconds']:.1f} s"
    parts: list[RenderableType] = [
        Rule(cell(f"turn {number}{branch} {call} ({_tokens(turn)}, {times})"), align="left"),
    ]
    if thoughts := turn.get("thinking_chars"):
        limited = ", closed at the limit" if turn.get("inserted_tokens") else ""
        parts.append(Text(f"thoughts: {thoughts} characters{limited}", style="dim"))
    if rule := turn.get("left_out"):
        parts.append(_printable_text(f"not trained: {rule}", "yellow"))
    parts.append(_printable_text(_before_call(turn) or "(no text before the call)"))
    for name, value in turn["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        parts += [_printable_text(f"{name}:", "cyan"), Padding(_printable_text(text, "cyan"), (0, 0, 0, 2))]
    observation_style = "red" if turn["parse_failure"] else "dim"
    return [
        *parts,
        Text("observation:", style=observation_style),
        Padding(_printable_text(turn["observation"] or "(empty)", observation_style), (0, 0, 0, 2)),
    ]


def _tokens(turn: Mapping[str, Any]) -> str:
    """The number of sampled tokens, as the endpoint counts them where the episode used one."""
    counts = turn.get("usage")
    count = turn["completion_tokens"] if counts is None else counts.get("completion", "an unknown number of")
    return f"{count} tokens"


def _before_call(turn: Mapping[str, Any]) -> str:
    """The model's text after its thoughts and before the tool call, whose arguments are printed separately."""
    text = str(turn["text"])[turn.get("thinking_chars", 0) :].lstrip("\n")
    if not turn["tool"]:
        return text
    found = (_text_before(fmt, text, turn["tool"]) for fmt in _scanning_formats())
    return min((before for before in found if before is not None), key=len, default=text).rstrip()


def _text_before(fmt: CallScanner, text: str, tool: str) -> str | None:
    """The text before the call of ``tool``; None if ``text`` has no such call in the format ``fmt``."""
    calls = fmt.scan(text, 0)
    if calls is None or isinstance(calls, ParseFailure) or calls[0][0].name != tool:
        return None
    before = text[: calls[1]]
    return fmt.plain_text(before) if isinstance(fmt, MarksText) else before


@functools.cache
def _scanning_formats() -> tuple[CallScanner, ...]:
    """The built-in formats that find a call's place. Rows do not name their format; no two formats read the same text
    as a call, except that a format may read the inner part of another's."""
    formats = [tool_format(name) for name in TOOL_FORMATS.built_in]
    return tuple(fmt for fmt in formats if isinstance(fmt, CallScanner))


def _printable_text(text: str, style: str = "") -> Text:
    """``text`` without control characters and characters that the terminal cannot encode."""
    return Text(printable(text), style=style)
