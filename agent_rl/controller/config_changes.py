"""Changes of a run's config between its start and a resumption: which are accepted, and their history.

A change is accepted unless the weights or the order of the tasks depend on the key from the first step on. Each change
is a line of ``config_history.jsonl``: the step after which it holds, the time, and the old and new values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from agent_rl.errors import ConfigError

HISTORY = "config_history.jsonl"

_DATA, _STATE = "it determines the tasks and their order", "the trained state depends on it"
_ROWS = "it determines the rows and their order"
FIXED: Mapping[str, str] = MappingProxyType(
    {
        "seed": _DATA,
        "model": _STATE,
        "env.name": _DATA,
        "env.options": _DATA,
        "env.scaffold": _DATA,
        "env.tool_style": _DATA,
        "train.sources": _DATA,
        "train.lora": _STATE,
        "train.freeze": _STATE,
        "train.ema": _STATE,
        "sft.data": _ROWS,
        "sft.batch_rows": _ROWS,
        "sft.batch_tokens": _ROWS,
        "sft.validation_share": _ROWS,
    }
)
"""Keys, or sections, that no resumption changes, with the reason."""
_OF_EPISODES = ("rollout", "async_rollout", "r3.source", "train.replay")
"""Keys that change how episodes are sampled. Such a change discards finished episodes that no step has used."""
_NOT_OF_EPISODES = ("rollout.concurrency", "rollout.recover", "rollout.sandbox_retries")


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """``values``: by key, the old and the new value. ``step``: the last step with the old values. ``time``: Unix
    time."""

    step: int
    time: float
    values: Mapping[str, tuple[Any, Any]]

    @property
    def changes_episodes(self) -> bool:
        """Whether episodes are sampled in another way from now on."""
        return any(_below(key, _OF_EPISODES) and not _below(key, _NOT_OF_EPISODES) for key in self.values)

    @property
    def text(self) -> str:
        """The change in one line."""
        changes = (f"{key} {old!r} -> {new!r}" for key, (old, new) in self.values.items())
        return f"after step {self.step}: {', '.join(changes)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of two resolved configs whose values differ, with both values."""
    before, after = _flatten(old), _flatten(new)
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def accept(values: Mapping[str, tuple[Any, Any]], directory: Path, step: int) -> ConfigChange:
    """The change after ``step`` of the run in ``directory``. Raises ConfigError for a key that must not change."""
    for key, (old, new) in values.items():
        for fixed, reason in FIXED.items():
            if _below(key, (fixed,)):
                raise ConfigError(
                    f"{key}: {directory} was started with {old!r}, the config now has {new!r}, and {reason}: "
                    "choose another name, or remove the directory to start over"
                )
    return ConfigChange(step, time.time(), values)


def append_change(directory: Path, change: ConfigChange) -> None:
    """Add ``change`` to the history of the run in ``directory``, unless a start that was killed then has added it."""
    changes = read_changes(directory)
    if changes and (changes[-1].step, changes[-1].text) == (change.step, change.text):
        return
    with (directory / HISTORY).open("ab") as file:
        file.write(orjson.dumps(asdict(change)) + b"\n")


def read_changes(directory: Path) -> list[ConfigChange]:
    """The accepted changes of the run in ``directory``, oldest first. A last line that a kill cut off is ignored."""
    path = directory / HISTORY
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [_decode(orjson.loads(line)) for line in lines]


def _decode(row: Mapping[str, Any]) -> ConfigChange:
    return ConfigChange(row["step"], row["time"], {key: (old, new) for key, (old, new) in row["values"].items()})


def _below(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flatten(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item})
    return flat
