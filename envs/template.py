"""``agent-rl envs new NAME``: a working environment and its test, to start an own one from."""

from __future__ import annotations

from pathlib import Path

from envs.types import EnvsError

_ENVIRONMENT = '''"""The environment {name}: count letters. Replace the tasks, the tools and the grade by your own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from envs import Task
from tools import ToolCall, ToolError

WORDS = ("banana", "mississippi", "bookkeeper", "committee", "balloon")


class {class_name}:
    """Answer the question with the tools you have, then finish."""

    class Options(BaseModel):
        """What a config may set under env.options."""

        count: int = 100

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        """One row a task, the same every time; the splits train and heldout must not share tasks."""
        first = 0 if split == "train" else options.count
        places = range(first, first + options.count)
        return [{{"word": WORDS[at % 5] * (1 + at // 5), "letter": "aeioun"[at % 6]}} for at in places]

    async def setup(self, task: Task) -> str:
        """Make one episode ready and return what the user says."""
        self.word, self.letter = task.record["word"], task.record["letter"]
        self.given: int | None = None
        return f"How many times does the word of this task hold the letter {{self.letter!r}}?"

    async def read_word(self, start: int = 0, stop: int = 1000) -> str:
        """Read a part of the word.

        Args:
            start: The first letter's place, from 0.
            stop: The place after the last letter.
        """
        return self.word[start:stop] or "(nothing there)"

    async def answer(self, number: int) -> str:
        """Give your answer; a later one replaces it.

        Args:
            number: How many times.
        """
        if number < 0:
            raise ToolError("a number of times is 0 or more")
        self.given = number
        return "noted; finish when you are done"

    async def grade(self) -> float:
        """The reward; 1.0 counts as resolved."""
        return float(self.given == self.word.count(self.letter))

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        """The calls that solve a task: `agent-rl eval --policy gold` and the conformance suite use them."""
        return [ToolCall("answer", {{"number": task.record["word"].count(task.record["letter"])}})]
'''

_TEST = '''"""{class_name} keeps every promise that the training loop relies on."""

from __future__ import annotations

import pytest

from envs import EnvContext, load_environment
from envs.conformance import check_environment
from sandbox import open_backend


async def test_{name}_conforms() -> None:
    backend = open_backend("auto", run_id="test-{name}")
    try:
        environment = load_environment("{name}:{class_name}", EnvContext(backend=backend), {{"count": 5}})
        wrong = [finding for finding in await check_environment(environment) if not finding.ok]
        assert not wrong, wrong
    finally:
        await backend.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-o", "asyncio_mode=auto"]))
'''


class TemplateError(EnvsError):
    """A template that cannot be written: one line."""


def write_template(name: str, folder: Path) -> tuple[Path, Path]:
    """Write ``<name>.py`` and ``test_<name>.py`` into ``folder``; returns their paths.

    Raises TemplateError for a name that is no module's, or where a file is there already.
    """
    if not name.isidentifier() or name != name.lower():
        raise TemplateError(f"{name!r} can't be a module's name: right would be lower-case letters, digits and _")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    files = {folder / f"{name}.py": _ENVIRONMENT, folder / f"test_{name}.py": _TEST}
    if there := [path for path in files if path.exists()]:
        raise TemplateError(f"{there[0]}: is there already; give another name or --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text.format(name=name, class_name=class_name))
    environment, test = files
    return environment, test
