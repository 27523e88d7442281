"""``agent-rl sft``: reads the rows of ``sft.data``, renders those without tokens, and starts the supervised run.

::

    episodes of a run     recorded tokens and loss mask, if the tokenizer is the model's ─┐
                          else messages ─┐                                                ├─▶ best_of ─▶ SftData
    rows of a file or hub     messages ──┴▶ conversation profile, tool format ────────────┘

A row that is not used is counted by reason and written to ``left_out.jsonl``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agent_rl.commands.rows import branches, episode_files, messages_of, tokenizer_name
from agent_rl.commands.show import READ_ERRORS, EpisodeRecord, episodes
from agent_rl.config import RunConfig, SftConfig, SftSource
from agent_rl.controller import preflight
from agent_rl.controller.preflight import Checked
from agent_rl.controller.rollout_runtime import call_format, chat_renderer
from agent_rl.controller.sft import SftData
from agent_rl.endpoint.dialects.chat import Chat
from agent_rl.endpoint.messages import RequestRejected
from agent_rl.endpoint.session import HarnessRenderer
from agent_rl.errors import TemplateError, UserError
from agent_rl.rollout.conversation_tree import ChatMessage
from agent_rl.types import SampledCall
from envs.rows import is_data_set_directory, read_rows
from envs.types import TaskRecordError
from tools import THINK, split_reasoning

Masked = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens ``[S]`` and loss mask ``[S]`` of a sequence."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not used: its name, the reason, and more about it."""

    name: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SftRow:
    """A row to train on. An episode of several branches has several sequences."""

    name: str
    task: str
    reward: float
    sequences: Sequence[Masked]


class RowRefusedError(Exception):
    """A row that cannot be used: the reason, and more about it."""


def prepare(config: RunConfig) -> tuple[Checked, SftData, list[str]]:
    """The checked config with ``train.steps``, its rows, and a line on each source. Raises UserError, one line."""
    checked = preflight.run(config, "sft")
    config, sft = checked.config, checked.config.sft
    assert sft is not None
    limit = min(config.train.microbatch_tokens, checked.model_spec.max_positions)
    reader = RowReader(config, limit, checked.model_spec.vocab_size)
    chosen, left_out, lines = list[tuple[SftRow, float]](), list[LeftOut](), list[str]()
    for source in sft.data:
        used, others = choose(reader.read(source), source)
        chosen += [(row, source.weight) for row in used]
        left_out += others
        lines.append(f"{source.path}: {len(used)} rows of {len({row.task for row in used})} tasks{_listed(others)}")
    if not chosen:
        raise UserError(f"sft.data: no row to train on; {'; '.join(lines)}")
    data = _split(chosen, sft, config.seed, [asdict(row) for row in left_out])
    steps = len(data.batches(sft, config.seed))
    train = config.train.model_copy(update={"steps": steps})
    lines.append(f"{len(data.train)} sequences, {len(data.heldout)} held out, {steps} steps")
    return Checked(config.model_copy(update={"train": train}), checked.model_spec, checked.cluster), data, lines


def choose(rows: Iterable[SftRow | LeftOut], source: SftSource) -> tuple[list[SftRow], list[LeftOut]]:
    """The rows to train on, in order, and the others."""
    by_task, used, others = defaultdict[str, list[SftRow]](list), list[SftRow](), list[LeftOut]()
    for row in rows:
        if isinstance(row, LeftOut):
            others.append(row)
        else:
            used.append(row)
            by_task[row.task].append(row)
    best = {id(row) for same in by_task.values() for row in sorted(same, key=lambda r: -r.reward)[: source.best_of]}
    others += [LeftOut(row.name, "beyond best_of") for row in used if id(row) not in best]
    return [row for row in used if id(row) in best], others


def _split(
    chosen: Sequence[tuple[SftRow, float]], sft: SftConfig, seed: int, left_out: Sequence[Mapping[str, str]]
) -> SftData:
    """Hold out the rows of some tasks. Raises UserError where none would be left."""
    tasks, heldout = sorted({row.task for row, _ in chosen}), set[str]()
    if sft.validation_share:
        count = max(1, round(sft.validation_share * len(tasks)))
        if count == len(tasks):
            raise UserError(
                f"sft.validation_share: {sft.validation_share:g} of {len(tasks)} task(s) leaves none to train"
            )
        heldout = {tasks[index] for index in np.random.default_rng(seed).permutation(len(tasks))[:count].tolist()}

    def weighted(*, held: bool) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        return [
            (tokens, mask.astype(np.float32) * np.float32(weight))
            for row, weight in chosen
            if (row.task in heldout) is held
            for tokens, mask in row.sequences
        ]

    return SftData(weighted(held=False), weighted(held=True), left_out)


