"""``agent-rl envs new NAME``: writes a working environment with a test and a config as a starting point."""

from __future__ import annotations

import keyword
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from envs.types import EnvsError

_ENVIRONMENT = '''"""The environment {name}: count letters. Replace tasks, tools and grade with your own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from agent_rl.api import Task, ToolCall, ToolError, ToolResult

WORDS = ("banana", "mississippi", "bookkeeper", "committee", "balloon")


class {class_name}:
    """Answer the question with the tools you have, then finish."""

    class Options(BaseModel):
        """The keys of env.options."""

        count: int = 100

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        """One row for each task, in a fixed order. The splits train and heldout must not share tasks."""
        first = 0 if split == "train" else options.count
        indexes = range(first, first + options.count)
        return [{{"word": WORDS[i % 5] * (1 + i // 5), "letter": "aeioun"[i % 6]}} for i in indexes]

    async def setup(self, task: Task) -> str:
        """Prepare one episode and return the user message."""
        self.word, self.letter = task.record["word"], task.record["letter"]
        self.number: int | None = None
        self.finished = False
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
        self.number = number
        return "noted; finish when you are done"

    async def finish(self, command: Literal["submit"] = "submit") -> ToolResult:
        """Say that you are done.

        Args:
            command: Always submit.
        """
        self.finished = True
        return ToolResult("submitted", submitted=True)

    async def grade(self) -> float:
        """The reward; 1.0 counts as resolved. A small reward for finishing gives an early learning signal."""
        return 1.0 if self.number == self.word.count(self.letter) else 0.1 * self.finished

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        """The calls that solve a task: used by `agent-rl eval --policy gold` and by the conformance checks."""
        return [ToolCall("answer", {{"number": task.record["word"].count(task.record["letter"])}})]
'''

_TEST = '''"""Checks that {class_name} meets the requirements of the training loop."""

from __future__ import annotations

import asyncio

from agent_rl.api import EnvContext, Finding, check_environment, load_environment, open_backend


async def failed_checks() -> list[Finding]:
    backend = open_backend("auto", run_id="test-{name}")
    try:
        environment = load_environment("{name}:{class_name}", EnvContext(backend=backend), {{"count": 5}})
        return [finding for finding in await check_environment(environment) if not finding.ok]
    finally:
        await backend.close()


def test_{name}_conforms() -> None:
    assert asyncio.run(failed_checks()) == []


if __name__ == "__main__":
    test_{name}_conforms()
    print("all checks passed")
'''

_CONFIG = """# Trains on {name}.py. Run these commands in the directory of both files:
#   agent-rl envs check {name}:{class_name}
#   agent-rl eval {name}.yaml --policy gold
#   agent-rl train {name}.yaml
name: {name}
# The shipped tiny-moe knows other tools and learns here only to finish. For real training set the directory of a
# Hugging Face checkpoint and remove the limits of `rollout`.
model: tiny-moe
env:
  name: {name}:{class_name}
  options: {{count: 100}}
engine: {{threads: 1, max_total_tokens: 65536}}
rollout:
  {{group_size: 8, tasks_per_step: 4, max_turns: 2, max_tokens: 512, max_new_tokens: 96, tool_format: xml,
   describe_tools: false}}
train: {{steps: 4, lr: 3.0e-4, microbatch_tokens: 8192, replay: r3}}
eval: {{tasks: 16, greedy: false}}
"""


FIRST = "letters"
"""The name of the environment of a new project."""

RESERVED_NAMES = frozenset({"agent_rl", "envs", "r3", "sandbox", "tools"})


class TemplateError(EnvsError):
    """The files cannot be files: one line for the user."""


@dataclass(frozen=True, slots=True)
class ProjectFiles:
    """The files of a new environment and its dotted path."""

    environment: Path
    test: Path
    config: Path
    dotted_path: str

    def next_steps(self) -> str:
        """The files files and the next commands, one for each line."""
        enter = "" if self.config.parent == Path() else f"cd {shlex.quote(str(self.config.parent))}\n  "
        return (
            f"wrote {self.environment}, {self.test}, {self.config}\nnext:\n  {enter}"
            f"agent-rl envs check {self.dotted_path}\n  agent-rl eval {self.config.name} --policy gold\n"
            f"  agent-rl train {self.config.name}"
        )


def write_template(name: str, directory: Path) -> ProjectFiles:
    """Write ``<name>.py``, ``test_<name>.py`` and ``<name>.yaml`` into ``directory``.

    Raises TemplateError for a name that is not a free module name, or if a file exists.
    """
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        raise TemplateError(f"{name!r} is not a valid module name; use lower-case letters, digits and _")
    if name in RESERVED_NAMES or name in sys.stdlib_module_names:
        raise TemplateError(f"{name!r} is the name of another module; choose another name")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    files = ProjectFiles(
        directory / f"{name}.py", directory / f"test_{name}.py", directory / f"{name}.yaml", f"{name}:{class_name}"
    )
    texts = {files.environment: _ENVIRONMENT, files.test: _TEST, files.config: _CONFIG}
    if existing := [path for path in texts if path.exists()]:
        raise TemplateError(f"{existing[0]}: exists already; choose another name or --directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text.format(name=name, class_name=class_name))
    return files
