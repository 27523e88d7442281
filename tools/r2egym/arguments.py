"""The command lines of R2E-Gym's tools, ``src/r2egym/agenthub/tools/*.py``: a call becomes the words of a command.

Mistakes are answered with argparse's own usage and error, as the scripts do. The usage is as wide as where there is no
terminal; its wording is that of the Python which runs this, where R2E-Gym's is that of the sandbox.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

_WIDTH = 78


class Stopped(Exception):
    """A command line that ends the tool at once: what it prints, and its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text, self.code = text, code


class _Parser(argparse.ArgumentParser):
    """One that neither prints nor exits."""

    def error(self, message: str) -> NoReturn:
        raise Stopped(f"{self.format_usage()}{self.prog}: error: {message}\n", 2)

    def print_help(self, file: Any = None) -> NoReturn:
        raise Stopped(self.format_help(), 0)


def words(arguments: Mapping[str, Any]) -> list[str]:
    """The words after the tool's name: ``command`` first, every other argument after its option
    (``Action.to_bashcmd`` in ``src/r2egym/agenthub/action/action.py``)."""
    first = [str(arguments["command"])] if arguments.get("command") is not None else []
    return first + [word for k, v in arguments.items() if k != "command" for word in (f"--{k}", str(v))]


def parse(tool: str, arguments: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments of ``tool``. Raises ``Stopped`` for those that its command line does not take."""
    return _parsers()[tool].parse_args(words(arguments))


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
    parser.add_argument("--python_only", default=True)  # any text counts as true, "False" too
    return parser


def _view_range(text: str) -> Sequence[int]:
    """``[2, 4]``, ``(2, 4)``, ``2, 4`` or ``2 4``."""
    strip = text.strip().strip("[]()")
    parts = strip.replace(",", " ").split()
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"Expected two numbers, got: {strip}")
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise argparse.ArgumentTypeError(f"Could not convert {parts} to integers.") from None
