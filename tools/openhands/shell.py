"""OpenHands' ``execute_bash``: ``openhands/runtime/utils/bash.py``, worded by ``codeact_agent.py``.

One shell serves the whole task. The agent reads its command again, what it printed with the line ends of a terminal,
and the prompt after it.
"""

from __future__ import annotations

from sandbox import SessionResult, open_session
from tools.errors import ToolError
from tools.runtime import ToolRuntime

_MOST_CHARS = 30_000
_MOST_BYTES = 100_000  # in one argument of a command, with room for the session's own script
_INTERRUPTED = 130
_WHERE = 'printf \'%s\\n\' "$(id -un)" "${PWD/#$HOME/\\~}" "$(command -v python)"'


class Shell:
    """The shell of one episode on one sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime, self._session = runtime, open_session(runtime.sandbox)
        self._started = False

    async def run(self, command: str) -> tuple[str, int]:
        """What the agent reads, and the command's exit code."""
        if len(command.encode()) > _MOST_BYTES:
            raise ToolError(f"the command is longer than {_MOST_BYTES} bytes; write a file first")
        if not command:
            return await self._shown("", "", -1), -1
        if not self._started:
            await self._session.run(f"cd {self._runtime.sandbox.spec.workdir}", timeout=self._runtime.timeout)
            self._started = True
        ended = await self._session.run(f"{{ {command}\n}} 2>&1", timeout=self._runtime.timeout)
        code = _INTERRUPTED if ended.result.timed_out else ended.result.exit_code
        return await self._shown(command, self._printed(ended), code), code

    def _printed(self, ended: SessionResult) -> str:
        text = (ended.result.stdout + ended.result.stderr).decode("utf-8", errors="replace")
        printed = text.replace("\r\n", "\n").replace("\n", "\r\n")
        if not ended.result.timed_out:
            return printed
        late = f"Command timed out after {self._runtime.timeout:g} seconds. "
        return f"{printed}\r\n\r\n[{late}SIGINT was sent to interrupt the command.]"

    async def _shown(self, command: str, printed: str, code: int) -> str:
        where = await self._session.run(_WHERE, timeout=self._runtime.timeout)
        user, directory, python = [*where.result.text.split("\n"), "", "", ""][:3]
        prompt = f"{user}@openhands-workspace:{directory} {'#' if user == 'root' else '$'} "
        content = f"{command}\r\n{printed}".rstrip("\r\n")
        text = f"{content}[Python Interpreter: {python}]\n{prompt}" if python else f"{content}\r\n\n{prompt}"
        return f"{_shortened(text)}\n[Command finished with exit code {code}]"


def _shortened(text: str) -> str:
    half = _MOST_CHARS // 2
    cut = "\n[... Observation truncated due to length ...]\n"
    return text if len(text) <= _MOST_CHARS else f"{text[:half]}{cut}{text[-half:]}"
