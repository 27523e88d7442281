"""R2E-Gym's four tools as one set: ``run_action`` and ``step`` in ``src/r2egym/agenthub/environment/env.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sandbox import Sandbox
from tools.errors import ToolError
from tools.r2egym.arguments import Stopped
from tools.r2egym.bash import Bash
from tools.r2egym.editor import FileEditor
from tools.r2egym.output import Output
from tools.r2egym.search import Search
from tools.runtime import ToolRuntime
from tools.schema import ToolOutline, check_levels, check_text, outlined
from tools.text import Style
from tools.types import ToolCall, ToolResult, ToolSet

_MOST_ARGUMENTS = 64  # argparse takes a time that grows with the square of their number
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_SCHEMAS: Mapping[str, ToolOutline] = {
    "file_editor": (
        "View, create and edit files: view, create, str_replace, insert, undo_edit.",
        dict.fromkeys(("command", "path", "file_text", "old_str", "new_str", "view_range", "concise"), _TEXT)
        | {"insert_line": _NUMBER},
        ("command", "path"),
    ),
    "search": ("Search for a term in a directory or a file.", {"search_term": _TEXT, "path": _TEXT}, ("search_term",)),
    "execute_bash": ("Execute a bash command in the terminal.", {"cmd": _TEXT}, ("cmd",)),
    "finish": ("Finish the interaction.", {"command": _TEXT, "result": _TEXT}, ("command",)),
}


def r2egym_tools(sandbox: Sandbox, *, style: Style = "full", timeout: float = 90.0) -> ToolSet:
    """``file_editor``, ``search``, ``execute_bash`` and ``finish`` on ``sandbox``, for one episode.

    ``timeout`` is in seconds for each command. There is one style of answer, R2E-Gym's own, which caps each as it does.
    """
    return R2EGymTools(ToolRuntime(sandbox, style, timeout))


class R2EGymTools:
    """Implements :class:`tools.types.ToolSet`. The editor's history lives in it."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._timeout = runtime.timeout
        self._tools: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Output]]] = {
            "file_editor": FileEditor(runtime).run,
            "search": Search(runtime).run,
            "execute_bash": Bash(runtime).run,
        }

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """What the tools take, in short; the interface's prompt has R2E-Gym's own description of them."""
        return outlined(_SCHEMAS)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run ``call``; ``finish`` ends the task, whatever its arguments."""
        if call.name == "finish":
            return ToolResult("<<< Finished >>>", submitted=True)
        if call.name not in self._tools:
            return ToolResult(_invalid(call.name), failed=True)
        try:
            output = await self._run(call)
        except ToolError as error:
            return ToolResult(str(error), failed=True)
        return ToolResult(output.observation(call.name, self._timeout), failed=bool(output.code or output.timed_out))

    async def _run(self, call: ToolCall) -> Output:
        if len(call.arguments) > _MOST_ARGUMENTS:
            raise ToolError(f"{len(call.arguments)} arguments; {_MOST_ARGUMENTS} are the most")
        check_levels(call.arguments)
        for name, value in call.arguments.items():
            check_text(name, str(value))
        try:
            return await self._tools[call.name](call.arguments)
        except Stopped as stopped:
            return Output(stopped.text, stopped.code)


def _invalid(name: str) -> str:
    """What R2E-Gym's environment says in its log; its agent reads of an unbound variable of the environment."""
    return (
        "Invalid Action: input action must be one of allowed actions \n "
        f"Allowed actions: {list(_SCHEMAS)} \n Input action: {name}\t"
    )
