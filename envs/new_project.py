"""``agent-rl envs new NAME``: a working environment with its test and config, to start your own from."""

from __future__ import annotations

import keyword
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from envs.types import EnvsError

_ENVIRONMENT = '''"""The environment {name}: count letters. Replace the tasks, the tools and the grade by your own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from agent_rl.api import Task, ToolCall, ToolError, ToolResult

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
        self.given = number
        return "noted; finish when you are done"

    async def finish(self, command: Literal["submit"] = "submit") -> ToolResult:
        """Say that you are done.

        Args:
            command: Always submit.
        """
        self.finished = True
        return ToolResult("submitted", submitted=True)

    async def grade(self) -> float:
        """The reward; 1.0 counts as resolved. A little for finishing in time is something to begin learning with."""
        return 1.0 if self.given == self.word.count(self.letter) else 0.1 * self.finished

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        """The calls that solve a task: `agent-rl eval --policy gold` and the conformance suite use them."""
        return [ToolCall("answer", {{"number": task.record["word"].count(task.record["letter"])}})]
'''

_TEST = '''"""{class_name} keeps every promise that the training loop relies on."""

from __future__ import annotations

import asyncio

from agent_rl.api import EnvContext, Finding, check_environment, load_environment, open_backend


async def broken_promises() -> list[Finding]:
    backend = open_backend("auto", run_id="test-{name}")
    try:
        environment = load_environment("{name}:{class_name}", EnvContext(backend=backend), {{"count": 5}})
        return [finding for finding in await check_environment(environment) if not finding.ok]
    finally:
        await backend.close()


def test_{name}_conforms() -> None:
    assert asyncio.run(broken_promises()) == []


if __name__ == "__main__":
    test_{name}_conforms()
    print("every promise is kept")
'''

_CONFIG = """# Trains on {name}.py. The directory with both is where these commands run:
#   agent-rl envs check {name}:{class_name}
#   agent-rl eval {name}.yaml --policy gold
#   agent-rl train {name}.yaml
name: {name}
# tiny-moe comes with the package. It knows other tools than these, and learns no more here than to finish in time: name
# the directory of a capable model's Hugging Face checkpoint instead, and take out the limits of `rollout`.
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
"""The environment of a new project."""

TAKEN = frozenset({"agent_rl", "envs", "r3", "sandbox", "tools"})


class TemplateError(EnvsError):
    """A template that cannot be written: one line."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a new environment, and the dotted path that names it."""

    environment: Path
    test: Path
    config: Path
    dotted_path: str

    def next_steps(self) -> str:
        """What was written, and the commands to go on with, a line each."""
        enter = "" if self.config.parent == Path() else f"cd {shlex.quote(str(self.config.parent))}\n  "
        return (
            f"wrote {self.environment}, {self.test}, {self.config}\nnext:\n  {enter}"
            f"agent-rl envs check {self.dotted_path}\n  agent-rl eval {self.config.name} --policy gold\n"
            f"  agent-rl train {self.config.name}"
        )


def write_template(name: str, directory: Path) -> Written:
    """Write ``<name>.py``, ``test_<name>.py`` and ``<name>.yaml`` into ``directory``.

    Raises TemplateError for a name that is no module's or is taken, or where a file is there already.
    """
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        raise TemplateError(f"{name!r} can't be a module's name: right would be lower-case letters, digits and _")
    if name in TAKEN or name in sys.stdlib_module_names:
        raise TemplateError(f"{name!r} is the name of another module, which would be imported instead: take another")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    written = Written(
        directory / f"{name}.py", directory / f"test_{name}.py", directory / f"{name}.yaml", f"{name}:{class_name}"
    )
    files = {written.environment: _ENVIRONMENT, written.test: _TEST, written.config: _CONFIG}
    if there := [path for path in files if path.exists()]:
        raise TemplateError(f"{there[0]}: is there already; give another name or --directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text.format(name=name, class_name=class_name))
    return written