def _listed(others: Sequence[LeftOut]) -> str:
    """Counts by reason, each with the first row and what is wrong with it."""
    counts, first = Counter(row.reason for row in others), dict[str, LeftOut]()
    for row in others:
        first.setdefault(row.reason, row)
    texts = [
        f"{count} {reason} ({first[reason].name}{': ' if first[reason].detail else ''}{first[reason].detail})"
        for reason, count in counts.most_common()
    ]
    return f"; left out: {', '.join(texts)}" if texts else ""


class RowReader:
    """Reads sources into rows for the model of ``config``. ``limit``: the most tokens of a sequence."""

    def __init__(self, config: RunConfig, limit: int, vocabulary: int) -> None:
        self._limit, self._vocabulary = limit, vocabulary
        self._tokenizer = tokenizer_name(config.model)
        self._renderer = chat_renderer(config)
        self._format = call_format(config, self._renderer)
        self._harness = HarnessRenderer.from_config(self._renderer, self._format, config.rollout)

    def read(self, source: SftSource) -> Iterator[SftRow | LeftOut]:
        """The rows of ``source`` in order. Raises UserError for one that cannot be read."""
        path = source.path  # a run has the file state.json too, by which a saved data set is known
        is_rows = not path.is_dir() or (is_data_set_directory(path) and not (path / "config.yaml").is_file())
        return self._chat_rows(source) if is_rows else self._episodes(source)

    def _episodes(self, source: SftSource) -> Iterator[SftRow | LeftOut]:
        same = tokenizer_name(source.path) == self._tokenizer
        for file in episode_files(source.path):
            try:
                for number, episode in enumerate(episodes(file)):
                    name = f"{file.name.partition('.')[0]}, episode {number}"
                    reward = episode.row.get("reward")
                    reward = float(episode.row["resolved"]) if reward is None else reward
                    yield self._row(name, episode.task_id, reward, source, _Episode(file, episode, same))
            except READ_ERRORS as error:
                raise UserError(f"{file}: no readable trajectories ({type(error).__name__}: {error})") from None

    def _chat_rows(self, source: SftSource) -> Iterator[SftRow | LeftOut]:
        try:
            for number, row in read_rows(source.path, source.split):
                name = f"{source.path.name}, row {number}"
                reward = None if isinstance(row, str) else row.get("reward")
                if isinstance(row, str):
                    yield LeftOut(name, "not readable", row)
                elif reward is not None and not isinstance(reward, int | float):
                    yield LeftOut(name, "not readable", f"reward: {reward!r:.40} is not a number")
                else:
                    reward = math.inf if reward is None else reward
                    yield self._row(name, str(row.get("task_id") or name), reward, source, row)
        except TaskRecordError as error:
            raise UserError(f"sft.data: {error}") from None

    def _row(
        self, name: str, task: str, reward: float, source: SftSource, given: _Episode | Mapping[str, Any]
    ) -> SftRow | LeftOut:
        if source.min_reward is not None and not reward >= source.min_reward:  # NaN is not
            return LeftOut(name, f"of a reward below {source.min_reward:g}")
        try:
            if isinstance(given, _Episode):
                sequences = given.recorded() or [self.render(given.chat_row())]
            else:
                sequences = [self._recorded(given) or self.render(given)]
            return SftRow(name, task, reward, [self._checked(*sequence) for sequence in sequences])
        except RowRefusedError as refused:
            return LeftOut(name, *refused.args)

    def _checked(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> Masked:
        if len(tokens) > self._limit:
            raise RowRefusedError(f"longer than {self._limit} tokens", f"{len(tokens)} tokens")
        if not mask[1:].any():
            raise RowRefusedError("without an assistant turn")
        return tokens, mask

    def _recorded(self, row: Mapping[str, Any]) -> Masked | None:
        """The tokens of a row that ``agent-rl rows`` wrote, if they are of the model's tokenizer."""
        if row.get("tokenizer") != self._tokenizer or "tokens" not in row:
            return None
        try:
            tokens, mask = np.array(row["tokens"], np.int32), np.array(row["loss_mask"], np.bool_)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RowRefusedError("not readable", f"tokens and loss_mask: {error}") from None
        if tokens.ndim != 1 or tokens.shape != mask.shape or not ((tokens >= 0) & (tokens < self._vocabulary)).all():
            raise RowRefusedError(
                "not readable", "tokens and loss_mask are not lists of equal length with the model's ids"
            )
        return tokens, mask

    def render(self, row: Mapping[str, Any]) -> Masked:
        """Tokens of a chat row and their loss mask: the assistant's turns, with thoughts, calls and the token that ends
        each. Raises RowRefusedError."""
        try:
            return self._render(row)
        except (RequestRejected, TemplateError, TypeError) as error:
            raise RowRefusedError("not rendered", " ".join(str(error).split())[:200]) from None

    def _render(self, row: Mapping[str, Any]) -> Masked:
        fields = {name: row[name] for name in ("messages", "tools") if row.get(name) is not None}
        request = Chat().read(orjson.dumps(_openai_form(fields)))
        messages = request.messages
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise RowRefusedError("without an assistant turn")
        if turns[0] == 0 or any(after == before + 1 for before, after in pairwise(turns)):
            raise RowRefusedError("not rendered", "an assistant's message follows no other message")
        parts = [(self._harness.initial_prompt(messages[: turns[0]], request.tools), False)]
        for start, end in pairwise([*turns, turns[-1]]):
            message = messages[start]
            thoughts, text = message.reasoning, message.text
            if not thoughts and text.lstrip().startswith(THINK.open):
                thoughts, text = split_reasoning(text.strip(), THINK)
            spoken = self._renderer.turn(self._format, thoughts, text.lstrip("\n"), message.calls)
            parts.append((spoken, True))
            if end > start:
                parts.append((self._between(message, messages[start + 1 : end], spoken), False))
        tokens = np.concatenate([np.array(part, np.int32) for part, _ in parts])
        return tokens, np.concatenate([np.full(len(part), trained) for part, trained in parts])

    def _between(self, turn: ChatMessage, messages: Sequence[ChatMessage], spoken: Sequence[int]) -> Sequence[int]:
        """The tokens from a turn to the next one, as in an episode."""
        if len(messages) == 1 and messages[0].role == "tool" and turn.calls:
            call = SampledCall(turn.calls[-1].name, self._renderer.decode(spoken))
            return self._renderer.observation(messages[0].text, stop=spoken[-1], call=call)
        return self._harness.extension(messages, stop=spoken[-1])


@dataclass(frozen=True, slots=True)
class _Episode:
    """An episode in ``file``. ``same``: its tokens are of the model's tokenizer."""

    file: Path
    record: EpisodeRecord
    same: bool

    def recorded(self) -> list[Masked]:
        """The sequences that were sampled; empty where they are unknown or of another tokenizer."""
        row = self.record.row
        if not row["turns"]:
            raise RowRefusedError("without a turn")
        if not self.same or "branches" not in row:
            return []
        return [(branch.tokens, branch.loss_mask) for branch in branches(self.file, row) if branch.loss_mask[1:].any()]

    def chat_row(self) -> Mapping[str, Any]:
        if len(self.record.row.get("branches", ())) > 1:
            raise RowRefusedError("of several branches and another tokenizer")
        return {"messages": messages_of(self.record.row)}


def _openai_form(value: Any) -> Any:
    """``value`` without nulls, which Parquet has for absent fields, with the arguments of calls as text, and with
    thoughts in ``reasoning_content``."""
    if isinstance(value, list | tuple):
        return [_openai_form(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    fields = {key: _openai_form(item) for key, item in value.items() if item is not None}
    if isinstance(fields.get("name"), str) and isinstance(fields.get("arguments"), Mapping):
        fields["arguments"] = orjson.dumps(fields["arguments"]).decode()
    if "role" in fields and isinstance(thoughts := fields.get("reasoning", fields.get("thinking")), str):
        fields.setdefault("reasoning_content", thoughts)
    return fields
