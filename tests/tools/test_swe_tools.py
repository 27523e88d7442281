"""The tools in a real sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox import Sandbox
from sandbox.base import ForwardingSandbox
from tools import ToolCall, swe_tools

pytestmark = pytest.mark.bubblewrap

TWICE = "def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 1\n"


async def test_full_session(full) -> None:
    made = await full.edit("create", "pkg/deep/a.py", file_text=TWICE)
    assert (made.text, full.trips) == ("Created /testbed/pkg/deep/a.py.", 1)
    seen = await full.edit("view", "pkg/deep/a.py")
    path, first = "/testbed/pkg/deep/a.py", "     1\tdef f(a):\n     2\t    return a"
    assert seen.text.startswith(f"{path}, 6 lines:\n{first} + 1\n     3\t\n")
    assert full.trips == 1
    edited = await full.edit("str_replace", path, old_str="f(a):\n    return a + 1", new_str="f(a):\n    return a")
    assert edited.text.startswith(f"Edited {path}. It now reads:\n{first}\n")
    assert full.trips == 2
    assert await full.file("pkg/deep/a.py") == TWICE.replace("a + 1", "a", 1).encode()
    done = await full.call("finish", result="fixed")
    assert done.submitted
    assert full.trips == 0


async def test_concise_session(concise) -> None:
    assert (await concise.edit("create", "a.py", file_text=TWICE)).text == "created"
    assert (await concise.edit("view", "a.py")).text == TWICE.removesuffix("\n")
    assert (await concise.edit("view", "a.py", view_range="[5, -1]")).text == "def g(a):\n    return a + 1"
    assert (await concise.edit("str_replace", "a.py", old_str="a + 1", new_str="a")).text == "found 2 times"
    assert (await concise.edit("str_replace", "a.py", old_str="a + 2", new_str="a")).text == "not found"
    second = "g(a):\n    return a + 1"
    assert (await concise.edit("str_replace", "a.py", old_str=second, new_str="g(a):")).text == "edited"
    assert (await concise.edit("insert", "a.py", insert_line="5", new_str="    return 2")).text == "edited"
    assert (await concise.edit("view", "a.py", view_range=[5, 9])).text == "def g(a):\n    return 2"
    assert (await concise.edit("view", ".")).text == "a.py"
    assert (await concise.call("search", search_term="return")).text == "a.py:2:    return a + 1\na.py:6:    return 2"
    assert (await concise.call("execute_bash", cmd="python3 -c 'print(1)'")).text == "1"
    done = await concise.call("finish")
    assert (done.text, done.submitted, done.failed) == ("", True, False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"command": "view", "path": "nope"}, "no such file or directory: /testbed/nope"),
    ({"command": "view", "path": ""}, "path is empty"),
    ({"command": "view", "path": "x" * 5000}, "path is longer than 4000 bytes"),
    ({"command": "view", "path": "a", "view_range": [3, 4]}, "view_range [3, 4] starts past the end; the file has 2"),
    ({"command": "view", "path": "a", "view_range": [2, 1]}, "view_range [2, 1] is no range of lines"),
    ({"command": "view", "path": "a", "view_range": [1]}, "two numbers"),
    ({"command": "view", "path": "fifo"}, "no regular file or too large"),
    ({"command": "create", "path": "a", "file_text": ""}, "/testbed/a exists already"),
    ({"command": "create", "path": "b"}, "create needs the argument 'file_text'"),
    ({"command": "create", "path": "a/b", "file_text": ""}, "/testbed/a/b could not be written: "),
    ({"command": "str_replace", "path": "a"}, "str_replace needs the argument 'old_str'"),
    ({"command": "str_replace", "path": "nope", "old_str": "x"}, "no such text file: /testbed/nope"),
    ({"command": "str_replace", "path": ".", "old_str": "x"}, "no such text file: /testbed"),
    ({"command": "str_replace", "path": "a", "old_str": "", "new_str": "x"}, "old_str is empty"),
    ({"command": "str_replace", "path": "a", "old_str": "x", "new_str": "x"}, "are the same"),
    ({"command": "str_replace", "path": "a", "old_str": "y"}, "old_str does not occur in /testbed/a"),
    ({"command": "str_replace", "path": "a", "old_str": "x"}, "occurs 2 times in /testbed/a, at lines 1, 2."),
    ({"command": "insert", "path": "a", "insert_line": 3, "new_str": ""}, "insert_line must be from 0 to 2"),
    ({"command": "insert", "path": "a", "new_str": ""}, "insert needs the argument 'insert_line'"),
    ({"command": "insert", "path": "a", "insert_line": 0}, "insert needs the argument 'new_str'"),
    ({"command": "undo_edit", "path": "a"}, "there is no edit of /testbed/a to take back"),
]


async def test_a_wrong_edit_is_reported_and_changes_nothing(full) -> None:
    await full.call("execute_bash", cmd="printf 'x\\nx\\n' > a; mkfifo fifo")
    for arguments, line in WRONG:
        result = await full.call("file_editor", **arguments)
        assert line in result.text
        assert result.failed
        assert await full.file("a") == b"x\nx\n"


async def test_undo_goes_back_edit_by_edit_until_no_file(full) -> None:
    await full.edit("create", "a", file_text="1\n")
    await full.edit("str_replace", "a", old_str="1", new_str="2")
    await full.edit("insert", "a", insert_line=1, new_str="3")
    states = []
    for _ in range(3):
        states.append(await full.file("a"))
        assert not (await full.edit("undo_edit", "a")).failed
        assert full.trips == 1
    assert states == [b"2\n3\n", b"2\n", b"1\n"]
    assert (await full.edit("view", "a")).text == "no such file or directory: /testbed/a"
    assert (await full.edit("undo_edit", "a")).failed


INSERTS = [
    (b"", 0, "a", b"a\n"),
    (b"1\n2\n", 0, "a\nb\n", b"a\nb\n1\n2\n"),
    (b"1\n2\n", 1, "", b"1\n\n2\n"),
    (b"1\n2\n", 2, "a", b"1\n2\na\n"),
    (b"1\n2", 2, "a", b"1\n2\na"),
    (b"1\n2", 2, "a\n", b"1\n2\na\n"),
    (b"1\n2", 1, "a", b"1\na\n2"),
    (b"1\r\n2\r\n", 1, "a\nb\n", b"1\r\na\r\nb\r\n2\r\n"),
    (b"1\r\n2\r\n", 0, "a", b"a\r\n1\r\n2\r\n"),
    (b"1\r\n2\r\n", 2, "a\r\nb\n", b"1\r\n2\r\na\r\nb\r\n"),
    (b"1\r\n2", 2, "a\nb", b"1\r\n2\r\na\r\nb"),
    (b"1\r\n2\n", 1, "a", b"1\r\na\n2\n"),  # mixed already: what is put in stays as it was given
]


REPLACED = [
    (b"one\r\ntwo\r\n", "one", "1\n1b", b"1\r\n1b\r\ntwo\r\n"),
    (b"one\r\ntwo\r\n", "one\r\ntwo", "1\n2", b"1\r\n2\r\n"),
    (b"one\r\ntwo\r\n", "e\nt", "e\n\nt", b"one\r\n\r\ntwo\r\n"),
    (b"one\r\ntwo\nsix\n", "two\nsix", "2\n6", b"one\r\n2\n6\n"),
    (b"one\r\ntwo\nsix\n", "one\ntwo", "1\n2", b"1\r\n2\nsix\n"),
]


EDITS = [
    *(("insert", before, {"insert_line": line, "new_str": new}, after) for before, line, new, after in INSERTS),
    *(("str_replace", before, {"old_str": old, "new_str": new}, after) for before, old, new, after in REPLACED),
]


async def test_edits_keep_the_line_endings_of_the_file(full) -> None:
    for command, before, arguments, after in EDITS:
        await full.sandbox.write_files({"/testbed/a": before})
        assert not (await full.edit(command, "a", **arguments)).failed
        assert await full.file("a") == after


async def test_an_edit_keeps_mode_links_line_ends_and_foreign_bytes(full) -> None:
    await full.sandbox.write_files({"/testbed/run.sh": b"one\r\ntwo\r\n\xff\xfe\r\n"})
    await full.call("execute_bash", cmd="chmod 755 run.sh && ln -s run.sh link")
    assert not (await full.edit("str_replace", "link", old_str="one\ntwo", new_str="1\n2")).failed
    assert await full.file("run.sh") == b"1\r\n2\r\n\xff\xfe\r\n"
    assert (await full.call("execute_bash", cmd="stat -c %a run.sh; readlink link")).text == "755\nrun.sh"


async def test_paths_are_not_shell_code(full) -> None:
    name = "-a b'$(touch evil)\n*"
    await full.edit("create", name, file_text="x\n")
    assert await full.file(name) == b"x\n"
    await full.edit("str_replace", name, old_str="x", new_str="y")
    assert await full.file(name) == b"y\n"
    assert (await full.call("search", search_term="-y $(touch evil)", path=name)).text.startswith("No line")
    assert (await full.call("execute_bash", cmd="ls | wc -l")).text.strip() == "2"  # one name, with a newline in it


async def test_view_lists_two_levels_without_hidden(full) -> None:
    await full.call("execute_bash", cmd="mkdir -p d/e/f .git/x && touch d/e/f/deep d/y .git/config")
    listing = (await full.edit("view", ".")).text
    assert listing.splitlines()[1:] == ["d", "d/e", "d/y"]
    assert full.trips == 2


async def test_long_output_keeps_head_and_tail(full) -> None:
    text = (await full.call("execute_bash", cmd="seq 1 100000")).text
    assert len(text) <= 10_000
    assert text.startswith("1\n2\n")
    assert text.endswith("99999\n100000")
    assert "characters left out" in text


async def test_a_long_file_is_cut_at_a_line_and_can_be_read_on(full) -> None:
    await full.call("execute_bash", cmd="seq 100001 120000 > long")
    seen, parts = 0, 0
    while seen < 1500:
        text = (await full.edit("view", "long", view_range=[seen + 1, 1500])).text
        lines = text.splitlines()[1:]
        assert len(text) <= 10_000
        if note := lines[-1].startswith("[cut after line "):
            last, cut = seen + len(lines) - 1, lines.pop()
            assert cut == f"[cut after line {last}: view_range [{last + 1}, 20000] shows more, search finds lines]"
        assert [int(line.split()[1]) - 100_000 for line in lines] == list(range(seen + 1, seen + len(lines) + 1))
        seen, parts = seen + len(lines), parts + 1
        assert note == (seen < 1500)
    assert parts == 3


async def test_a_line_that_is_longer_than_an_answer_is_shown_by_its_ends(full) -> None:
    await full.call("execute_bash", cmd="head -c 50000 /dev/zero | tr '\\0' x > wide")
    text = (await full.edit("view", "wide")).text
    assert len(text) <= 10_000
    assert "characters left out" in text


class PathFirst(ForwardingSandbox):
    """A sandbox whose commands find programs in /testbed/bin first."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox.id, sandbox.spec)
        self._sandbox = sandbox

    async def _forward(self, method: str, *args: Any, **options: Any) -> Any:
        if method == "exec":
            options["env"] = {**(options.get("env") or {}), "PATH": "/testbed/bin:/usr/local/bin:/usr/bin:/bin"}
        return await getattr(self._sandbox, method)(*args, **options)

    async def close(self) -> None:
        """The fixture closes it."""


