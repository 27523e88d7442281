"""The data sets' rows: recognised by their fields, graded by their own rules, refused where a part is missing."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from envs import EnvContext, TaskRecordError
from envs.swe import SweEnvironment, SweRecord, diff_files, grade_patch, read_records, start_episode, verify_record
from envs.swe.records import parse_record
from envs.swe.swebench import judge_by_dataset_rules
from envs.swe.task_audit import audit_record
from tests.envs.dataset_rows import (
    BROKEN,
    BUG,
    FAIL_TO_PASS,
    FIX,
    HEALTHY,
    PASS_TO_PASS,
    classic,
    extra,
    gym,
    image,
    nemo_around,
    nemo_generated,
    rebench,
    rebench_v2,
    smith,
    swebench_log,
)
from tests.envs.images import BUILT, limits_with_pytest
from tests.envs.test_swe_records import LOCAL
from tests.envs.test_swe_sources import NO_SANDBOXES, write

pytest.importorskip("swebench")
ADD, DOUBLE = "tests/test_calc.py::test_add", "tests/test_calc.py::test_double"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The directory images: a repository to be fixed, a healthy one, and one in a directory of its own name."""
    directory = tmp_path_factory.mktemp("images")
    return {
        "broken": image(directory / "broken", BROKEN),
        "healthy": image(directory / "healthy", HEALTHY),
        "calc": image(directory / "own", BROKEN, "calc"),
    }


@pytest.fixture
def sandboxes(context: EnvContext) -> EnvContext:
    if not BUILT.is_file():
        pytest.skip("the real tasks are not built (make real-tasks)")
    return dataclasses.replace(context, limits=limits_with_pytest(512), grade_timeout=60.0)


CONFIG = rebench()["install_config"]
HOST_PYTEST = "python3 -m pytest -rA -p no:cacheprovider tests/test_calc.py"
ROWS: dict[str, tuple[str, Callable[[str], Mapping[str, Any]]]] = {
    "SWE-rebench": ("broken", lambda path: rebench(docker_image=path, install_config={**CONFIG, "install": "echo"})),
    "SWE-rebench-V2": (
        "calc",
        lambda path: rebench_v2(image_name=path, install_config={**CONFIG, "test_cmd": [HOST_PYTEST]}),
    ),
    "SWE-Gym": ("broken", lambda path: gym(docker_image=path, repo="iterative/dvc")),
    "SWE-smith": ("healthy", lambda path: smith(image_name=path)),
    "Nemotron's scripts": ("broken", nemo_generated),
}


@pytest.mark.bubblewrap
@pytest.mark.parametrize("name", ROWS)
async def test_only_the_gold_patch_resolves_a_row(sandboxes: EnvContext, images: dict[str, str], name: str) -> None:
    path, row = ROWS[name]
    record = parse_record(row(images[path]), "row 1")
    assert set(record.expected) == {*FAIL_TO_PASS, *PASS_TO_PASS}
    assert record.hidden == {"tests/test_calc.py"}
    verified = await verify_record(sandboxes, record)
    assert (verified.verified, verified.verifiable) == (True, "yes")


@pytest.mark.bubblewrap
async def test_agent_of_an_injected_bug_sees_neither_fix_nor_failing_tests(
    sandboxes: EnvContext, images: dict[str, str]
) -> None:
    record = parse_record(smith(image_name=images["healthy"]), "row 1")
    async with start_episode(sandboxes, record) as episode:
        seen = await episode.sandbox.exec("git log --all --format=%s; ls tests; cat calc.py", timeout=30)
        assert seen.text == f"Start of the task\n{BROKEN['calc.py']}"
        assert (await episode.sandbox.exec("rm -r .git; sed -i 's/a - b/a + b/' calc.py", timeout=30)).ok
        assert await episode.patch() == FIX  # its old content comes from a fresh sandbox, which has the bug, too
        assert (await episode.grade()).resolved


