"""The tools of a software-engineering agent, with R2E-Gym's names and arguments."""

from __future__ import annotations

from sandbox import Sandbox
from tools.bash import Bash
from tools.editor import FileEditor
from tools.runtime import ToolRuntime
from tools.schema import AsyncFunction
from tools.search import Search
from tools.submit import Submit
from tools.text import MAX_CHARS, Style
from tools.toolset import FunctionToolSet
from tools.types import ToolSet


def swe_tools(sandbox: Sandbox, *, style: Style = "full", timeout: float = 90.0, max_chars: int = MAX_CHARS) -> ToolSet:
    """``execute_bash``, ``file_editor``, ``search`` and ``finish`` on ``sandbox``, for one episode.

    ``style="concise"`` answers in as few tokens as can be; the names and arguments are the same. ``timeout`` is in
    seconds for each command, ``max_chars`` caps each answer. The editor's undo history lives in the set returned.
    """
    runtime = ToolRuntime(sandbox, style, timeout, max_chars)
    functions: list[AsyncFunction] = [
        Bash(runtime).execute_bash,
        FileEditor(runtime).file_editor,
        Search(runtime).search,
        Submit(style).finish,
    ]
    return FunctionToolSet(functions, max_chars=max_chars)
