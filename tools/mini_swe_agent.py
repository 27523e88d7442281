"""mini-swe-agent's one tool and its text format of calls, for models without native function calling.

github.com/SWE-agent/mini-swe-agent at a83fcae (MIT): ``src/minisweagent/models/utils/actions_text.py`` and
``models/litellm_textbased_model.py`` (calls), ``environments/docker.py`` (the shell, and the line that submits), and
``config/benchmarks/swebench_backticks.yaml`` (observations). A turn contains exactly one block with one command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sandbox import ExecResult, Sandbox
from tools.formats.grammars import literal, sequence
from tools.runtime import ToolRuntime
from tools.schema import check_nesting, check_text, function_schemas
from tools.text import Style
from tools.types import Form, ParseFailure, ToolCall, ToolError, ToolResult, ToolSet

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""A command that succeeds with this first line of output ends the task."""

_OPEN, _CLOSE = re.compile(r"```mswea_bash_command\s*\n"), "\n```"
_FORMAT_ERROR = """Format error:

<error>
Expected exactly 1 action, found {count}.
</error>

Here is general guidance on how to format your response:

Please always provide EXACTLY ONE action in triple backticks, found {count} actions.

Please format your action in triple backticks as shown in <response_example>.

<response_example>
Here are some thoughts about why you want to perform the action.

```mswea_bash_command
<action>
```
</response_example>

If you have completed your assignment, please consult the first message about how to
submit your solution (you will not be able to continue working on this task after that)."""

_MAX_CHARS = 10_000
_TOO_LONG = """<warning>
The output of your last command was too long.
Please try a different command that produces less output.
If you're looking at a file you can try use head, tail or sed to view a smaller number of lines selectively.
If you're using grep or find and it produced too much output, you can use a more selective search pattern.
If you really need to see something from the full command's output, you can redirect output to a file and then search in that file.
</warning>"""  # noqa: E501

# Merges both streams in order. The inner shell reports its own name in error messages, as without this wrapper.
_MERGED = 'exec bash -c "$1" 2>&1'
_VARIABLES = {"PAGER": "cat", "MANPAGER": "cat", "LESS": "-R", "PIP_PROGRESS_BAR": "off", "TQDM_DISABLE": "1"}


class MiniSweAgentFormat:
    """Implements :class:`tools.types.ToolCallFormat`: one block with a command for each turn."""

    name = "mini-swe-agent"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        commands = list(_commands(text))
        if len(commands) != 1:
            return ParseFailure(_FORMAT_ERROR.format(count=len(commands)))
        return ToolCall("bash", {"command": commands[0]})

    def render(self, call: ToolCall) -> str:
        return f"```mswea_bash_command\n{call.arguments['command']}\n```"

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`. The one tool is bash with a command."""
        if name != "bash" or list(parameters.get("properties") or ()) != ["command"]:
            raise ValueError(f"{self.name} writes calls of the tool bash with the one argument command")
        command = {"type": "any_text", "excludes": [_CLOSE]}
        return sequence(literal("```mswea_bash_command\n"), command, literal(_CLOSE))

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Empty: the scaffold's prompts describe the block."""
        return ""


def _commands(text: str) -> Iterator[str]:
    """The stripped commands of all blocks, in linear time."""
    position = 0
    while (opened := _OPEN.search(text, position)) is not None:
        end = text.find(_CLOSE, opened.end())
        if end < 0:
            # In a block of newlines only, the last newline belongs to the closing fence.
            if opened[0].count("\n") > 1 and text.startswith(_CLOSE, opened.end() - 1):
                yield ""
            return
        yield text[opened.end() : end].strip()
        position = end + len(_CLOSE)


def mini_swe_agent_tools(sandbox: Sandbox, *, style: Style = "full", timeout: float = 60.0) -> ToolSet:
    """``bash`` on ``sandbox``. ``timeout`` is in seconds for each command; ``style`` has no effect."""
    return MiniSweAgentTools(ToolRuntime(sandbox, style, timeout))


class MiniSweAgentTools:
    """Implements :class:`tools.types.ToolSet`. Each command runs in a new shell in the working directory."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        command = {"type": "string", "description": "The bash command to execute"}
        return function_schemas({"bash": ("Execute a bash command", {"command": command}, ("command",))})

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != "bash" or set(call.arguments) != {"command"}:
            return ToolResult("there is one tool, bash, with the argument 'command'", failed=True)
        try:
            check_nesting(call.arguments)
            command = str(call.arguments["command"])
            check_text("command", command)
            result = await self._runtime.run("bash", "-c", _MERGED, "-", command, env=_VARIABLES)
        except ToolError as error:
            return ToolResult(str(error), failed=True)
        output = result.stdout.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        lines = output.lstrip().splitlines()
        submitted = bool(lines) and lines[0].strip() == SUBMIT and result.ok
        return ToolResult(self._observation(command, result, output), submitted, failed=not result.ok)

    def _observation(self, command: str, result: ExecResult, output: str) -> str:
        message = f"Command {['bash', '-c', command]} timed out after {self._runtime.timeout:g} seconds"
        problem = f"<exception>An error occurred while executing the command: {message}</exception>\n"
        code = -1 if result.timed_out else result.exit_code
        return f"{problem if result.timed_out else ''}<returncode>{code}</returncode>\n{_truncate(output)}"


def _truncate(output: str) -> str:
    if len(output) < _MAX_CHARS:
        return f"<output>\n{output}</output>"
    half, omitted = _MAX_CHARS // 2, len(output) - _MAX_CHARS
    return (
        f"{_TOO_LONG}<output_head>\n{output[:half]}\n</output_head>\n"
        f"<elided_chars>\n{omitted} characters elided\n</elided_chars>\n"
        f"<output_tail>\n{output[-half:]}\n</output_tail>"
    )