@pytest.mark.bubblewrap
@pytest.mark.exhaustive
async def test_an_audit_of_a_bug_finds_no_leak(sandboxes: EnvContext, images: dict[str, str]) -> None:
    findings = await audit_record(sandboxes, parse_record(smith(image_name=images["healthy"]), "row 1"))
    assert all(finding.ok for finding in findings), findings


NOT_RUN = """
import os, sys
if "pytest" in sys.modules:
    import pytest
    for number in range(3, 32):
        try:
            os.write(number, b"\\nother.py::test_x PASSED\\n")
        except OSError:
            pass
    pytest.skip("nothing to see", allow_module_level=True)
"""


@pytest.mark.bubblewrap
async def test_swe_smith_tests_that_do_not_run_are_no_success(sandboxes: EnvContext, images: dict[str, str]) -> None:
    """By SWE-smith's own rules a test that is not in the log has passed."""
    record = parse_record(smith(image_name=images["healthy"]), "row 1")
    code = {"calc.py": BROKEN["calc.py"]}
    grade = await grade_patch(sandboxes, record, diff_files(code, {"calc.py": code["calc.py"] + NOT_RUN}))
    assert not grade.resolved
    assert f"{ADD}: not in the log" in grade.suspected_hack


def read(row: Mapping[str, Any]) -> SweRecord:
    return parse_record(row, "row 1")


def test_published_image_names() -> None:
    named = {
        "swerebench/sweb.eval.x86_64.demo_1776_calc-1": rebench(),
        "swerebench/sweb.eval.x86_64.demo_1776_calc-1:latest": rebench(docker_image=None),
        "docker.io/swerebenchv2/demo-calc:2-abc": rebench_v2(),
        "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest": gym(),
        "jyangballin/swesmith.x86_64.demo_1776_calc.0a1b2c3d": smith(image_name=None),
        "xingyaoww/sweb.eval.x86_64.python_s_mypy-17071:latest": nemo_generated(
            "/swebench-images/xingyaoww_sweb.eval.x86_64.python_s_mypy-17071.sif"
        ),
    }
    assert [read(row).docker_image for row in named.values()] == list(named)
    assert read(smith(image_name="swesmith.x86_64.a_1776_b.12345678")).docker_image.startswith("jyangballin/swesmith.")


def test_records_of_each_family_round_trip_through_a_task() -> None:
    for row in (rebench(), rebench_v2(), gym(), smith(), nemo_around(smith(), "SWE-smith"), nemo_generated("a/b:c")):
        record = read(row)
        assert SweRecord.model_validate(json.loads(record.model_dump_json())) == record
    assert (read(smith()).gold, read(smith()).bug_patch) == (FIX, BUG)
    assert read(rebench_v2()).workdir == "/calc"


def test_nemotron_requests_unwrap_r2e_gym_rows() -> None:
    from tests.envs.test_swe_records import R2E

    row = {**R2E, "instance_id": "namanjain12__sympy_final-abc"}
    assert read(nemo_around(row, "R2E-Gym/R2E-Gym-Subset")) == read(R2E)


def test_a_number_for_a_version_and_tests_as_json_are_read() -> None:
    record = read(
        rebench(
            version=1.5, FAIL_TO_PASS=json.dumps(FAIL_TO_PASS), install_config=json.dumps(rebench()["install_config"])
        )
    )
    assert record.swebench is not None
    assert (record.swebench.version, record.swebench.fail_to_pass) == ("1.5", tuple(FAIL_TO_PASS))


