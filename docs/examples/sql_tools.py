"""Questions about a small shop, answered with SQL on SQLite. Run: ``agent-rl envs check sql_tools:SqlTools``."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from typing import Any, Literal

from pydantic import BaseModel, Field

from agent_rl.api import Task, ToolCall, ToolError, ToolResult

ITEMS = ("apple", "bread", "cheese", "dates", "eggs", "figs")
MAX_ROWS = 20
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
MAX_STEPS = 100


class SqlTools:
    """Answer the question about the shop's sales. Look with run_query, give the number with answer, then finish."""

    class Options(BaseModel):
        """The keys of env.options."""

        count: int = Field(200, gt=0, description="Tasks of each split.")
        sales: int = Field(30, gt=0, description="Rows of the table.")

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[dict[str, Any]]:
        """A shop and a question for each task; the splits use different seeds."""
        first = 0 if split == "train" else 1_000_000
        return [_task(first + index, options.sales) for index in range(options.count)]

    async def setup(self, task: Task) -> str:
        """Fill a database in memory; the question is the user's message."""
        self.expected: int = task.record["answer"]
        self.number: int | None = None
        self.finished = False
        # Calls of an episode run one at a time, but in different threads.
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE sales (day INTEGER, item TEXT, amount INTEGER)")
        self.database.executemany("INSERT INTO sales VALUES (?, ?, ?)", task.record["sales"])
        self.database.commit()
        # From here on the database is read-only, and each query has a step limit.
        self.database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        steps = iter(range(MAX_STEPS))
        self.database.set_progress_handler(lambda: next(steps, None) is None, 100_000)
        return f"The table sales has the columns day, item and amount. {task.record['question']}"

    async def run_query(self, sql: str) -> str:
        """Run one SELECT and see its rows.

        Args:
            sql: The query, in SQLite's SQL.
        """
        try:
            rows = await asyncio.to_thread(lambda: self.database.execute(sql).fetchmany(MAX_ROWS))
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ToolError(f"SQLite says: {error}") from None
        return "\n".join(" | ".join(map(str, row)) for row in rows) or "(no rows)"

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

    async def close(self) -> None:
        """Close the database."""
        self.database.close()

    @classmethod
    def solution(cls, task: Task) -> list[ToolCall]:
        """The query that answers the question, and its answer."""
        return [
            ToolCall("run_query", {"sql": task.record["query"]}),
            ToolCall("answer", {"number": task.record["answer"]}),
        ]


def _task(seed: int, count: int) -> dict[str, Any]:
    rng = random.Random(seed)
    sales = [[rng.randint(1, 7), rng.choice(ITEMS), rng.randint(1, 50)] for _ in range(count)]
    item, day = rng.choice(ITEMS), rng.randint(1, 7)
    amounts = [amount for _, name, amount in sales if name == item]
    question, query, answer = rng.choice(
        [
            (
                f"What is the total amount of {item}?",
                f"SELECT COALESCE(SUM(amount), 0) FROM sales WHERE item = '{item}'",
                sum(amounts),
            ),
            (f"How many sales of {item} are there?", f"SELECT COUNT(*) FROM sales WHERE item = '{item}'", len(amounts)),
            (
                f"How many sales were made on day {day}?",
                f"SELECT COUNT(*) FROM sales WHERE day = {day}",
                sum(row[0] == day for row in sales),
            ),
        ]
    )
    return {"id": f"shop-{seed}", "sales": sales, "question": question, "query": query, "answer": answer}
