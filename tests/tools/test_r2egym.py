"""R2E-Gym's calls as its agent reads them, and where our tools differ from its scripts (docs/reference/tools.md).

``test_r2egym_scripts.py`` compares them with the scripts themselves.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sandbox import Sandbox, SandboxSpec
from tools import ParseFailure, ToolCall, ToolSet
from tools.r2egym import R2EGymFormat, r2egym_tools
from tools.r2egym.toolset import CONTINUE

NO_SANDBOX: Any = SimpleNamespace(id="none", spec=SandboxSpec())


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<function=search><parameter=a>1</parameter></function>", ("search", {"a": "1"})),
        ("Let me look.\n<function=search>\n  <parameter=a>\n 1 \n</parameter>\n</function>\n", ("search", {"a": "1"})),
        ("<function = search ></function>", None),
        ("<function= search ></function>", ("search", {})),
        ("<function=a><parameter=k>1</parameter> x <parameter=l>2</parameter></function>", ("a", {"k": "1", "l": "2"})),
        ("<function=a><parameter=k>1</parameter><parameter=k>2</parameter></function>", ("a", {"k": "2"})),
        ("<function=a><parameter=k>1<parameter=l>2</parameter></function>", ("a", {"k": "1<parameter=l>2"})),
        ("<function=a><parameter=k>1</parameter><parameter=l>2</function>", ("a", {"k": "1"})),
        ("<function=a></function><function=b></function>", ("a", {})),
        ("<think><function=a></function></think><function=b></function>", ("a", {})),
        ("<function=a><parameter=k>1</parameter>", None),
        ("<function=></function>", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_calls_are_read_leniently(text: str, call: tuple[str, dict[str, str]] | None) -> None:
    parsed = R2EGymFormat().parse(text)
    assert parsed == (ParseFailure(CONTINUE) if call is None else ToolCall(*call))


def test_a_call_is_written_as_in_the_turns_of_a_history() -> None:
    call = ToolCall("file_editor", {"command": "view", "path": "/testbed"})
    text = R2EGymFormat().render(call)
    assert text == (
        "<function=file_editor>\n  <parameter=command>view</parameter>\n"
        "  <parameter=path>/testbed</parameter>\n</function>"
    )
    assert R2EGymFormat().parse(text) == call


async def say(tools: ToolSet, tool: str, **arguments: str) -> str:
    return (await tools.call(ToolCall(tool, arguments))).text


@pytest.mark.bubblewrap
async def test_the_documented_differences(sandbox: Sandbox) -> None:
    tools = r2egym_tools(sandbox, timeout=1.0)
    edited = {"dos": b"one = 1\r\ntwo = 2\r\n", "bom": b"\xef\xbb\xbfone = 1\n", "latin": b"# caf\xe9\none = 1\n"}
    files = {**edited, "b": b"one = 1\n", "a": b"one = 1\n"}
    await sandbox.write_files({f"/testbed/{name}.py": data for name, data in files.items()})
    for name, data in edited.items():
        edit = {"command": "str_replace", "path": f"{name}.py", "old_str": "one = 1", "new_str": "one = 3"}
        assert "has been edited" in await say(tools, "file_editor", **edit)
        assert await sandbox.read_file(f"/testbed/{name}.py") == data.replace(b"one = 1", b"one = 3")
    assert "./a.py (1 matches)\n./b.py (1 matches)\n" in await say(tools, "search", search_term="one = 1")
    assert await say(tools, "execute_bash", cmd="echo \0") == "argument 'cmd' holds a NUL character; leave it out"
    assert "[STDOUT]\n\n\ufffd \n" in await say(tools, "execute_bash", cmd="printf '\\377'")
    assert await say(tools, "editor") == (
        "Invalid Action: input action must be one of allowed actions \n "
        "Allowed actions: ['file_editor', 'search', 'execute_bash', 'finish'] \n Input action: editor\t"
    )
    assert await say(tools, "execute_bash", cmd="sleep 30") == (
        "Exit code: -1\nExecution output of [execute_bash]:\nThe command took too long to execute (>1s)"
    )


async def test_finish_ends_with_any_arguments() -> None:
    result = await r2egym_tools(NO_SANDBOX).call(ToolCall("finish", {"command": "done"}))
    assert (result.text, result.submitted) == ("<<< Finished >>>", True)
