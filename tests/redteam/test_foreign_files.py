"""A run's directory from someone else: what its files say is shown, and nothing else of the machine is read or
written, however the directory was made."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import orjson
import pytest
import zstandard
from typer.testing import CliRunner

from agent_rl.cli.common import print_error
from agent_rl.cli.root import app
from agent_rl.commands.runs import run_view
from agent_rl.errors import UserError
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.viewer.api import Resources

pytestmark = pytest.mark.redteam

CAPTURED = Path(__file__).parent.parent / "captured" / "quickstart"
SECRET = "the-secret-of-this-host"
ROWS = "trajectories/step-000001"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CAPTURED, tmp_path / "foreign" / "run"))


def exported(run: Path) -> dict[str, bytes]:
    """Every file that an export of ``run`` writes, by its path; it writes below its own directory only."""
    out = run.parents[1] / "out"
    before = everything(out.parent)
    run_view([run], port=0, out=out, trajectories=4, open_browser=False)
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    outside = everything(out.parent) - before - {out} - set(out.rglob("*"))
    assert not outside, f"written outside of the export: {outside}"
    shutil.rmtree(out)
    return files


def everything(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


def edit(path: Path, change: Callable[[dict], None]) -> None:
    content = orjson.loads(path.read_bytes())
    change(content)
    path.write_bytes(orjson.dumps(content))


# Names from data


@pytest.mark.parametrize(
    "key",
    [
        "../../../../X",
        "step-6/../../../../X",
        "step-6/sampled/../../../../../X",
        "/etc/X",
        "step-6/..",
        "..",
        "",
        "step-6/sampled\0",
        "step-6/sampled\n",
        "step-\u0666/sampled",
        "step-" + "9" * 5000 + "/sampled",
        "eval/../../X",
    ],
    ids=lambda key: repr(key[:30]),
)
def test_a_key_of_the_state_names_no_file(foreign: Path, key: str) -> None:
    edit(foreign / "state.json", lambda state: state["evaluations"].update({key: {"pass_at_1": 1.0}}))
    files = exported(foreign)
    assert {name for name in files if "/eval/" in name} == {f"data/0/eval/step-{n}/sampled.json" for n in (0, 3, 6)}
    assert "is no evaluation" in files["data/0/run.json"].decode()
    print(f"{key[:40]!r}: a note, no file")


def test_a_file_whose_name_is_no_step_is_not_shown(foreign: Path) -> None:
    for name in ("step-6-..", "step-000006-x y", "step-\u0666-sampled", "..-sampled"):
        shutil.copyfile(foreign / f"{ROWS}.jsonl.zst", foreign / "evaluations" / f"{name}.jsonl.zst")
    names = [name for name in exported(foreign) if name.startswith("data/0/steps/eval")]
    assert names == ["data/0/steps/eval-6-sampled.json"]


# Links, pipes


def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.yaml"
    path.write_text(f"password: {SECRET}\n")
    return path


LINKED = (
    "config.yaml", "state.json", "summary.json", "metrics.jsonl", "guard.jsonl", "tokenizer.json",
    f"{ROWS}.jsonl.zst", f"{ROWS}.index.json.zst", f"{ROWS}.safetensors", f"{ROWS}.train.safetensors",
    "evaluations/step-000006-sampled.report.json",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_a_file_of_the_host_is_not_followed(foreign: Path, tmp_path: Path, name: str) -> None:
    """Neither to a file of another form, nor to one of the same."""
    path = foreign / name
    twin = tmp_path / "twin"
    if path.exists():
        shutil.copyfile(path, twin)
        path.unlink()
    for target in (secret(tmp_path), twin):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        files = exported(foreign)
        assert not any(SECRET.encode() in body for body in files.values())
        if target.exists():
            said = b"".join(files[name] for name in files if name.startswith("data/"))
            assert b"a link; links in a run" in said, name
    print(f"{name}: a note that it is a link")


def test_a_directory_that_is_a_link_is_not_followed(foreign: Path, tmp_path: Path) -> None:
    for name in ("trajectories", "evaluations"):
        shutil.move(foreign / name, tmp_path / name)
        (foreign / name).symlink_to(tmp_path / name)
    columns = Resources([foreign]).read("0/trajectories")
    assert columns["total"] == 0
    assert "a link" in str(columns["notes"])


def test_the_log_of_an_evaluation_is_read_through_no_link(tmp_path: Path) -> None:
    run = tmp_path / "foreign" / "run"
    logs = run / "logs" / "task"
    logs.mkdir(parents=True)
    result = EpisodeResult("task", 0, True, "submitted", 1, 1.0)
    (run / "results.jsonl").write_bytes(orjson.dumps(result) + b"\n")
    (tmp_path / "0.json").write_text(f'{{"messages": [{{"role": "user", "content": "{SECRET}"}}], "turns": []}}')
    (logs / "0.json").symlink_to(tmp_path / "0.json")
    (logs / "0.log").symlink_to(secret(tmp_path))
    resources = Resources([run])
    assert SECRET not in resources.body("0/t/eval-0").decode()
    logs.rename(tmp_path / "task")
    logs.symlink_to(tmp_path / "task")
    assert SECRET not in resources.body("0/t/eval-0").decode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*LINKED, "results.jsonl", "journal/step-000099.journal"])
def test_a_pipe_stops_nobody(foreign: Path, name: str) -> None:
    path = foreign / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    resources = Resources([foreign])
    for page in (*resources.pages(), "0/live", "0/t/1-0"):
        resources.body(page)


# Sizes


def bounded(run: Path, seconds: float = 60.0, memory_mb: int = 3000) -> str:
    """What an export of ``run`` in a process of bounded memory printed; it must end by itself."""
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({memory_mb << 20},) * 2)\n"
        "import sys\nfrom pathlib import Path\nfrom agent_rl.viewer.api import Resources\n"
        "resources = Resources([Path(sys.argv[1])])\n"
        "for page in (*resources.pages(), '0/t/1-0', '0/routes/1-0', '0/live'): print(resources.body(page)[:500])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def aliases(depth: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [aliases(10), "a: &a [*a]", "[" * 50_000, "a: !!binary aGVsbG8=", "a: !!python/object/apply:os.system [id]",
     "a: " + "1" * 10_000, "x: " + "y" * 1_000_000],
    ids=["aliases", "itself", "nested", "bytes", "python", "digits", "long"],
)  # fmt: skip
def test_a_config_expands_to_nothing_large(foreign: Path, text: str) -> None:
    (foreign / "config.yaml").write_text(text)
    started = time.monotonic()
    exported(foreign)
    assert time.monotonic() - started < 30


def frame_claiming(size: int) -> bytes:
    """A frame whose header claims ``size`` bytes and whose body has none."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


