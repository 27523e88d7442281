"""The command lines of R2E-Gym's tools and what their scripts print.

Arguments: ``src/r2egym/agenthub/tools/*.py``. A wrong argument gets argparse's usage and error message, 78 columns wide
as without a terminal, in the wording of the Python that runs this module. Output:
``src/r2egym/agenthub/runtime/docker.py`` (``run``) and ``src/r2egym/agenthub/observation/observation.py``.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_WIDTH = 78
_TIMEOUT_EXIT_CODE = 124  # of ``timeout``, under which R2E-Gym runs its tools
_CONTROL = re.compile(r"\x1b\[[0-9;]*m|\r")
_KEPT_LINES = 40
_RULE = "-" * 50


class CommandStopped(Exception):
    """The command line ends the tool before it runs: the text it prints, and the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text, self.code = text, code


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise CommandStopped(f"{self.format_usage()}{self.prog}: error: {message}\n", 2)

    def print_help(self, file: Any = None) -> NoReturn:
        raise CommandStopped(self.format_help(), 0)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The words after the tool's name: ``command`` first, then each argument after its option
    (``Action.to_bashcmd`` in ``src/r2egym/agenthub/action/action.py``)."""
    first = [str(arguments["command"])] if arguments.get("command") is not None else []
    return first + [word for k, v in arguments.items() if k != "command" for word in (f"--{k}", str(v))]


def parse_arguments(tool: str, arguments: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments of ``tool``. Raises ``CommandStopped`` for arguments that its command line rejects."""
    return _parsers()[tool].parse_args(command_line(arguments))


@functools.lru_cache(maxsize=1)
def _parsers() -> Mapping[str, argparse.ArgumentParser]:
    return {"file_editor": _file_editor(), "execute_bash": _execute_bash(), "search": _search()}


def _parser(name: str) -> argparse.ArgumentParser:
    formatter = functools.partial(argparse.HelpFormatter, width=_WIDTH)
    return _Parser(prog=name, formatter_class=formatter)  # type: ignore[arg-type]


def _file_editor() -> argparse.ArgumentParser:
    parser = _parser("file_editor")
    parser.add_argument("command")
    for name in ("--path", "--file_text"):
        parser.add_argument(name)
    parser.add_argument("--view_range", type=_view_range)
    for name in ("--old_str", "--new_str"):
        parser.add_argument(name)
    parser.add_argument("--insert_line", type=int)
    parser.add_argument("--enable_linting", type=bool, default=False)
    parser.add_argument("--concise", default="False")
    parser.add_argument("--python_only", type=bool, default=True)
    return parser


def _execute_bash() -> argparse.ArgumentParser:
    parser = _parser("execute_bash")
    parser.add_argument("--cmd", required=True)
    return parser


def _search() -> argparse.ArgumentParser:
    parser = _parser("search")
    parser.add_argument("--search_term", required=True)
    parser.add_argument("--path", default=".")
    parser.add_argument("--python_only", default=True)  # any text counts as true, also "False"
    return parser


def _view_range(text: str) -> Sequence[int]:
    """``[2, 4]``, ``(2, 4)``, ``2, 4`` or ``2 4``."""
    numbers = text.strip().strip("[]()")
    parts = numbers.replace(",", " ").split()
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"Expected two numbers, got: {numbers}")
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise argparse.ArgumentTypeError(f"Could not convert {parts} to integers.") from None


@dataclass(frozen=True, slots=True)
class Output:
    """The printed text of a tool and its exit code."""

    text: str
    code: int = 0
    timed_out: bool = False

    def observation(self, tool: str, timeout: float) -> str:
        """The observation after a call of ``tool``, which had a limit of ``timeout`` seconds."""
        text, code = self._text_and_code(timeout)
        if tool != "execute_bash":
            return f"Execution output of [{tool}]:\n{text}"
        return f"Exit code: {code}\nExecution output of [{tool}]:\n{_shorten(text)}"

    def _text_and_code(self, timeout: float) -> tuple[str, str]:
        if self.timed_out or self.code == _TIMEOUT_EXIT_CODE:
            return f"The command took too long to execute (>{timeout:g}s)", "-1"
        if self.code:
            return self.text, f"Error: Exit code {self.code}"
        return _CONTROL.sub("", self.text), "0"


def format_crash(error: Exception) -> str:
    """The traceback that a script prints when ``error`` ends it, without source lines."""
    return f"Traceback (most recent call last):\n{type(error).__name__}: {error}\n"


def _shorten(text: str) -> str:
    """The first and last 40 lines if there are more than 80."""
    lines = text.splitlines()
    if len(lines) <= 2 * _KEPT_LINES:
        return text
    note = "<Observation truncated in middle for saving context>"
    return "\n".join([*lines[:_KEPT_LINES], _RULE, note, _RULE, *lines[-_KEPT_LINES:]])
