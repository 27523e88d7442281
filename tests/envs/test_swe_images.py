"""Rows whose repository is in a container image laid out as R2E-Gym's or SWE-bench's, in docker and podman.

The data sets' own images are on a hub. These have their layout, and docker gets them as it would get those: from a
registry, when the first sandbox asks.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import containers
from typer.testing import CliRunner

from agent_rl.cli import app
from envs import EnvContext
from envs.swe import SweRecord, diff_files, grade_patch, read_jsonl, start_episode, verify_record
from envs.swe.task_audit import audit_record
from sandbox import ImagePolicy, SandboxSpec, SandboxUnavailableError, open_backend
from sandbox.docker.client import EngineClient, connect
from tests.envs import dataset_rows
from tests.envs.dataset_rows import commit_content
from tests.envs.images import BUILT, GIT_WITH_A_FUTURE, swebench_row

CONFIGS = Path(__file__).parents[2] / "configs"
IN_DOCKER = pytest.mark.parametrize("engine", [pytest.param("docker", marks=pytest.mark.docker)], indirect=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BUILT.is_file(), reason="the real tasks are not built (make real-tasks)"),
]

OLD = {"pkg/__init__.py": "", "pkg/m.py": "def half(a):\n    return a // 2\n"}
NEW = {**OLD, "pkg/m.py": "def half(a):\n    return a / 2\n"}
R2E_TESTS = """
import sys
sys.path.insert(0, "/testbed")
from pkg.m import half

def test_half(): assert half(3) == 1.5

class TestEven:
    def test_even(self): assert half(4) == 2
"""
R2E_FILES = {
    **{f"/testbed/{path}": text.encode() for path, text in OLD.items()},
    "/r2e_tests/test_1.py": R2E_TESTS.encode(),
    "/testbed/run_tests.sh": b".venv/bin/python -W ignore -m pytest -rA -p no:cacheprovider r2e_tests\n",
}
R2E_SET_UP = f"cd /testbed\npython3 -m venv --without-pip --system-site-packages .venv\n{GIT_WITH_A_FUTURE}"

CONDA = "/opt/miniconda3"
CONDA_SET_UP = f"""
python3 -m venv --without-pip --system-site-packages {CONDA}/envs/testbed
cd {CONDA}/envs/testbed/bin
printf '%s\\n' "#!$PWD/python" 'import sys, pytest' 'sys.exit(pytest.main())' > pytest
chmod +x pytest
mkdir -p {CONDA}/bin
echo 'conda() {{ export PATH="{CONDA}/envs/$2/bin:$PATH"; }}' > {CONDA}/bin/activate
"""
# As the data set's scripts begin; nothing can be installed from a sandbox.
ACTIVATE = f"source {CONDA}/bin/activate\nconda activate testbed\n"
PREAMBLE = f"""{ACTIVATE}cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {{base}}
{ACTIVATE}python -m pip install -e ."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.exhaustive]),
    ],
)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def api(engine: str) -> Iterator[EngineClient]:
    try:
        api = connect(engine)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield api
    api.close()