def bomb(size: int) -> bytes:
    """``size`` zero bytes, in a frame that claims nothing."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    parts = [compressor.compress(bytes(1 << 24)) for _ in range(size >> 24)]
    return b"".join([*parts, compressor.flush()])


@pytest.mark.parametrize("name", [f"{ROWS}.jsonl.zst", f"{ROWS}.index.json.zst"])
@pytest.mark.parametrize("content", [frame_claiming(1 << 60), bomb(6 << 30)], ids=["claimed", "expanding"])
def test_a_frame_takes_bounded_memory(foreign: Path, name: str, content: bytes) -> None:
    (foreign / f"{ROWS}.index.json.zst").unlink()
    (foreign / name).write_bytes(content)
    bounded(foreign)


@pytest.mark.parametrize("name", [*LINKED[:4], "tokenizer.json", f"{ROWS}.safetensors"])
def test_a_sparse_file_takes_no_memory(foreign: Path, name: str) -> None:
    os.truncate(foreign / name, 1 << 40)
    bounded(foreign)


def test_a_tensor_of_a_sparse_file_takes_no_memory(foreign: Path) -> None:
    path = foreign / f"{ROWS}.train.safetensors"
    size = 60 << 30
    header = orjson.dumps({"loads": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    assert "elements" in bounded(foreign)


@pytest.mark.parametrize("name", ["state.json", "summary.json", "metrics.jsonl"])
def test_a_value_that_no_json_has_is_damage(foreign: Path, name: str) -> None:
    deep = "[" * 900 + "]" * 900
    rows = {"state.json": f'{{"resumes": {deep}}}', "summary.json": f'{{"a": {deep}}}'}
    (foreign / name).write_text(rows.get(name, f'{{"step": 1, "a": {deep}}}'))
    exported(foreign)


UNPICKLED = """
import sys
from pathlib import Path
from agent_rl.viewer.api import Resources

def report(event, arguments):
    if armed and event.startswith("pickle."):
        print("LOADED", arguments)

