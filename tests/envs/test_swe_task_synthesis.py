"""Task synthesis on small constructed repositories: healthy tasks and the reasons of rejections."""

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
from envs.swe.task_synthesis.bug_injection import InjectionSource
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected
from envs.swe.task_synthesis.checkout import read_checkout, read_release
from envs.swe.task_synthesis.from_commits import CommitSource
from envs.swe.task_synthesis.from_releases import ReleaseSource
from envs.swe.task_synthesis.git import open_git
from envs.swe.task_synthesis.issues import IssueWriter, failure_excerpts, fix_leak, issue_from_message
from envs.swe.task_synthesis.mutations import injection_sites
from envs.swe.task_synthesis.pipeline import SynthesisLimits, TaskSynthesis
from envs.swe.task_synthesis.requirements import requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages, run_limited
from envs.swe.task_synthesis.validation import Validation, stable_tests

pytestmark = pytest.mark.bubblewrap
BROKEN = "def add(a, b):\n    return a - b\n\n\ndef clamp(low, high):\n    return max(low, high)\n"
FIXED = BROKEN.replace("a - b", "a + b")
TEST = "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
CLAMP = "\n\ndef test_clamp():\n    assert calc.clamp(2, 3) == 3\n"
NETWORK = 'import socket\n\n\ndef test_net():\n    socket.create_connection(("example.invalid", 80))\n'
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "core.hooksPath=/dev/null")


