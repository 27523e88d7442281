"""Tasks from code at hand, on small constructed repositories: what survives, and why the others fall."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.local_server import serving

from envs import EnvContext
from envs.swe.records import SweRecord
from envs.swe.sources import read_jsonl
from envs.swe.task_synthesis.bug_injection import Injection
from envs.swe.task_synthesis.candidate import Candidate, Fallen
from envs.swe.task_synthesis.checkout import read_checkout, read_release
from envs.swe.task_synthesis.from_commits import History
from envs.swe.task_synthesis.from_releases import Releases
from envs.swe.task_synthesis.git import open_git
from envs.swe.task_synthesis.issues import Writer, failures, from_message, holds_fix
from envs.swe.task_synthesis.mutations import sites
from envs.swe.task_synthesis.pipeline import Bounds, TaskSynthesis
from envs.swe.task_synthesis.requirements import requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages, run_watched
from envs.swe.task_synthesis.validation import Validation, stable

pytestmark = pytest.mark.bubblewrap
BROKEN = "def add(a, b):\n    return a - b\n\n\ndef clamp(low, high):\n    return max(low, high)\n"
FIXED = BROKEN.replace("a - b", "a + b")
TEST = "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
CLAMP = "\n\ndef test_clamp():\n    assert calc.clamp(2, 3) == 3\n"
NETWORK = 'import socket\n\n\ndef test_net():\n    socket.create_connection(("example.invalid", 80))\n'
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "core.hooksPath=/dev/null")


class BareSites(SitePackages):
    """Sites without packages: a sandbox of the machine's own system directories has pytest."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "3.11")
        (directory / "site-bare").mkdir(parents=True, exist_ok=True)

    async def of(self, requirements: Sequence[str]) -> str:
        return "site-bare"


class Quiet:
    """Is told how far a build is, and says nothing."""

    def stage(self, text: str, total: int | None = None) -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


