"""The environment ``orders``: an agent with tools on a small database of orders, and a customer who speaks to it.

The database is a set of pages. A page is a short text with one order::

    def ticket_open(count):       the order's item and state
        return count + 5          what it costs: the count, and a fee of 5

The customer wants the fee off. The agent looks the order up, takes the fee off if the order is open, and leaves it if
it was sent; then it finishes, or tells the customer, who may have further orders. The tools and the form of the pages
are those of the demonstrations of ``tiny-moe`` (docs/research/starting-model.md), so that this small model can learn
the environment within minutes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
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
_FEES, _STATES = range(2, 10), ("open", "sent")
_OPEN_SHARE = 0.7
_HELDOUT_SHARE = 8  # one in so many orders is held out


class Orders:
    """Take the fee off an order in a small database if the order is open. The agent has tools and a customer."""

    class Options(BaseModel):
        """The keys of env.options."""

        train_tasks: int = Field(640, gt=0, description="Tasks of the split train.")
        heldout_tasks: int = Field(256, gt=0, description="Tasks of the split heldout.")
        seed: int = Field(0, description="Seed of the tasks.")
        orders: int = Field(
            1, gt=0, le=len(_PAGES), description="Orders of an episode, which the customer names in turn."
        )

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        """Orders drawn from the seed. A hash of an order decides its split, whatever seed drew it.

        Raises ``TaskRecordError`` if the split has fewer different orders.
        """
        if split not in ("train", "heldout"):
            raise TaskRecordError(f"environment orders has no split {split!r}; it has train, heldout")
        heldout = split == "heldout"
        count = options.heldout_tasks if heldout else options.train_tasks
        drawn = _orders(options.seed, heldout=heldout)
        tasks = list(islice(drawn if options.orders == 1 else _in_turn(list(drawn), options), count))
        if len(tasks) < count:
            raise TaskRecordError(f"env.options.{split}_tasks: {count}: the split {split} has {len(tasks)} orders")
        return tasks

    async def setup(self, task: Task) -> list[Message]:
        """The customer's first message."""
        row = task.record
        self.rows = [row, *row.get("further", ())]
        self.texts, self.looked, self.messages = {_page(row): _text(row) for row in self.rows}, set[str](), 0
        self.named = 0
        return [{"role": "system", "content": "Fix the order."}, {"role": "user", "content": _request(row)}]

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
        if path not in self.texts:
            raise ToolError("no such page")
        if command == "view":
            self.looked.add(path)
            return self.texts[path]
        if not old_str or self.texts[path].count(old_str) != 1:
            raise ToolError("not found")
        self.texts[path] = self.texts[path].replace(old_str, new_str)
        return "edited"

    async def finish(self, command: Literal["submit"] = "submit") -> ToolResult:
        """End the conversation, or hear the next order.

        Args:
            command: Always submit.
        """
        return self._next("")

    async def respond(self, text: str) -> ToolResult:
        """The customer, who is content with what is right and otherwise says again where the order is."""
        self.messages += 1
        row = self.rows[self.named]
        return self._next("Thank you.") if self._right(row) else ToolResult(f"It is `{row['item']}` in {_page(row)}.")

    def _next(self, goodbye: str) -> ToolResult:
        """The customer's next order, or the end of the conversation."""
        self.named += 1
        ended = self.named == len(self.rows)
        return ToolResult(goodbye, submitted=True) if ended else ToolResult(_request(self.rows[self.named]))

    def _right(self, row: Mapping[str, Any]) -> bool:
        """Whether the agent looked the order up and left it as it has to be."""
        return _page(row) in self.looked and self.texts[_page(row)] == _right_text(row)

    async def grade(self) -> Grade:
        """The share of the orders that are right; resolved if all are."""
        right = sum(map(self._right, self.rows)) / len(self.rows)
        parts = {"right": right, "looked": len(self.looked) / len(self.rows)}
        return Grade(right, right == 1, parts=parts, metrics={"messages": float(self.messages)})

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall | str]:
        """The calls."""
        return [step for row in (task.record, *task.record.get("further", ())) for step in _solution(row)]


def _solution(row: Mapping[str, Any]) -> list[ToolCall | str]:
    look, finish = ToolCall("file_editor", {"command": "view", "path": _page(row)}), ToolCall("finish", {})
    if row["state"] == "sent":
        return [look, finish]
    change = {**look.arguments, "command": "str_replace", "old_str": f"return count + {row['fee']}"}
    return [look, ToolCall("file_editor", {**change, "new_str": "return count"}), finish]


def _orders(seed: int, *, heldout: bool) -> Iterator[dict[str, Any]]:
    """Every order of the split, in the order in which they are drawn."""
    rng = random.Random(f"orders/{seed}/{heldout}")
    every = itertools.product(_PAGES, _ITEMS, _FEES, _STATES)
    remaining = {name for fields in every if _is_heldout(name := "-".join(map(str, fields))) == heldout}
    while remaining:
        row = {
            "page": rng.choice(_PAGES),
            "item": rng.choice(_ITEMS),
            "fee": rng.randint(_FEES[0], _FEES[-1]),
            "state": _STATES[rng.random() >= _OPEN_SHARE],
        }
        name = "-".join(map(str, row.values()))
        if name in remaining:
            remaining.remove(name)
            yield {"id": name, **row, "count": rng.randint(2, 9), "phrase": rng.randrange(len(_PHRASES))}


def _is_heldout(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _HELDOUT_SHARE == 0


def _in_turn(rows: Sequence[Mapping[str, Any]], options: Orders.Options) -> Iterator[dict[str, Any]]:
    """Different tasks of several of the orders ``rows``, which are on different pages."""
    rng, seen = random.Random(f"orders in turn/{options.seed}"), set[str]()
    of_page = {page: [row for row in rows if row["page"] == page] for page in _PAGES}
    while True:
        first, *further = (rng.choice(of_page[page]) for page in rng.sample(_PAGES, options.orders))
        name = "_".join(row["id"] for row in (first, *further))
        if name not in seen:
            seen.add(name)
            yield {**first, "id": name, "further": further}


def _page(row: Mapping[str, Any]) -> str:
    return f"{row['page']}.py"


def _request(row: Mapping[str, Any]) -> str:
    return _PHRASES[row["phrase"]].format(item=row["item"], count=row["count"], page=_page(row))


def _text(row: Mapping[str, Any]) -> str:
    return f"def {row['item']}_{row['state']}(count):\n    return count + {row['fee']}\n"


def _right_text(row: Mapping[str, Any]) -> str:
    return _text(row).replace(f" + {row['fee']}", "") if row["state"] == "open" else _text(row)
