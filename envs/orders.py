"""The environment ``orders``: an agent with tools on a small database of orders, and a customer who speaks to it.

The database is a set of pages. A page is a short text with one order::

    def ticket_open(count):       the order's item and state
        return count + 5          what it costs: the count, and a fee of 5

The customer wants the fee off. The agent looks the order up, takes the fee off if the order is open, and leaves it if
it was sent; then it finishes, or tells the customer. The tools and the form of the pages are those of the
demonstrations of ``tiny-moe`` (docs/research/starting-model.md), so that this small model can learn the environment
within minutes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, Field

from envs.types import Grade, Message, Task, TaskRecordError
from tools import ToolCall, ToolError, ToolResult

_ITEMS = (
    *("item", "label", "record", "batch", "line", "ticket", "token", "page", "budget", "row", "entry", "stock"),
    *("cost", "table", "letter", "word", "report", "title", "node", "part", "code", "tree", "map", "cat"),
)
_PAGES = ("orders", "stock", "pricing", "billing", "ledger", "labels", "report", "tables")
_PHRASES = ("{page}: cancel the fee of `{item}({count})`.", "Cancel the fee of `{item}({count})` in {page}.")
_OPEN_SHARE = 0.7
_HELDOUT_SHARE = 8  # one in so many orders is held out


class Orders:
    """Take the fee off an order in a small database if the order is open. The agent has tools and a customer."""

    class Options(BaseModel):
        """The keys of env.options."""

        train_tasks: int = Field(640, gt=0, description="Tasks of the split train.")
        heldout_tasks: int = Field(256, gt=0, description="Tasks of the split heldout.")
        seed: int = Field(0, description="Seed of the tasks.")

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        """Orders drawn from the seed. A hash of an order decides its split, whatever seed drew it."""
        if split not in ("train", "heldout"):
            raise TaskRecordError(f"environment orders has no split {split!r}; it has train, heldout")
        heldout = split == "heldout"
        count = options.heldout_tasks if heldout else options.train_tasks
        return list(islice(_orders(options.seed, heldout=heldout), count))

    async def setup(self, task: Task) -> list[Message]:
        """The customer's first message."""
        row = self.row = task.record
        self.page, self.text, self.looked, self.messages = f"{row['page']}.py", _text(row), False, 0
        user = _PHRASES[row["phrase"]].format(item=row["item"], count=row["count"], page=self.page)
        return [{"role": "system", "content": "Fix the order."}, {"role": "user", "content": user}]

    async def file_editor(
        self, command: Literal["view", "str_replace"], path: str, old_str: str = "", new_str: str = ""
    ) -> str:
        """Look an order up, or change it. A fee may only be taken off an open order; a sent order stays as it is.

        Args:
            command: view or str_replace.
            path: The page of the order.
            old_str: The text to replace, for str_replace. It must occur once.
            new_str: The text in its place.
        """
        if path != self.page:
            raise ToolError("no such page")
        if command == "view":
            self.looked = True
            return self.text
        if not old_str or self.text.count(old_str) != 1:
            raise ToolError("not found")
        self.text = self.text.replace(old_str, new_str)
        return "edited"

    async def finish(self, command: Literal["submit"] = "submit") -> ToolResult:
        """End the conversation.

        Args:
            command: Always submit.
        """
        return ToolResult("", submitted=True)

    async def respond(self, text: str) -> ToolResult:
        """The customer, who is content with what is right and otherwise says again where the order is."""
        self.messages += 1
        if self.looked and self.text == _right_text(self.row):
            return ToolResult("Thank you.", submitted=True)
        return ToolResult(f"It is `{self.row['item']}` in {self.page}.")

    async def grade(self) -> Grade:
        """1 if the agent looked the order up and left it as it has to be."""
        right = self.looked and self.text == _right_text(self.row)
        parts = {"right": float(right), "looked": float(self.looked)}
        return Grade(float(right), right, parts=parts, metrics={"messages": float(self.messages)})

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall | str]:
        """The calls, and what the agent says to the customer."""
        row, page = task.record, f"{task.record['page']}.py"
        look = ToolCall("file_editor", {"command": "view", "path": page})
        if row["state"] == "sent":
            return [look, "It was sent already."]
        change = {"command": "str_replace", "path": page, "old_str": f" + {row['fee']}", "new_str": ""}
        return [look, ToolCall("file_editor", change), "The fee is off."]


def _orders(seed: int, *, heldout: bool) -> Iterator[dict[str, Any]]:
    """Orders without end, none twice."""
    rng = random.Random(f"orders/{seed}/{heldout}")
    seen: set[str] = set()
    while True:
        row = {
            "page": rng.choice(_PAGES),
            "item": rng.choice(_ITEMS),
            "fee": rng.randint(2, 9),
            "state": "open" if rng.random() < _OPEN_SHARE else "sent",
        }
        name = "-".join(map(str, row.values()))
        side = hashlib.sha256(name.encode()).digest()[0] % _HELDOUT_SHARE == 0
        if side == heldout and name not in seen:
            seen.add(name)
            yield {"id": name, **row, "count": rng.randint(2, 9), "phrase": rng.randrange(len(_PHRASES))}


def _text(row: Mapping[str, Any]) -> str:
    return f"def {row['item']}_{row['state']}(count):\n    return count + {row['fee']}\n"


def _right_text(row: Mapping[str, Any]) -> str:
    return _text(row).replace(f" + {row['fee']}", "") if row["state"] == "open" else _text(row)