def git(directory: Path, *arguments: str) -> None:
    subprocess.run(["git", *AUTHOR, *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


def commit(directory: Path, message: str, files: Mapping[str, str | bytes | None]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "--no-verify", "-m", message)


def start(directory: Path, files: Mapping[str, str | bytes | None]) -> Path:
    directory.mkdir()
    git(directory, "init", "-q", "-b", "main")
    commit(directory, "first", files)
    return directory


async def gather(context: EnvContext, repo: Path, out: Path, bounds: Bounds | None = None) -> TaskSynthesis:
    harvest = TaskSynthesis.open(out)
    async with open_git(context, repo) as opened:
        source = History(opened, BareSites(out), repo.name)
        await harvest.gather(source, Validation(context, out, repeats=1), bounds or Bounds(), Quiet())
    return harvest


def reasons(harvest: TaskSynthesis) -> dict[str, int]:
    (row,) = harvest.report().values()
    return {reason: fallen["candidates"] for reason, fallen in row["fallen"].items()}


async def test_a_commit_that_fixes_code_becomes_a_task_and_every_other_falls_for_a_named_reason(
    tmp_path: Path, context: EnvContext
) -> None:
    lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    repo = start(tmp_path / "calc", {"calc.py": BROKEN, "tests/test_calc.py": TEST, "logo.png": b"\x89PNG\0"})
    commit(repo, "Add two numbers rightly", {"calc.py": FIXED, "tests/test_calc.py": TEST + CLAMP})
    commit(repo, "Say more", {"README.md": "calc\n"})
    commit(repo, "Refactor", {"calc.py": FIXED + "\n\nx = 1\n"})
    commit(repo, "Network", {"calc.py": FIXED, "tests/test_net.py": NETWORK})
    commit(repo, "Nothing new", {"calc.py": FIXED + "\n\nz = 1\n", "tests/test_more.py": TEST + "\n"})
    commit(repo, "Data", {"calc.py": FIXED, "tests/blob": b"\xff\0\xfe", "tests/test_blob.py": TEST})
    commit(repo, "Big", {"calc.py": FIXED + "\n\nq = 1\n", "tests/big.bin": lfs, "tests/test_big.py": TEST})
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},tests/part")
    (repo / "tests/part").mkdir()
    (repo / "calc.py").write_text(FIXED)
    (repo / "tests/test_part.py").write_text(TEST)
    git(repo, "add", "calc.py", "tests/test_part.py")
    git(repo, "commit", "-q", "--no-verify", "-m", "Part")
    harvest = await gather(context, repo, tmp_path / "out")
    (record,) = read_jsonl(tmp_path / "out/tasks.jsonl")
    assert record.verified
    assert record.expected == dict.fromkeys(
        ["tests/test_calc.py::test_add", "tests/test_calc.py::test_clamp"], "PASSED"
    )
    assert record.files["tests/test_calc.py"] == TEST
    assert "logo.png" not in record.files
    assert "Add two numbers rightly" in record.problem_statement
    assert "assert calc.add(2, 3) == 5" in record.problem_statement
    found = reasons(harvest)
    assert found == {
        "changes no code": 1,
        "has no parent": 1,
        "changes no test": 1,
        "no test notices the fix": 1,
        "tests need a network": 1,
        "changes a binary file": 1,
        "changes a file in LFS": 1,
        "changes a submodule": 1,
    }
    (row,) = harvest.report().values()
    assert row["notes"] == ["left out of the tasks: 1 submodules, 1 files in LFS, 2 binary files"]


async def test_a_build_that_was_killed_goes_on_and_decides_nothing_twice(tmp_path: Path, context: EnvContext) -> None:
    repo = start(tmp_path / "calc", {"calc.py": BROKEN, "tests/test_calc.py": "x = 1\n"})
    commit(repo, "Add rightly", {"calc.py": FIXED, "tests/test_calc.py": TEST})
    out = tmp_path / "out"
    first = await gather(context, repo, out, Bounds(tried=1))
    assert len(first.healthy) == 1
    whole = (out / "tasks.jsonl").read_bytes()
    with (out / "tasks.jsonl").open("ab") as file:
        file.write(
            whole.replace(b'"calc-', b'"lost-') + whole[:40]
        )  # a record without its journal line, and a torn one
    again = await gather(context, repo, out)
    assert (out / "tasks.jsonl").read_bytes() == whole
    assert again.healthy == first.healthy
    assert len((out / "journal.jsonl").read_text().splitlines()) == 3  # two commits, and the source's own line


async def test_nothing_of_a_repository_runs_on_the_machine(tmp_path: Path, context: EnvContext) -> None:
    repo = start(tmp_path / "calc", {"calc.py": FIXED, "tests/test_calc.py": TEST, ".gitattributes": "* diff=evil\n"})
    spy = tmp_path / "spied"
    for key in ("core.fsmonitor", "core.pager", "diff.evil.textconv", "diff.external", "core.sshCommand"):
        git(repo, "config", key, f"touch {spy}; cat")
    checkout = await read_checkout(context, repo)
    assert checkout.files["calc.py"] == FIXED
    assert len(checkout.commit) == 40
    assert not spy.exists()


async def test_a_repository_that_can_not_be_used_says_why(tmp_path: Path, context: EnvContext) -> None:
    strip = start(tmp_path / "bare", {"calc.py": FIXED})
    found = await gather(context, strip, tmp_path / "out")
    assert found.report()["from-git bare"]["notes"] == ["no tests: no file test_*.py or *_test.py"]
    huge = start(tmp_path / "huge", {f"{n}.txt": "a" * 900_000 for n in range(60)} | {"test_a.py": TEST})
    found = await gather(context, huge, tmp_path / "out2")
    assert found.report()["from-git huge"]["notes"] == ["repository too large: 51 MiB of files"]
    partial = start(tmp_path / "partial", {"test_a.py": TEST})
    for path in (partial / ".git/objects").glob("??/*"):
        if zlib.decompress(path.read_bytes()).startswith(b"blob"):
            path.unlink()
    found = await gather(context, partial, tmp_path / "out3")
    assert "a shallow or partial clone lacks it" in found.report()["from-git partial"]["notes"][0]


async def test_bugs_are_put_where_tests_notice_them_and_the_fix_is_unique(tmp_path: Path, context: EnvContext) -> None:
    code = "def add(a, b):\n    return a + b\n\n\ndef weak(a, b):\n    if a < b:\n        return 1\n"
    code += "\n\ndef untested(a, b):\n    return a < b\n"
    test = "import calc\n\n\ndef test():\n    assert calc.add(2, 3) == 5 and calc.weak(1, 2) and not calc.weak(2, 1)\n"
    repo = start(tmp_path / "calc", {"calc.py": code, "test_calc.py": test, "test_other.py": "x = 1\n"})
    out = tmp_path / "out"
    source = Injection(await read_checkout(context, repo), context, BareSites(out), out)
    keys = await source.candidates()
    assert not any(key.startswith("calc.py:11") for key in keys)
    harvest = TaskSynthesis.open(out)
    await harvest.gather(source, Validation(context, out, repeats=1), Bounds(), Quiet())
    assert "the fix is not unique" in reasons(harvest)  # `<=` passes what `<` passes
    records = read_jsonl(out / "tasks.jsonl")
    assert {record.id.split("-")[1] for record in records} == {"wrong_operator", "missing_return"}
    for record in records:
        assert "test_calc.py" not in record.files
        assert "test_other.py" in record.files
        assert "calc.py" not in record.problem_statement


async def test_a_step_between_releases_becomes_a_task(tmp_path: Path, context: EnvContext) -> None:
    out = tmp_path / "out"
    pack(out / "sdists/calc-1.0.tar.gz", {"calc.py": BROKEN, "test_calc.py": "x = 1\n", "CHANGES": "1.0: new\n"})
    changes = "1.1: adds rightly\n1.0: new\n"
    pack(out / "sdists/calc-1.1.tar.gz", {"calc.py": FIXED, "test_calc.py": TEST, "CHANGES": changes})
    harvest = TaskSynthesis.open(out)
    source = Releases("calc", out / "sdists", BareSites(out), [("1.0", "1.1")])
    await harvest.gather(source, Validation(context, out, repeats=1), Bounds(), Quiet())
    (record,) = read_jsonl(out / "tasks.jsonl")
    assert (record.id, record.commit_hash) == ("calc-1.1", "1.1")
    assert record.problem_statement.startswith("[ISSUE]\n1.1: adds rightly\n")


async def test_a_package_without_a_source_release_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = Releases("calc", tmp_path / "sdists", BareSites(tmp_path))
    with pytest.raises(Fallen, match="no source release"):
        await source.candidates()
    source.steps = [("1.0", "1.1")]
    (key,) = await source.candidates()
    with pytest.raises(Fallen, match=r"no source release: calc 1\.0: "):
        await source.draft(key)


async def test_a_source_release_is_downloaded_without_running_its_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "spied"
    shelf = tmp_path / "shelf"
    for version in ("1.0", "1.1"):
        setup = f"open({str(spy)!r}, 'w')\nfrom setuptools import setup\nsetup(name='calc', version='{version}')\n"
        pack(shelf / f"calc-{version}.tar.gz", {"setup.py": setup, "calc.py": FIXED, "test_calc.py": version})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    source = Releases("calc", tmp_path / "sdists", BareSites(tmp_path), [("1.0", "1.1")])
    (key,) = await source.candidates()
    with pytest.raises(Fallen, match="changes no code"):
        await source.draft(key)
    assert sorted(path.name for path in (tmp_path / "sdists").iterdir()) == ["calc-1.0.tar.gz", "calc-1.1.tar.gz"]
    assert not spy.exists()


async def test_a_site_has_what_can_be_had_and_names_what_can_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "shelf", "demo")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    made = SitePackages(tmp_path / "out", "3.11", always="demo")
    name, again = await asyncio.gather(made.of(["absent>=2"]), made.of(["absent>=2"]))
    assert name == again
    assert (tmp_path / "out" / name / "demo.py").read_text() == "x = 1\n"
    about = json.loads((tmp_path / "out" / name / "agent-rl-site.json").read_text())
    assert about == {"requirements": ["demo"], "left out": ["absent>=2"]}
    assert not list((tmp_path / "out").glob(".site.*"))
    with pytest.raises(Fallen, match="dependencies can't be installed"):
        await SitePackages(tmp_path / "out", "3.11", always="nowhere").of([])