@pytest.fixture(scope="module")
def place(engine: str, api: EngineClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What the images' names begin with: a registry's address for docker; podman would ask one for a certificate."""
    if engine == "docker":
        with containers.registry(tmp_path_factory.mktemp("registry")) as address:
            yield address
            containers.forget_images(api, address)
    else:
        name = f"docker.io/test-{uuid.uuid4().hex[:8]}"
        yield name
        containers.forget_images(api, name)


@pytest.fixture(scope="module")
def rows(engine: str, api: EngineClient, place: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of rows for each layout; no image of theirs is in docker yet."""
    directory = tmp_path_factory.mktemp("rows")
    images = {
        "r2e": f"{place}/namanjain12/pkg_final:abc",
        "swebench": f"{place}/swebench/sweb.eval.x86_64.pathspec_1776_pathspec-0.12.1:latest",
    }
    (record,) = [record for record in read_jsonl(BUILT) if record.id == "pathspec-0.12.1"]
    repository, base = repository_of(record, directory / "repository")
    containers.build(api, images["r2e"], R2E_FILES, R2E_SET_UP)
    containers.build(api, images["swebench"], repository, CONDA_SET_UP)
    made = {
        "r2e": r2e_row(images["r2e"]),
        "swebench": swebench_row(record, images["swebench"], base=base, preamble=PREAMBLE.format(base=base)),
    }
    for name, row in made.items():
        if engine == "docker":
            containers.push(api, images[name])
        (directory / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return {name: directory / f"{name}.jsonl" for name in made}


def repository_of(record: SweRecord, directory: Path) -> tuple[dict[str, bytes], str]:
    """The files of a repository with a future, for an image, and the commit the task starts from."""
    for path, text in record.files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(text.encode())
    subprocess.run(["bash", "-c", f"{GIT_WITH_A_FUTURE}"], cwd=directory, check=True, timeout=60)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=directory, check=True, capture_output=True, text=True)
    files = {
        f"/testbed/{path.relative_to(directory)}": path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
    return files, head.stdout.strip()


def r2e_row(image: str) -> dict[str, Any]:
    return {
        "repo_name": "pkg",
        "docker_image": image,
        "commit_hash": "abc",
        "parsed_commit_content": commit_content(OLD, NEW),
        "execution_result_content": "{}",
        "modified_files": ["pkg/m.py"],
        "modified_entity_summaries": [],
        "relevant_files": ["pkg/m.py"],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 1,
        "prompt": "",
        "problem_statement": "[ISSUE]\nhalf(3) gives 1\n[/ISSUE]",
        "expected_output_json": json.dumps({"test_half": "PASSED", "TestEven.test_even": "PASSED"}),
    }


@pytest.mark.parametrize(
    ("layout", "config", "split"), [("swebench", "swebench-verified", "test"), ("r2e", "paper-swe", "train")]
)
def test_the_true_fix_is_evaluated_from_end_to_end(
    engine: str, rows: dict[str, Path], layout: str, config: str, split: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the ledger of pulled images
    said = CliRunner().invoke(
        app,
        [
            "eval", str(CONFIGS / f"{config}.yaml"), "--policy", "gold", "--split", split, "--out", str(tmp_path),
            f"env.options={{path: {rows[layout]}}}", f"sandbox.backend={engine}", "sandbox.memory_mb=512",
        ],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["pass_at_1"], report["graded"], report["suspected_hacks"]) == (1.0, 1, 0), report["outcomes"]
    assert report["infrastructure_failures"] == 0
    (log,) = (tmp_path / "logs").glob("*/0.log")
    assert "short test summary info" in log.read_text()
    if layout == "swebench":
        assert ">>>>> Start Test Output" in log.read_text()
        (prediction,) = map(json.loads, (tmp_path / "predictions.jsonl").read_text().splitlines())
        assert prediction["model_patch"].startswith("diff --git ")
        assert json.loads((tmp_path / "report-swebench.json").read_text())["resolved_instances"] == 1


@pytest.fixture
async def sandboxes(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnvContext]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = open_backend(engine, run_id=f"test-{uuid.uuid4().hex[:8]}", images=ImagePolicy(pull=True))
    yield EnvContext(backend, limits=SandboxSpec(memory_mb=512), grade_timeout=60.0)
    await backend.close()


@IN_DOCKER
async def test_empty_patch_does_not_resolve_and_nothing_leaks(sandboxes: EnvContext, rows: dict[str, Path]) -> None:
    (record,) = read_jsonl(rows["swebench"])
    assert (await verify_record(sandboxes, record)).verified
    findings = await audit_record(sandboxes, record)
    assert len(findings) > 5
    assert all(finding.ok for finding in findings), findings


@IN_DOCKER
async def test_the_agent_of_an_r2e_row_sees_neither_tests_nor_future(
    sandboxes: EnvContext, rows: dict[str, Path]
) -> None:
    (record,) = read_jsonl(rows["r2e"])
    async with start_episode(sandboxes, record) as episode:
        seen = await episode.sandbox.exec("ls -A / /root . ; git log --all --format=%s; which python", timeout=30)
        assert "r2e_tests" not in seen.text
        assert "run_tests.sh" not in seen.text
        assert "future" not in seen.text
        assert seen.text.endswith("Start of the task\n/testbed/.venv/bin/python\n")
        assert (await episode.sandbox.exec("sed -i 's:a // 2:a / 2:' pkg/m.py", timeout=20)).ok
        grade = await episode.grade()
    assert grade.resolved
    assert grade.tests == record.expected


@IN_DOCKER
async def test_rewritten_tests_of_an_r2e_row_are_rejected(sandboxes: EnvContext, rows: dict[str, Path]) -> None:
    forged = {"r2e_tests/test_1.py": "def test_half(): pass\n", "run_tests.sh": "echo\n", "conftest.py": "\n"}
    grade = await grade_patch(sandboxes, read_jsonl(rows["r2e"])[0], diff_files({}, forged))
    assert not grade.resolved
    assert len(grade.suspected_hack) == 3


@IN_DOCKER
@pytest.mark.exhaustive
async def test_a_bug_and_a_repository_in_its_own_directory(
    sandboxes: EnvContext, api: EngineClient, place: str
) -> None:
    """SWE-smith's rows, whose patch breaks the image's repository, and SWE-rebench-V2's, which is not at /testbed."""
    image = f"{place}/swesmith.x86_64.demo_1776_calc.0a1b2c3d:latest"
    repositories = {"testbed": dataset_rows.HEALTHY, "calc": dataset_rows.BROKEN}
    files = {f"/{at}/{path}": text.encode() for at, texts in repositories.items() for path, text in texts.items()}
    files |= {f"/{path}": text.encode() for path, text in dataset_rows.conda_files().items()}
    git = [f"(cd /{directory}\n{GIT_WITH_A_FUTURE})\n" for directory in repositories]
    containers.build(api, image, files, f"chmod +x {CONDA}/envs/testbed/bin/pytest\n{''.join(git)}")
    config = dataset_rows.rebench_v2()["install_config"]
    config |= {"test_cmd": "python3 -m pytest -rA -p no:cacheprovider tests/test_calc.py"}
    for row in (dataset_rows.smith(image_name=image), dataset_rows.rebench_v2(image_name=image, install_config=config)):
        assert (await verify_record(sandboxes, SweRecord.model_validate(row))).verified


@IN_DOCKER
async def test_a_local_task_in_containers(sandboxes: EnvContext, record: SweRecord) -> None:
    assert (await verify_record(sandboxes, record)).verified
    async with start_episode(sandboxes, record) as episode:
        assert (await episode.sandbox.exec("sed -i 's/a - b/a + b/' calc.py", timeout=20)).ok
        assert (await episode.grade()).resolved