async def test_no_tool_needs_a_python_in_the_sandbox(full) -> None:
    """A repository's own may be old, or broken by the agent: whatever its name, it is never started."""
    for name in ("python", "python3", "env"):
        await full.sandbox.write_files({f"/testbed/bin/{name}": f"#!/bin/bash\necho {name} >> /tmp/started\n".encode()})
    await full.call("execute_bash", cmd="chmod +x bin/*")
    tools = swe_tools(PathFirst(full.sandbox))
    edits = [
        {"command": "view", "path": "a.py"},
        {"command": "view", "path": "a.py", "concise": True},
        {"command": "view", "path": "."},
        {"command": "create", "path": "b.py", "file_text": "x\n"},
        {"command": "str_replace", "path": "b.py", "old_str": "x", "new_str": "y"},
        {"command": "insert", "path": "b.py", "insert_line": 1, "new_str": "z"},
        {"command": "undo_edit", "path": "b.py"},
    ]
    others = [
        ("execute_bash", {"cmd": "echo hi > a.py"}),
        ("search", {"search_term": "hi"}),
        ("finish", {"result": ""}),
    ]
    for name, arguments in [*others, *(("file_editor", edit) for edit in edits)]:
        result = await tools.call(ToolCall(name, arguments))
        assert not result.failed, result.text
    assert (await full.call("execute_bash", cmd="cat /tmp/started")).failed  # never written
    await tools.call(ToolCall("execute_bash", {"cmd": "python3"}))
    assert (await full.call("execute_bash", cmd="cat /tmp/started")).text == "python3"  # and it would have been