def test_eval_scripts_run_the_harness_commands() -> None:
    scripts = {
        name: spec.eval_script
        for name, row in {"rebench": rebench(), "v2": rebench_v2(), "gym": gym(), "smith": smith()}.items()
        if (spec := read(row).swebench)
    }
    assert (
        "\nLANG=C.UTF-8 LC_ALL=C.UTF-8 pip install -e .[dev]\ngit checkout HEAD -- tests/test_calc.py\n"
        in scripts["rebench"]
    )
    assert "-p no:cacheprovider tests/test_calc.py\n: '>>>>> End" in scripts["rebench"]
    assert "\ncd /calc\ngit update-index -q --refresh\ngit apply -v --3way --recount " in scripts["v2"]
    assert "\n: '>>>>> Start Test Output'\npytest -n0 -rA tests/test_calc.py\n" in scripts["gym"]
    assert "\npytest --disable-warnings --color=no --tb=no --verbose tests/test_calc.py\n" in scripts["smith"]
    case = "diff --git a/t.test b/t.test\n--- a/t.test\n+++ b/t.test\n@@ -1 +1,2 @@\n+[case testA]\n [case testB]\n"
    mypy = read(gym(repo="python/mypy", test_patch=case)).swebench
    assert mypy is not None
    assert "pytest -n0 -rA -k 'testA or testB'\n" in mypy.eval_script