async def test_what_grows_or_lasts_too_long_is_ended(tmp_path: Path) -> None:
    grow = ["bash", "-c", f"head -c 3000000 /dev/zero > {tmp_path}/big; sleep 60"]
    with pytest.raises(Fallen, match="too large"):
        await run_watched(grow, watched=tmp_path, mb=1, seconds=60)
    with pytest.raises(Fallen, match="no end within"):
        await run_watched(["sleep", "60"], watched=tmp_path, mb=100, seconds=0.1)


def test_a_test_that_wavers_is_not_expected_and_a_fix_that_only_such_a_test_notices_is_flaky() -> None:
    after = {"a": "PASSED", "b": "PASSED", "c": "PASSED"}
    before = {"a": "FAILED", "b": "PASSED", "c": "FAILED"}
    assert stable([before, before], [after, after]) == ("a", "b", "c")
    assert stable([before, {**before, "c": "PASSED"}], [after, after]) == ("a", "b")
    assert stable([before, before], [after, {**after, "c": "FAILED"}]) == ("a", "b")
    with pytest.raises(Fallen, match="flaky"):
        stable([before, after], [after, after])


def test_requirements_are_read_as_data(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": '[project]\nname = "calc"\ndependencies = ["numpy>=1.2 ; python_version > \'3\'", "a @ https://x"]\n'
        '[project.optional-dependencies]\ntest = ["pytest>=3", "calc[x]", "hypothesis"]\ndocs = ["sphinx"]\n',
        "requirements-dev.txt": "-r other.txt\n--index-url https://x\nmock==1.0  # why\n./local\ngit+https://x/y\n",
        "setup.py": "import os\nos.system('x')\nsetup(install_requires=['six', *more])\n",
        "setup.cfg": "[options]\ninstall_requires =\n  attrs\n",
        "tests/test_a.py": "import yaml\nimport calc\n",
    }
    needs = requirements_of(files, "calc", 'Requires-Dist: click (>=8)\nRequires-Dist: tox; extra == "lint"\n\nbody')
    assert needs == (
        "attrs",
        "click>=8",
        "hypothesis",
        "mock==1.0",
        'numpy>=1.2; python_version > "3"',
        "pyyaml",
        "six",
    )
    assert requirements_of({"pyproject.toml": "[[[", "setup.cfg": "x", "setup.py": "("}, "calc") == ()


