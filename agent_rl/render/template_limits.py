"""Refuses a chat template that takes too long or writes too much, before this process renders it.

A template comes with a model's files, and twenty characters (``('%s' * 10**9) % ()``) can request any time and memory
in code that no signal interrupts, even while it is compiled. So a process of its own renders first what a start
renders: the probes of :mod:`agent_rl.render.prefix_check` and a long conversation.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from agent_rl.errors import TemplateError
from agent_rl.render.prefix_check import TAILS, around_thoughts, check_tail, probe
from agent_rl.render.template import ChatTemplate, Messages, Tools
from tools import THINK

CPU_SECONDS = 5
MAX_CHARACTERS = 16 << 20
MEMORY_BYTES = 1 << 30
WALL_SECONDS = 120.0
"""Limit on a machine that gives the process little CPU time."""
_TOO_LARGE = 3
_TURNS, _TURN_CHARACTERS = 50, 2000
_PROGRAM = "from agent_rl.render.template_limits import main; main()"


class _TooLargeError(Exception):
    pass


class _Measured(ChatTemplate):
    """A template that refuses to write more than :data:`MAX_CHARACTERS`."""

    def render(self, messages: Messages, tools: Tools | None, *, generation_prompt: bool = True) -> str:
        try:
            text = super().render(messages, tools, generation_prompt=generation_prompt)
        except TemplateError as error:
            if isinstance(error.__cause__, MemoryError):
                raise _TooLargeError from None
            raise
        if len(text) > MAX_CHARACTERS:
            raise _TooLargeError
        return text


def check_limits(source: str, special: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Raise TemplateError for a template beyond the limits. The result is kept for the life of this process."""
    _check(json.dumps([source, dict(special), dict(options)]))


@functools.lru_cache(maxsize=64)
def _check(template: str) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some builds of Python need it
        environment["LD_LIBRARY_PATH"] = libraries
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=template.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=WALL_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise TemplateError(f"the chat template was not rendered within {WALL_SECONDS:g} s") from None
    if ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TemplateError(f"the chat template takes more than {CPU_SECONDS} s of CPU time to render")
    if ended.returncode == _TOO_LARGE:
        raise TemplateError(f"the chat template writes more than {MAX_CHARACTERS >> 20} Mi characters")
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
        raise TemplateError(f"the chat template could not be tried: {lines[-1][:200]}")


def main() -> None:
    """Render the template on standard input within the limits. The exit code is the result."""
    source, special, options = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (_used_seconds() + CPU_SECONDS, _used_seconds() + CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with suppress(TemplateError):  # this process's own start reports it
            _render_all(_Measured(source, special, options), list(special.values()))
    except (_TooLargeError, MemoryError):
        os._exit(_TOO_LARGE)
    os._exit(0)


def _used_seconds() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(used.ru_utime + used.ru_stime) + 1


def _render_all(template: ChatTemplate, ends: list[str]) -> None:
    for role in ("tool", "user"):
        with suppress(TemplateError):
            probe(template, role, ends)
    for roles in TAILS:
        with suppress(TemplateError):
            check_tail(template, roles)
    around_thoughts(template, THINK)
    text = "word " * (_TURN_CHARACTERS // 5)
    turn = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    template.render([{"role": "system", "content": text}, *chain.from_iterable([turn] * _TURNS), turn[0]], None)