def read():
    resources = Resources([Path(sys.argv[1])])
    for page in (*resources.pages(), "0/t/1-0", "0/routes/1-0", "0/live"):
        resources.body(page)

armed = False
sys.addaudithook(report)
read()  # imports
armed = True
read()
print("done")
"""


def test_nothing_is_unpickled(foreign: Path) -> None:
    """Python reports every name that a pickle loads."""
    ended = subprocess.run([sys.executable, "-c", UNPICKLED, str(foreign)], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "done\n", ended.stderr


# Commands that print


def printed(*arguments: str) -> str:
    """The output of a command on a foreign run, or the line with which it refuses the run."""
    ran = CliRunner().invoke(app, arguments)
    refused = "" if ran.exception is None else str(ran.exception)
    assert isinstance(ran.exception, UserError | None), ran.exception
    assert "\x1b" not in ran.output
    assert refused.count("\n") == 0
    return ran.output + refused


def linked(foreign: Path, name: str, target: Path) -> None:
    (foreign / name).unlink()
    (foreign / name).symlink_to(target)


def sparse(foreign: Path, name: str, target: Path) -> None:
    os.truncate(foreign / name, 1 << 40)


def nested(foreign: Path, name: str, target: Path) -> None:
    (foreign / name).write_text("[" * 90_000)


REPORT = "evaluations/step-000006-sampled.report.json"
COMMANDS = {
    "a linked file of trajectories": (linked, f"{ROWS}.jsonl.zst", ("show", "--step", "1"), "a link"),
    "a linked report": (linked, REPORT, ("eval", "compare"), "a link"),
    "a linked state": (linked, "state.json", ("eval", "compare"), "a link"),
    "a sparse report": (sparse, REPORT, ("eval", "compare"), "more than the"),
    "a sparse state": (sparse, "state.json", ("eval", "compare"), "more than the"),
    "a nested state": (nested, "state.json", ("eval", "compare"), "not JSON"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_file_is_one_line_of_a_command(foreign: Path, tmp_path: Path, name: str) -> None:
    spoil, file, command, reason = COMMANDS[name]
    spoil(foreign, file, secret(tmp_path))
    both = [f"{foreign}:step-6/sampled"] * 2 if "compare" in command else [str(foreign)]
    output = printed(*command[: 2 if "compare" in command else 1], *both, *(command[1:] if "show" in command else ()))
    assert SECRET not in output
    assert re.search(reason, output), output
    print(f"{name}: {output.strip()[-150:]}")


def test_texts_of_a_run_neither_steer_the_terminal_nor_break_a_table(foreign: Path) -> None:
    hostile = "\x1b]0;x\x07[/x][red]"
    turn = {
        "text": hostile, "tool": hostile, "arguments": {hostile: hostile}, "parse_failure": None,
        "observation": hostile, "completion_tokens": 1, "generate_seconds": 0.0, "tool_seconds": 0.0,
    }  # fmt: skip
    row = {
        "task_id": hostile, "sample": 0, "stop": hostile, "turns": [turn], "seconds": 1.0, "reward": 1.0,
        "messages": [{"role": hostile, "content": hostile}], "suspected_hack": [hostile],
    }  # fmt: skip
    path = foreign / "x.json"
    path.write_bytes(orjson.dumps(row))
    assert "[/x][red]" in printed("show", str(path))
    assert "[/x][red]" in printed("show", str(path), "--list")
    assert "no episode matches" in printed("show", str(path), "--task", "none")
    with redirect_stderr(io.StringIO()) as errors:
        print_error(hostile)
    assert "\x1b" not in errors.getvalue()


@pytest.mark.exhaustive
def test_a_file_of_trajectories_that_expands_takes_bounded_memory(foreign: Path) -> None:
    (foreign / f"{ROWS}.jsonl.zst").write_bytes(bomb(6 << 30))
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (3 << 30,) * 2)\n"
        "import sys\nfrom agent_rl.cli import main\nmain()\n"
    )
    command = [sys.executable, "-c", program, "show", str(foreign), "--step", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    print(ended.stderr)


def test_names_that_are_no_steps_are_ignored(foreign: Path) -> None:
    for name in ("step-x", "step-\u0666", "step-", "step-1e9"):
        (foreign / f"trajectories/{name}.jsonl.zst").touch()
    assert "steps: " in printed("show", str(foreign))