def test_every_bug_changes_one_line_and_is_python() -> None:
    source = (
        "def f(a, b=1, *, c=True):\n"
        "    # é: columns are bytes\n"
        "    total = 0\n"
        "    é = 'é'; x = a[0]\n"
        "    for n in range(a):\n"
        "        if not b and n <= (a + 1) and é:\n"
        "            total = max(total, n)\n"
        "    return total\n"
        "x = 1 < 2\n"
    )
    found = [bug for site in sites(source) for bug in site.bugs]
    assert {bug.family for bug in found} == {
        *("boundary", "flipped_comparison", "wrong_operator", "off_by_one", "boolean_operator", "wrong_builtin"),
        *("swapped_arguments", "wrong_initial", "wrong_index", "wrong_default", "missing_return"),
    }
    for bug in found:
        pairs = zip(source.splitlines(), bug.source.splitlines(), strict=True)
        assert sum(old != new for old, new in pairs) == 1
        assert bug.source.splitlines()[-1] == "x = 1 < 2"
    assert sites("def (") == []


def test_an_issue_that_holds_the_fix_is_found_out() -> None:
    gold = "diff --git a/c.py b/c.py\n--- a/c.py\n+++ b/c.py\n@@ -1 +1 @@\n-    return first - second\n"
    gold += "+    return first + second_of_all\n"
    assert holds_fix("Use `return first + second_of_all` instead", gold) == "it holds a line of the fix"
    assert holds_fix("As in\n@@ -1 +1 @@\n-a", gold) == "it holds a diff"
    assert holds_fix("The sum of 2 and 3 is -1, but should be 5.", gold) == ""
    record = SweRecord(
        repo_name="calc",
        expected_output_json='{"t": "PASSED"}',
        problem_statement="x",
        files={"c.py": ""},
        test_command="pytest",
        gold_patch=gold,
    )
    issue = from_message(
        Candidate(record, "Sum\n\nuse return first + second_of_all\nSigned-off-by: me"), ["E   assert 1"]
    )
    assert issue.startswith("Sum\n\nThese checks fail")
    assert "second_of_all" not in issue


def test_what_a_failure_says_leaves_out_the_place_in_the_code() -> None:
    log = (
        "___ test_a ___\ntests/test_c.py:5: in test_a\n    assert add(1,\n        2) == 3\nsrc/c.py:9: in add\n"
        "    return a - b\nE   AssertionError: <C at 0x7f00aa00bb> is -1\nE   Use -v to get more diff\n"
        "=== short test summary info ===\nFAILED tests/test_c.py::test_a\n"
    )
    assert failures(log) == ["    assert add(1,\n        2) == 3\nE   AssertionError: <C at 0x...> is -1"]