async def test_bash_returns_exit_code_and_both_streams(full) -> None:
    result = await full.call("execute_bash", cmd="pwd; echo oops >&2; exit 3")
    assert (result.text, result.failed) == ("/testbed\noops\n[exit code 3]", True)
    assert full.trips == 1
    quiet = await full.call("execute_bash", cmd="true")
    assert (quiet.text, quiet.failed) == ("(no output)", False)


async def test_a_command_that_does_not_end_is_killed(sandbox) -> None:
    result = await swe_tools(sandbox, timeout=0.5).call(ToolCall("execute_bash", {"cmd": "echo on; sleep 60"}))
    assert result.failed
    assert result.text == "on\n[killed: no end after 0.5 seconds]"


async def test_a_command_too_long_for_the_system_is_a_failed_call(full) -> None:
    result = await full.call("execute_bash", cmd="true " + "x" * 200_000)
    assert result.failed
    assert "too long" in result.text


async def test_search(full) -> None:
    made = "mkdir -p d .git && printf 'a.b\\naxb\\n' > d/f && cp d/f .git/f && printf 'a.b\\0' > bin"
    await full.call("execute_bash", cmd=made)
    assert (await full.call("search", search_term="a.b")).text == "d/f:1:a.b"
    assert full.trips == 1
    assert (await full.call("search", search_term="b", path="d/f")).text == "d/f:1:a.b\nd/f:2:axb"
    assert (await full.call("search", search_term="a.b", path="/testbed/d")).text == "d/f:1:a.b"
    assert (await full.call("search", search_term="root:x:0", path="/etc/passwd")).text.startswith("/etc/passwd:1:root")
    assert (await full.call("search", search_term="B")).text == "No line in . holds 'B'."
    nowhere = await full.call("search", search_term="b", path="nope")
    assert (nowhere.text, nowhere.failed) == ("no such file or directory: nope", True)
    await full.call("execute_bash", cmd="for i in $(seq 10); do seq 100 | sed s/^/hit/ > h$i; done")
    many = (await full.call("search", search_term="hit")).text
    assert "[300 more matches; give a longer text or a smaller path]" in many


