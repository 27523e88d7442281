"""Questions about a directory of text files. Run: ``agent-rl envs check retrieval_tools:RetrievalTools``.

The directory is in a sandbox, so the agent cannot access other files of the machine.
"""

from __future__ import annotations

import random
import re
import shlex
from typing import Any, Literal

from pydantic import BaseModel, Field

from agent_rl.api import Sandbox, Task, ToolCall, ToolError, ToolResult

PLACES = ("Aachen", "Bergen", "Cordoba", "Dresden", "Evora", "Faro", "Ghent", "Haarlem")
FACTS = (
    "the bridge was built in {}",
    "the library holds {} maps",
    "the tower has {} steps",
    "the market has {} stalls",
)
MAX_HITS = 10


class RetrievalTools:
    """Find the answer in the documents: look with search and read, give the number with answer, then finish."""

    class Options(BaseModel):
        """The keys of env.options."""

        count: int = Field(200, gt=0, description="Tasks of each split.")
        documents: int = Field(6, gt=0, le=8, description="Documents of each task.")

    def __init__(self, options: Options, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        """Documents and a question for each task; the splits use different seeds."""
        first = 0 if split == "train" else 1_000_000
        return [_task(first + index, options.documents) for index in range(options.count)]

    async def setup(self, task: Task) -> str:
        """Write the documents into the sandbox; the question is the user's message."""
        self.expected: int = task.record["answer"]
        self.number: int | None = None
        self.finished = False
        self.names = sorted(task.record["documents"])
        await self.sandbox.write_files({n: text.encode() for n, text in task.record["documents"].items()})
        return f"{task.record['question']} The documents are {', '.join(self.names)}."

    async def search(self, words: str) -> str:
        """Find the lines that hold some words, in any document.

        Args:
            words: What to look for; upper and lower case are the same.
        """
        files = shlex.join(self.names)
        matches = await self.sandbox.exec(f"grep -iFn -m {MAX_HITS} -e {shlex.quote(words)} -- {files}", timeout=10)
        return matches.text.strip() or "(no line holds that)"

    async def read(self, document: str) -> str:
        """Read a whole document.

        Args:
            document: Its name.
        """
        if document not in self.names:
            raise ToolError(f"there is no document {document!r}; there are {', '.join(self.names)}")
        return (await self.sandbox.read_file(document)).decode()

    async def answer(self, number: int) -> str:
        """Give the answer; a later one replaces it.

        Args:
            number: The answer.
        """
        self.number = number
        return "noted"

    async def finish(self, command: Literal["submit"] = "submit") -> ToolResult:
        """Say that you are done.

        Args:
            command: Always submit.
        """
        self.finished = True
        return ToolResult("submitted", submitted=True)

    async def grade(self) -> float:
        """1 for the correct answer; 0.1 for a wrong but submitted one."""
        return 1.0 if self.number == self.expected else 0.1 * self.finished

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        """Search for the fact and answer with its number."""
        return [
            ToolCall("search", {"words": task.record["fact"]}),
            ToolCall("answer", {"number": task.record["answer"]}),
        ]


def _task(seed: int, count: int) -> dict[str, Any]:
    rng = random.Random(seed)
    places = rng.sample(PLACES, count)
    numbers = {place: [rng.randint(10, 1999) for _ in FACTS] for place in places}
    documents = {
        f"{place.lower()}.txt": "".join(
            f"In {place} {fact.format(number)}.\n" for fact, number in zip(FACTS, numbers[place], strict=True)
        )
        for place in places
    }
    place, index = rng.choice(places), rng.randrange(len(FACTS))
    answer = numbers[place][index]
    fact = f"In {place} " + re.sub(r" *\{\}.*", "", FACTS[index])
    question = f"{fact} ... complete the sentence: which number?"
    return {"id": f"town-{seed}", "documents": documents, "question": question, "fact": fact, "answer": answer}