class NoSitePackages(SitePackages):
    """Site packages without packages: a sandbox with the host's system directories has pytest."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "3.11")
        (directory / "site-bare").mkdir(parents=True, exist_ok=True)

    async def install(self, requirements: Sequence[str]) -> str:
        return "site-bare"


class Quiet:
    """A progress display that prints nothing."""

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


async def synthesize(
    context: EnvContext, repo: Path, out: Path, limits: SynthesisLimits | None = None
) -> TaskSynthesis:
    synthesis = TaskSynthesis.open(out)
    async with open_git(context, repo) as repository:
        source = CommitSource(repository, NoSitePackages(out), repo.name)
        await synthesis.synthesize(source, Validation(context, out, repeats=1), limits or SynthesisLimits(), Quiet())
    return synthesis


def reasons(synthesis: TaskSynthesis) -> dict[str, int]:
    (row,) = synthesis.report().values()
    return {reason: rejected["candidates"] for reason, rejected in row["rejected"].items()}


@pytest.mark.slow
async def test_fixing_commit_becomes_a_task_and_others_are_rejected_with_reasons(
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
    synthesis = await synthesize(context, repo, tmp_path / "out")
    (record,) = read_jsonl(tmp_path / "out/tasks.jsonl")
    assert record.verified
    assert record.expected == dict.fromkeys(
        ["tests/test_calc.py::test_add", "tests/test_calc.py::test_clamp"], "PASSED"
    )
    assert record.files["tests/test_calc.py"] == TEST
    assert "logo.png" not in record.files
    assert "Add two numbers rightly" in record.problem_statement
    assert "assert calc.add(2, 3) == 5" in record.problem_statement
    assert reasons(synthesis) == {
        "changes no code": 1,
        "has no parent": 1,
        "changes no test": 1,
        "no test notices the fix": 1,
        "tests need a network": 1,
        "changes a binary file": 1,
        "changes a file in LFS": 1,
        "changes a submodule": 1,
    }
    (row,) = synthesis.report().values()
    assert row["notes"] == ["left out of the tasks: 1 submodules, 1 files in LFS, 2 binary files"]


@pytest.mark.slow
async def test_killed_build_resumes_and_repeats_no_candidate(tmp_path: Path, context: EnvContext) -> None:
    repo = start(tmp_path / "calc", {"calc.py": BROKEN, "tests/test_calc.py": "x = 1\n"})
    commit(repo, "Add rightly", {"calc.py": FIXED, "tests/test_calc.py": TEST})
    out = tmp_path / "out"
    first = await synthesize(context, repo, out, SynthesisLimits(tried=1))
    assert len(first.healthy) == 1
    complete = (out / "tasks.jsonl").read_bytes()
    with (out / "tasks.jsonl").open("ab") as file:
        file.write(
            complete.replace(b'"calc-', b'"lost-') + complete[:40]
        )  # a record without its journal line, and an incomplete one
    again = await synthesize(context, repo, out)
    assert (out / "tasks.jsonl").read_bytes() == complete
    assert again.healthy == first.healthy
    assert len((out / "journal.jsonl").read_text().splitlines()) == 3  # two commits, and the source's own line


async def test_git_configuration_runs_nothing_on_the_host(tmp_path: Path, context: EnvContext) -> None:
    repo = start(tmp_path / "calc", {"calc.py": FIXED, "tests/test_calc.py": TEST, ".gitattributes": "* diff=evil\n"})
    spy = tmp_path / "spied"
    for key in ("core.fsmonitor", "core.pager", "diff.evil.textconv", "diff.external", "core.sshCommand"):
        git(repo, "config", key, f"touch {spy}; cat")
    checkout = await read_checkout(context, repo)
    assert checkout.files["calc.py"] == FIXED
    assert len(checkout.commit) == 40
    assert not spy.exists()


@pytest.mark.slow
async def test_unusable_repository_is_reported_with_a_reason(tmp_path: Path, context: EnvContext) -> None:
    bare = start(tmp_path / "bare", {"calc.py": FIXED})
    synthesis = await synthesize(context, bare, tmp_path / "out")
    assert synthesis.report()["from-git bare"]["notes"] == ["no tests: no file test_*.py or *_test.py"]
    huge = start(tmp_path / "huge", {f"{n}.txt": "a" * 900_000 for n in range(60)} | {"test_a.py": TEST})
    synthesis = await synthesize(context, huge, tmp_path / "out2")
    assert synthesis.report()["from-git huge"]["notes"] == ["repository too large: 51 MiB of files"]
    partial = start(tmp_path / "partial", {"test_a.py": TEST})
    for path in (partial / ".git/objects").glob("??/*"):
        if zlib.decompress(path.read_bytes()).startswith(b"blob"):
            path.unlink()
    synthesis = await synthesize(context, partial, tmp_path / "out3")
    assert "missing in a shallow or partial clone" in synthesis.report()["from-git partial"]["notes"][0]


@pytest.mark.long
@pytest.mark.slow
async def test_bugs_are_injected_where_tests_detect_them_and_the_fix_is_unique(
    tmp_path: Path, context: EnvContext
) -> None:
    code = "def add(a, b):\n    return a + b\n\n\ndef weak(a, b):\n    if a < b:\n        return 1\n"
    code += "\n\ndef untested(a, b):\n    return a < b\n"
    test = "import calc\n\n\ndef test():\n    assert calc.add(2, 3) == 5 and calc.weak(1, 2) and not calc.weak(2, 1)\n"
    repo = start(tmp_path / "calc", {"calc.py": code, "test_calc.py": test, "test_other.py": "x = 1\n"})
    out = tmp_path / "out"
    source = InjectionSource(await read_checkout(context, repo), context, NoSitePackages(out), out)
    keys = await source.candidate_keys()
    assert not any(key.startswith("calc.py:11") for key in keys)
    synthesis = TaskSynthesis.open(out)
    await synthesis.synthesize(source, Validation(context, out, repeats=1), SynthesisLimits(), Quiet())
    assert "the fix is not unique" in reasons(synthesis)  # `<=` passes what `<` passes
    records = read_jsonl(out / "tasks.jsonl")
    assert {record.id.split("-")[1] for record in records} == {"wrong_operator", "missing_return"}
    for record in records:
        assert "test_calc.py" not in record.files
        assert "test_other.py" in record.files
        assert "calc.py" not in record.problem_statement


@pytest.mark.slow
async def test_a_step_between_releases_becomes_a_task(tmp_path: Path, context: EnvContext) -> None:
    out = tmp_path / "out"
    pack(out / "sdists/calc-1.0.tar.gz", {"calc.py": BROKEN, "test_calc.py": "x = 1\n", "CHANGES": "1.0: new\n"})
    changelog = "1.1: adds rightly\n1.0: new\n"
    pack(out / "sdists/calc-1.1.tar.gz", {"calc.py": FIXED, "test_calc.py": TEST, "CHANGES": changelog})
    synthesis = TaskSynthesis.open(out)
    source = ReleaseSource("calc", out / "sdists", NoSitePackages(out), [("1.0", "1.1")])
    await synthesis.synthesize(source, Validation(context, out, repeats=1), SynthesisLimits(), Quiet())
    (record,) = read_jsonl(out / "tasks.jsonl")
    assert (record.id, record.commit_hash) == ("calc-1.1", "1.1")
    assert record.problem_statement.startswith("[ISSUE]\n1.1: adds rightly\n")


async def test_package_without_source_release_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = ReleaseSource("calc", tmp_path / "sdists", NoSitePackages(tmp_path))
    with pytest.raises(CandidateRejected, match="no source release"):
        await source.candidate_keys()
    source.steps = [("1.0", "1.1")]
    (key,) = await source.candidate_keys()
    with pytest.raises(CandidateRejected, match=r"no source release: calc 1\.0: "):
        await source.candidate(key)


@pytest.mark.slow
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
    source = ReleaseSource("calc", tmp_path / "sdists", NoSitePackages(tmp_path), [("1.0", "1.1")])
    (key,) = await source.candidate_keys()
    with pytest.raises(CandidateRejected, match="changes no code"):
        await source.candidate(key)
    assert sorted(path.name for path in (tmp_path / "sdists").iterdir()) == ["calc-1.0.tar.gz", "calc-1.1.tar.gz"]
    assert not spy.exists()


@pytest.mark.slow
async def test_site_packages_list_omitted_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "shelf", "demo")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    site_packages = SitePackages(tmp_path / "out", "3.11", always="demo")
    name, again = await asyncio.gather(*(site_packages.install(["absent>=2"]) for _ in range(2)))
    assert name == again
    assert (tmp_path / "out" / name / "demo.py").read_text() == "x = 1\n"
    about = json.loads((tmp_path / "out" / name / "agent-rl-site.json").read_text())
    assert about == {"requirements": ["demo"], "left out": ["absent>=2"]}
    assert not list((tmp_path / "out").glob(".site.*"))
    with pytest.raises(CandidateRejected, match="dependencies can't be installed"):
        await SitePackages(tmp_path / "out", "3.11", always="nowhere").install([])


async def test_command_over_its_limits_is_killed(tmp_path: Path) -> None:
    grow = ["bash", "-c", f"head -c 3000000 /dev/zero > {tmp_path}/big; sleep 60"]
    with pytest.raises(CandidateRejected, match="too large"):
        await run_limited(grow, watched=tmp_path, mb=1, seconds=60)
    with pytest.raises(CandidateRejected, match="no end within"):
        await run_limited(["sleep", "60"], watched=tmp_path, mb=100, seconds=0.1)


def test_flaky_tests_are_not_expected() -> None:
    after = {"a": "PASSED", "b": "PASSED", "c": "PASSED"}
    before = {"a": "FAILED", "b": "PASSED", "c": "FAILED"}
    assert stable_tests([before, before], [after, after]) == ("a", "b", "c")
    assert stable_tests([before, {**before, "c": "PASSED"}], [after, after]) == ("a", "b")
    assert stable_tests([before, before], [after, {**after, "c": "FAILED"}]) == ("a", "b")
    with pytest.raises(CandidateRejected, match="flaky"):
        stable_tests([before, after], [after, after])


def test_requirements_are_read_as_data(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": '[project]\nname = "calc"\ndependencies = ["numpy>=1.2 ; python_version > \'3\'", "a @ https://x"]\n'
        '[project.optional-dependencies]\ntest = ["pytest>=3", "calc[x]", "hypothesis"]\ndocs = ["sphinx"]\n',
        "requirements-dev.txt": "-r other.txt\n--index-url https://x\nmock==1.0  # why\n./local\ngit+https://x/y\n",
        "setup.py": "import os\nos.system('x')\nsetup(install_requires=['six', *more])\n",
        "setup.cfg": "[options]\ninstall_requires =\n  attrs\n",
        "tests/test_a.py": "import yaml\nimport calc\n",
    }
    requirements = requirements_of(
        files, "calc", 'Requires-Dist: click (>=8)\nRequires-Dist: tox; extra == "lint"\n\nbody'
    )
    assert requirements == (
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
    found = [bug for site in injection_sites(source) for bug in site.bugs]
    assert {bug.family for bug in found} == {
        *("boundary", "flipped_comparison", "wrong_operator", "off_by_one", "boolean_operator", "wrong_builtin"),
        *("swapped_arguments", "wrong_initial", "wrong_index", "wrong_default", "missing_return"),
    }
    for bug in found:
        pairs = zip(source.splitlines(), bug.source.splitlines(), strict=True)
        assert sum(old != new for old, new in pairs) == 1
        assert bug.source.splitlines()[-1] == "x = 1 < 2"
    assert injection_sites("def (") == []


def test_issue_that_leaks_the_fix_is_detected() -> None:
    gold = "diff --git a/c.py b/c.py\n--- a/c.py\n+++ b/c.py\n@@ -1 +1 @@\n-    return first - second\n"
    gold += "+    return first + second_of_all\n"
    assert fix_leak("Use `return first + second_of_all` instead", gold) == "it holds a line of the fix"
    assert fix_leak("As in\n@@ -1 +1 @@\n-a", gold) == "it holds a diff"
    assert fix_leak("The sum of 2 and 3 is -1, but should be 5.", gold) == ""
    record = SweRecord(
        repo_name="calc",
        expected_output_json='{"t": "PASSED"}',
        problem_statement="x",
        files={"c.py": ""},
        test_command="pytest",
        gold_patch=gold,
    )
    issue = issue_from_message(
        Candidate(record, "Sum\n\nuse return first + second_of_all\nSigned-off-by: me"), ["E   assert 1"]
    )
    assert issue.startswith("Sum\n\nThese checks fail")
    assert "second_of_all" not in issue


def test_failure_excerpt_omits_frames_of_the_code() -> None:
    log = (
        "___ test_a ___\ntests/test_c.py:5: in test_a\n    assert add(1,\n        2) == 3\nsrc/c.py:9: in add\n"
        "    return a - b\nE   AssertionError: <C at 0x7f00aa00bb> is -1\nE   Use -v to get more diff\n"
        "=== short test summary info ===\nFAILED tests/test_c.py::test_a\n"
    )
    assert failure_excerpts(log) == ["    assert add(1,\n        2) == 3\nE   AssertionError: <C at 0x...> is -1"]


def test_a_source_release_is_read_without_binaries_and_metadata(tmp_path: Path) -> None:
    pack(tmp_path / "calc-1.0.tar.gz", {"PKG-INFO": "Name: calc", ".idea/x": "x", "a.py": "x\r\n", "b": b"\xff\xfe"})
    release = read_release(tmp_path / "calc-1.0.tar.gz")
    assert (release.files, release.metadata, release.commit) == ({"a.py": "x\r\n"}, "Name: calc", "1.0")
    (tmp_path / "calc-1.1.tar.gz").write_bytes(b"no archive")
    with pytest.raises(CandidateRejected, match="can't be read"):
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


async def test_unusable_model_issue_is_counted_and_replaced_by_the_commit_message() -> None:
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

    candidate = Candidate(record, "Add rightly")
    issues = []
    async with serving(answer) as url:
        writer = IssueWriter(f"{url}/v1", "m", seconds=20.0)
        for asked in range(len(answers)):  # noqa: B007 (answer reads it)
            issues.append(await writer.write(candidate, ["E   assert calc == -1"]))
    assert issues.pop(5) == GOOD
    assert set(issues) == {issue_from_message(candidate, ["E   assert calc == -1"])}
    assert writer.written == 1
    assert writer.fallbacks == {
        "too short, too long or empty words": 2,
        "it holds a diff": 1,
        "unprintable": 1,
        "about something else": 1,
        "no answer": 2,
    }
    gone = IssueWriter("http://127.0.0.1:1/v1", "m", seconds=5.0)
    assert (await gone.write(candidate, [])).startswith("Add rightly")
    assert gone.fallbacks == {"no answer": 1}


@pytest.mark.slow
def test_command_line_error_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_rl.cli", "tasks", "from-git", str(tmp_path), "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (
        2,
        f"error: {tmp_path}: not a git repository; right would be the directory of a clone (git clone URL)\n",
    )


@pytest.mark.slow
async def test_stopped_build_closes_its_sandboxes(tmp_path: Path, context: EnvContext) -> None:
    slow = "import time\n\n\ndef test_slow():\n    time.sleep(300)\n"
    repo = start(tmp_path / "calc", {"calc.py": BROKEN, "test_calc.py": "x = 1\n"})
    commit(repo, "Slow", {"calc.py": FIXED, "test_calc.py": slow})
    started = asyncio.Event()

    class SignalsStart(Quiet):
        def stage(self, text: str, total: int | None = None) -> None:
            if "trying" in text:
                started.set()

    async def build() -> None:
        async with open_git(context, repo) as repository:
            source = CommitSource(repository, NoSitePackages(tmp_path / "out"), "calc")
            await TaskSynthesis.open(tmp_path / "out").synthesize(
                source, Validation(context, tmp_path / "out"), SynthesisLimits(), SignalsStart()
            )

    building = asyncio.create_task(build())
    await started.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert not (tmp_path / "out/tasks.jsonl").exists()