@pytest.mark.parametrize(
    ("term", "lines"),
    [
        ("^def", [1, 3]),
        ("def [fg]", [1, 3]),
        ("def f(x", [1]),  # no group: what code is made of is text
        ("x[0]", [2]),  # literally, though as an expression it is another text
        ("x[", [2]),  # no expression at all
        ("return.*x", [2, 4]),
        ("\\\\$", [4]),  # what ends in a backslash
        ("*", [4]),
        ("^return", []),
    ],
)
async def test_a_search_in_a_file_also_takes_a_regular_expression(full, term: str, lines: list[int]) -> None:
    text = "def f(x):\n    return x[0]\ndef g(x):\n    return 2 * x \\\nclass f:\n"
    await full.sandbox.write_files({"/testbed/m.py": text.encode()})
    numbered = dict(enumerate(text.splitlines(), 1))

    def found(numbers: list[int], where: str) -> str:
        return "\n".join(f"m.py:{n}:{numbered[n]}" for n in numbers) or f"No line in {where} holds {term!r}."

    assert (await full.call("search", search_term=term, path="m.py")).text == found(lines, "m.py")
    assert full.trips == 1
    literal = [number for number, line in numbered.items() if term in line]
    assert (await full.call("search", search_term=term)).text == found(literal, ".")