REFUSED: dict[str, Mapping[str, Any]] = {
    r"install_config: required, and not given; SWE-bench-extra .* its successor nebius/SWE-rebench": extra(),
    r"install_config\.test_cmd: required in a row of SWE-rebench": rebench(install_config={**CONFIG, "test_cmd": None}),
    r"install_config\.test_cmd: right would be a command": rebench(install_config={**CONFIG, "test_cmd": 1}),
    r"install_config\.log_parser: 'parse_log_r_v2' is none of the \d+ parsers of swebench 5": rebench(
        install_config={**CONFIG, "log_parser": "parse_log_r_v2"}
    ),
    r"install_config\.log_parser: 'parse_log_jest' is missing in swebench 5 or names tests differently": rebench_v2(
        install_config={**CONFIG, "log_parser": "parse_log_jest"}
    ),
    r"install_config\.test_cmd: blank": rebench(install_config={**CONFIG, "test_cmd": [" "]}),
    r"install_config: a list; right would be an object": rebench(install_config=[1]),
    r"base_commit: required in a row of SWE-rebench, and not given": rebench(base_commit=None),
    r"image_name: required in a row of SWE-rebench-V2": rebench_v2(image_name=None),
    r"workdir: '/etc': right would be a top-level directory": rebench_v2(repo="demo/etc"),
    r"test_patch: required in a row of SWE-Gym": gym(test_patch=""),
    r"FAIL_TO_PASS: empty: .*SWE-Gym-Raw": gym(repo="a/b", FAIL_TO_PASS=[]),
    r"problem_statement: required in a row of SWE-smith": smith(problem_statement=""),
    r"FAIL_TO_PASS: 'TestParse' is not a pytest node id": smith(FAIL_TO_PASS=["TestParse"]),
    r"instance_id: 'x'; right would be OWNER__REPO\.COMMIT\.BUG": smith(instance_id="x"),
    r"repo: tornadoweb__tornado has its own test runner": smith(instance_id="tornadoweb__tornado.d5.x"),
    r"patch: 0 file patches; right would be a git diff": smith(patch="no diff"),
    r"patch: a\.png: binary change": smith(patch="diff --git a/a.png b/a.png\nBinary files differ\n"),
    r"image_assets\.test_patch: the hidden tests": classic(
        image_assets={"test_patch": [{"path": "a.png", "url": "u"}]}
    ),
    r"dataset_name: 'deepswe' is graded only by NeMo Gym": nemo_around(smith(), "deepswe"),
    r"instance_dict: not JSON": {"responses_create_params": {"metadata": {"instance_dict": "{"}}},
    r"instance_dict: missing, .*a conversation, not a task": {"responses_create_params": {"input": []}},
    r"mode: 'repro-gen' asks for a test": nemo_generated("a", mode="repro-gen"),
    r"test_script: required in a row of NeMo Gym's": nemo_generated("a", instance=gym() | {"setup_script": "x"}),
    r"metadata\.image: '/a/b\.sif'; right would be": nemo_generated("/a/b.sif"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_incomplete_row_is_rejected_with_one_line(tmp_path: Path, reason: str) -> None:
    with pytest.raises(TaskRecordError, match=f"a\\.jsonl: row 1: (\\S+\\.)?{reason}") as error:
        read_records(write(tmp_path / "a.jsonl", REFUSED[reason]))
    assert str(error.value).isprintable()


def test_specs_join_swe_rebench_grading_to_swe_bench_extra_rows(tmp_path: Path) -> None:
    rows, specs = write(tmp_path / "extra.jsonl", extra()), write(tmp_path / "specs.jsonl", rebench(version="1"))
    (task,) = SweEnvironment(NO_SANDBOXES, rows, specs=specs).tasks("train")
    (whole,) = SweEnvironment(NO_SANDBOXES, specs).tasks("train")
    assert task == whole


def test_dropped_images_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graded = {"eval_script": "pytest", "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    assets = json.dumps({"problem_statement": ["https://example.org/a.png"], "patch": [], "test_patch": []})
    rows = [classic(**graded, image_assets=assets), classic(**graded, instance_id="a__b-2", image_assets=None)]
    with caplog.at_level(logging.WARNING):
        assert len(SweEnvironment(NO_SANDBOXES, write(tmp_path / "a.jsonl", *rows)).tasks("test")) == 2
    assert "1 of 2 rows have images (image_assets)" in caplog.text


def test_tasks_whose_successes_cannot_be_verified_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marks = ("no", "weak", "", "", "yes")
    rows = [{**LOCAL, "task_id": f"demo-{number}", "verifiable": mark} for number, mark in enumerate(marks)]
    with caplog.at_level(logging.WARNING):
        assert len(SweEnvironment(NO_SANDBOXES, write(tmp_path / "a.jsonl", *rows)).tasks("test")) == 5
    assert "of 5 tasks, the successes of 1 cannot be verified, of 1 are verified weakly, of 2 may be" in caplog.text


def verdict(row: Mapping[str, Any], *lines: str) -> tuple[bool, Mapping[str, str]] | None:
    spec = read(row).swebench
    assert spec is not None
    found = judge_by_dataset_rules(spec, swebench_log(lines))
    return found and (found.resolved, found.tests)


def test_swe_smith_rules_read_progress_and_pass_missing_tests() -> None:
    assert verdict(smith(), f"{ADD} PASSED   [ 50%]", f"{DOUBLE} XFAIL (why) [100%]") == (
        True,
        {ADD: "PASSED", DOUBLE: "PASSED"},
    )
    assert verdict(smith(), f"[gw0] [ 50%] PASSED {ADD} ") == (True, {ADD: "PASSED"})
    assert verdict(smith(), f"{ADD} FAILED", f"PASSED {DOUBLE}") == (False, {ADD: "FAILED", DOUBLE: "PASSED"})
    assert verdict(smith(), f"{ADD} SKIPPED (no)", f"{DOUBLE} PASSED") == (False, {ADD: "FAILED", DOUBLE: "PASSED"})
    assert verdict(smith(), "collected 0 items") is None
    uncollected = verdict(smith(), "ERROR tests/test_calc.py - ImportError: no calc")  # SWE-smith calls that a success
    assert uncollected == (False, {ADD: "FAILED", DOUBLE: "FAILED"})
    assert verdict(smith(), "tests/test_calc.py PASSED") == (True, {})  # names neither: in doubt


def test_swe_rebench_v2_rules_require_every_test_and_ignore_durations() -> None:
    vitest = {**CONFIG, "log_parser": "parse_log_vitest"}
    row = rebench_v2(FAIL_TO_PASS=["adds [1.5 ms]"], PASS_TO_PASS=["waits in 3 msec"], install_config=vitest)
    assert verdict(row, "✓ adds [7 ms]", "✓ waits (2 ms)") == (True, {"adds": "PASSED", "waits": "PASSED"})
    assert verdict(rebench_v2(), f"PASSED {ADD}", f"XFAIL {DOUBLE}") == (False, {ADD: "PASSED", DOUBLE: "FAILED"})
    assert verdict(rebench_v2(), f"PASSED {ADD}") == (False, {ADD: "PASSED", DOUBLE: "FAILED"})
