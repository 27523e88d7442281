"""Scripted demonstrations of how to fix a generated task, played with the real tools in real sandboxes.

The demonstrator knows the true fix. It is imperfect on purpose: a fixed share of its demonstrations submits without an
edit and another writes a wrong line, so that a model which imitates it knows how to fix a bug but often does not, and
reinforcement learning has something to teach. What it does is drawn at random, independent of the task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent_rl.errors import AgentRlError
from envs import EnvContext, Message
from envs.mini import MiniTask, opening, to_record
from sandbox import Sandbox
from tools import ParseFailure, ToolCall, ToolSet, swe_tools, tool_format

Dialogue = tuple[Message, ...]

_DEMOS_PER_SANDBOX = 100
_SANDBOXES = 2
_WORKDIR = "/testbed"
_FORMAT = tool_format("xml")


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """``unedited``: the share that submits right after looking; ``careless``: the share that writes a wrong line."""

    unedited: float = 0.40
    careless: float = 0.15

    def turns(self, task: MiniTask, rng: random.Random) -> list[str]:
        """What the demonstrator says, turn by turn."""
        draw = rng.random()
        view = _FORMAT.render(ToolCall("file_editor", {"command": "view", "path": task.path}))
        submit = _FORMAT.render(ToolCall("finish", {}))
        if draw < self.unedited:
            return [view, submit]
        careless = draw < self.unedited + self.careless and task.decoys
        new = rng.choice(task.decoys) if careless else task.new
        edit = {"command": "str_replace", "path": task.path, "old_str": task.old, "new_str": new}
        return [view, _FORMAT.render(ToolCall("file_editor", edit)), submit]


async def record_demonstrations(
    context: EnvContext,
    tasks: Sequence[MiniTask],
    demonstrator: Demonstrator,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[Dialogue]:
    """One demonstration a task, in the tasks' order; ``progress`` is called with how many more are done.

    Demonstrations share sandboxes, one after another: nothing of an earlier task is shown in a later one.
    """
    gate = asyncio.Semaphore(_SANDBOXES)

    async def record(start: int) -> list[Dialogue]:
        async with gate:
            chunk = tasks[start : start + _DEMOS_PER_SANDBOX]
            dialogues = await _record_chunk(context, chunk, demonstrator, random.Random(f"{seed}/{start}"))
        if progress is not None:
            progress(len(dialogues))
        return dialogues

    async with asyncio.TaskGroup() as group:
        parts = [group.create_task(record(start)) for start in range(0, len(tasks), _DEMOS_PER_SANDBOX)]
    return [dialogue for part in parts for dialogue in part.result()]


async def _record_chunk(
    context: EnvContext, tasks: Sequence[MiniTask], demonstrator: Demonstrator, rng: random.Random
) -> list[Dialogue]:
    async with context.sandbox(replace(context.limits, workdir=_WORKDIR)) as sandbox:
        return [await _record(sandbox, task, demonstrator.turns(task, rng)) for task in tasks]


async def _record(sandbox: Sandbox, task: MiniTask, turns: Sequence[str]) -> Dialogue:
    await sandbox.write_files({f"{_WORKDIR}/{path}": text.encode() for path, text in task.files.items()})
    tools = swe_tools(sandbox, style="concise")
    messages: list[Message] = list(opening(to_record(task).problem_statement))
    for turn in turns:
        messages.append({"role": "assistant", "content": turn})
        observation = await _answer(tools, turn, task)
        if observation is not None:
            messages.append({"role": "tool", "content": observation})
    return tuple(messages)


async def _answer(tools: ToolSet, turn: str, task: MiniTask) -> str | None:
    """What the tool says, None after a submit. Raises ``AgentRlError`` if a call of the script goes wrong."""
    call = _FORMAT.parse(turn)
    if isinstance(call, ParseFailure):
        raise AgentRlError(f"task {task.id}: the demonstrator's call does not parse: {call.reason}")
    result = await tools.call(call)
    if result.failed:
        raise AgentRlError(f"task {task.id}: the demonstrator's call failed: {result.text}")
    return None if result.submitted else result.text
