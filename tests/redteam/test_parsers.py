"""Fuzzing of the parsers of hostile text: each input gives a value or a named error, within seconds."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.trajectories import trajectory

from agent_rl.commands.show import show
from agent_rl.errors import AgentRlError
from agent_rl.evaluation.directory import read_results
from agent_rl.evaluation.quarantine import read_quarantine
from agent_rl.evaluation.saved import read_evaluation
from agent_rl.rollout.jsonl_zst import read_frames, read_rows
from agent_rl.rollout.records import (
    decode_trajectory,
    encode_trajectory,
    read_trajectories,
    write_trajectories,
)
from agent_rl.rollout.scripted_policies import recorded
from agent_rl.types import Group
from envs.mini import generate, to_record
from envs.swe.calls import CallRun
from envs.swe.diff.git_diff import diff_files, patched_paths, screen, split_patch
from envs.swe.pytest_log import judge_pytest_log, parse_summary
from tests.envs.conftest import BROKEN, FIXED

pytestmark = pytest.mark.redteam
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

SECONDS = 2.0
"""Maximum CPU time of one input, which is far below 1 MiB."""


def pieces(*words: str) -> st.SearchStrategy[str]:
    """Text of the words of a format, of any characters, and of one word repeated many times."""
    word = st.sampled_from(words)
    many = st.builds(lambda text, count: text * count, word, st.integers(1, 3000))
    return st.lists(word | many | st.text(max_size=8), max_size=12).map("".join)


def timed(read: Callable[[], object]) -> None:
    began = time.thread_time()
    read()
    assert time.thread_time() - began < SECONDS


GOLD = diff_files(BROKEN, FIXED)
PATCHES = pieces(
    *GOLD.splitlines(keepends=True),
    *("diff --git a/x b/y\n", 'diff --git "a/\\303\\244" "b/', "--- ", "+++ b/", "@@ -1,2 +1 @@\n"),
    *("@@ -0,0 +1,999999999 @@\n", "rename from a\n", "index 000..fff\n", "a/", "tests/", "/dev/null\t\n"),
    *("new file mode 100644\n", "deleted file mode 120000\n", "GIT binary patch\n"),
    *("+a\n", "-a\n", " \n", "\n", "\\ No newline at end of file\n", "\0", "\r", "\u2028"),
)  # fmt: skip


@fuzz
@given(PATCHES)
def test_any_patch_is_screened(patch: str) -> None:
    timed(lambda: screen(split_patch(patch), hidden=["tests/test_a.py", "a/b/test_c.py"], gold=GOLD))
    timed(lambda: patched_paths(patch))
    screened = screen(split_patch(patch), hidden=["tests/test_a.py"], gold=GOLD)
    assert patched_paths(screened.text) <= patched_paths(patch)


LOGS = pieces(
    *("=== short test summary info ===\n", "=", " - ", "[", "]", "PASSED ", "FAILED "),
    *("SUBFAILED(", "SUBFAILED[", "ERROR ", "SKIPPED [1] ", "XFAIL ", "a.py::test_a"),
    *("::", "\n", "\r\n", "\x1b[31m", "\x1b[", "\x1b[0;0;", " ", "\t", "\0"),
)  # fmt: skip
EXPECTED = {"a.py::test_a": "PASSED", "a.py::test_a[x - y]": "FAILED", "test_a": "PASSED"}


@fuzz
@given(LOGS)
def test_any_log_is_judged(log: str) -> None:
    timed(lambda: parse_summary(log, EXPECTED))
    timed(lambda: judge_pytest_log(log, EXPECTED))
    timed(lambda: judge_pytest_log(log, EXPECTED, "name"))


CALLS = CallRun(to_record(generate("train", 1, seed=0)[0]).calls, nonce="00" * 8)


@fuzz
@given(
    pieces(
        f"{CALLS.nonce} ", "0 ", "1 ", "\n", "[", "(", "-", "{", "9", "'", "\\N{", "1e999", "raises ", "lambda: ", "\0"
    )
)
def test_any_results_of_calls_are_read(log: str) -> None:
    timed(lambda: CALLS.summary(log))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=6,
)
RESULT = {"task_id": "a", "sample": 0, "resolved": True, "stop": "submitted", "turns": 1, "seconds": 1.0}
ROWS = [
    {**RESULT, "suspected_hack": []},
    {"task_id": "a", "turns": [{"text": "x"}], "messages": []},
    {"tasks": {"a": ["b"]}},
    {"outcomes": [{"task_id": "a"}], "env": "e", "policy": "p"},
]
KEYS = st.sampled_from(["task_id", "turns", "tasks", "format", "arrays", "group", "messages"])
LINE = (
    (st.sampled_from(ROWS) | st.dictionaries(KEYS, JSON) | JSON).map(lambda row: json.dumps(row).encode())
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"\0", b"1" * 5000])
    | st.binary(max_size=12)
)
LINES = st.lists(LINE, max_size=4).map(b"\n".join)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "trajectories").mkdir()
    return directory


def named_error_or_value(read: Callable[[], object]) -> None:
    with contextlib.suppress(AgentRlError):
        read()


@fuzz
@given(content=LINES)
def test_any_file_of_trajectories_is_read_or_refused(directory: Path, content: bytes) -> None:
    for name in ("x.jsonl", "x.json"):
        (directory / name).write_bytes(content)
    write_trajectories(directory, 1, [Group("t", (trajectory(1.0),), 0)]).write_bytes(
        zstandard.ZstdCompressor().compress(content)
    )
    console = Console(file=io.StringIO())
    rows, whole = directory / "x.jsonl", directory / "x.json"
    for read in (
        lambda: list(read_rows(rows)),
        lambda: read_trajectories(directory, 1),
        lambda: recorded(rows),
        lambda: read_results(rows),
        lambda: read_evaluation(str(rows)),
        lambda: read_evaluation(str(whole)),
        lambda: read_quarantine(whole),
        lambda: show(rows, step=None, task=None, sample=None, as_list=False, console=console),
        lambda: show(whole, step=None, task=None, sample=None, as_list=True, console=console),
    ):
        timed(lambda read=read: named_error_or_value(read))


ENCODED = encode_trajectory(trajectory(1.0))


@fuzz
@given(st.integers(0, len(ENCODED)), st.binary(max_size=30), st.booleans())
def test_any_bytes_are_a_trajectory_or_refused(offset: int, noise: bytes, truncate: bool) -> None:
    damaged = ENCODED[:offset] + noise + (b"" if truncate else ENCODED[offset + len(noise) :])
    timed(lambda: named_error_or_value(lambda: decode_trajectory(damaged, "x")))
    timed(lambda: list(read_frames(io.BytesIO(damaged))))


@fuzz
@given(JSON)
def test_any_metadata_is_a_trajectory_or_refused(row: object) -> None:
    head = json.loads(ENCODED[8 : 8 + int.from_bytes(ENCODED[:8], "little")])
    for metadata in ({"row": json.dumps(row)}, {"row": "[" * 50_000}, {"x": "y"}):
        text = json.dumps({**head, "__metadata__": metadata}).encode()
        body = ENCODED[8 + int.from_bytes(ENCODED[:8], "little") :]
        encoded = len(text).to_bytes(8, "little") + text + body
        named_error_or_value(lambda encoded=encoded: decode_trajectory(encoded, "x"))