def test_a_source_release_is_read_without_binaries_and_metadata(tmp_path: Path) -> None:
    pack(tmp_path / "calc-1.0.tar.gz", {"PKG-INFO": "Name: calc", ".idea/x": "x", "a.py": "x\r\n", "b": b"\xff\xfe"})
    release = read_release(tmp_path / "calc-1.0.tar.gz")
    assert (release.files, release.metadata, release.commit) == ({"a.py": "x\r\n"}, "Name: calc", "1.0")
    (tmp_path / "calc-1.1.tar.gz").write_bytes(b"no archive")
    with pytest.raises(Fallen, match="can't be read"):
        read_release(tmp_path / "calc-1.1.tar.gz")


def pack(path: Path, files: Mapping[str, str | bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def wheel(directory: Path, name: str) -> None:
    directory.mkdir()
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "x = 1\n")
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


GOOD = "add() gives a wrong sum\n\nThe library calc subtracts its second number: adding two and three gives minus one."
WEATHER = "Weather around London stays pleasant throughout another sunny summer holiday; people enjoy their gardens."


async def test_a_writer_that_answers_nonsense_is_counted_and_the_commits_words_are_used() -> None:
    gold = "diff --git a/c.py b/c.py\n--- a/c.py\n+++ b/c.py\n@@ -1 +1 @@\n-x\n+    return first + second_of_all\n"
    record = SweRecord(
        repo_name="calc",
        expected_output_json='{"t": "PASSED"}',
        problem_statement="x",
        files={"c.py": ""},
        test_command="pytest",
        gold_patch=gold,
    )
    answers = [
        json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        for text in (
            "",
            "la la la la " * 20,
            GOOD + "\n" + gold,
            "\x1b[2J" + GOOD,
            WEATHER,
            GOOD,
        )
    ]
    answers += [b"no JSON", b'{"choices": []}']

    async def answer(path: str, body: object) -> tuple[int, bytes]:
        assert path == "/v1/chat/completions"
        return 200, answers[asked]

    draft = Candidate(record, "Add rightly")
    issues = []
    async with serving(answer) as url:
        writer = Writer(f"{url}/v1", "m", seconds=20.0)
        for asked in range(len(answers)):  # noqa: B007 (answer reads it)
            issues.append(await writer.write(draft, ["E   assert calc == -1"]))
    assert issues.pop(5) == GOOD
    assert set(issues) == {from_message(draft, ["E   assert calc == -1"])}
    assert writer.written == 1
    assert writer.fallbacks == {
        "too short, too long or empty words": 2,
        "it holds a diff": 1,
        "unprintable": 1,
        "about something else": 1,
        "no answer": 2,
    }
    gone = Writer("http://127.0.0.1:1/v1", "m", seconds=5.0)
    assert (await gone.write(draft, [])).startswith("Add rightly")
    assert gone.fallbacks == {"no answer": 1}


def test_a_mistake_on_the_command_line_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_rl.cli", "tasks", "from-git", str(tmp_path), "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (
        2,
        f"error: {tmp_path}: no git repository; right would be the directory of a clone (git clone URL)\n",
    )


async def test_a_build_that_is_stopped_ends_what_it_started(tmp_path: Path, context: EnvContext) -> None:
    slow = "import time\n\n\ndef test_slow():\n    time.sleep(300)\n"
    repo = start(tmp_path / "calc", {"calc.py": BROKEN, "test_calc.py": "x = 1\n"})
    commit(repo, "Slow", {"calc.py": FIXED, "test_calc.py": slow})
    started = asyncio.Event()

    class Told(Quiet):
        def stage(self, text: str, total: int | None = None) -> None:
            if "trying" in text:
                started.set()

    async def build() -> None:
        async with open_git(context, repo) as opened:
            source = History(opened, BareSites(tmp_path / "out"), "calc")
            await TaskSynthesis.open(tmp_path / "out").gather(
                source, Validation(context, tmp_path / "out"), Bounds(), Told()
            )

    building = asyncio.create_task(build())
    await started.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert not (tmp_path / "out/tasks.jsonl").exists()
