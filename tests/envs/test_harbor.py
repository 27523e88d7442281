"""Tasks in Harbor's layout: reading, refusals, reward files, and whole episodes in containers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.contexts import context_of

from envs import EnvContext, Grade, GradingError, TaskRecordError, UndecidableError
from envs.harbor import HarborEnvironment, read_task
from envs.harbor.environment import TimedTools, task_directories
from envs.harbor.grading import Survey, parse_reward, replaced_programs
from envs.harbor.tasks import read_files, resolve
from sandbox import ImageMissingError, NullBackend, SandboxSpec, SandboxUnavailableError
from tools import ToolCall

TASKS = Path(__file__).parent / "harbor_tasks"
Variant = Callable[..., Path]


@pytest.fixture
def variant(tmp_path: Path) -> Variant:
    """Copies the task ``greeting`` with text appended to its ``task.toml``, and further files."""

    def make(toml: str = "", files: dict[str, str] | None = None, *, swap: tuple[str, str] = ("", "")) -> Path:
        directory = tmp_path / "greeting"
        shutil.copytree(TASKS / "greeting", directory, dirs_exist_ok=True)
        config = (directory / "task.toml").read_text()
        (directory / "task.toml").write_text(config.replace(*swap) + toml if swap[0] else config + toml)
        for name, text in (files or {}).items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        return directory

    return make


# Reading


def test_both_schemas_are_read() -> None:
    greeting, counter = (read_task(TASKS / name) for name in ("greeting", "counter"))
    assert greeting.instruction.startswith("Write `hello.txt`"), "the canary line is left out"
    assert greeting.config.environment.healthcheck is not None
    assert (greeting.config.schema_version, counter.config.schema_version) == ("1.4", "1.0")
    old = counter.config.environment
    assert (old.memory_mb, old.storage_mb, old.workdir) == (256, 1024, "/srv/counter")
    assert (counter.config.agent.user, counter.config.verifier.user) == ("worker", "judge")


UNSUPPORTED = {
    "several steps": "\n[[steps]]\nname = 'one'\n",
    "MCP servers": "\n[[environment.mcp_servers]]\nname = 'a'\n",
    "a separate verifier image": "\n[verifier.environment]\ndocker_image = 'b'\n",
    "collect commands": "\n[[verifier.collect]]\ncommand = 'c'\n",
}
UNSUPPORTED_KEYS = {
    "skills": "skills_dir = '/skills'",
    "GPUs": "gpus = 1",
    "Windows": "os = 'windows'",
}
UNSUPPORTED_FILES = {
    "compose": "environment/docker-compose.yaml",
    "an earlier trajectory": "trajectory.json",
    "ignore rules": "tests/.harborignore",
}


def test_what_is_not_supported_is_refused_by_name(variant: Variant) -> None:
    for name, toml in UNSUPPORTED.items():
        _refused(variant(toml), name)
    for name, key in UNSUPPORTED_KEYS.items():
        _refused(variant(swap=("[environment]\n", f"[environment]\n{key}\n")), name)
    for name, file in UNSUPPORTED_FILES.items():
        _refused(variant(files={file: ""}), name)


def _refused(directory: Path, name: str) -> None:
    with pytest.raises(TaskRecordError) as error:
        read_task(directory)
    assert f"it needs {name}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    shutil.rmtree(directory)


BROKEN = {
    "schema_version '2.0' is unknown": ('schema_version = "1.4"', 'schema_version = "2.0"'),
    "verifier.timeout_sec: Input should be greater than 0": ("timeout_sec = 30.0", "timeout_sec = 0"),
    "has no default; sandboxes get no variable": (
        "[environment]\n",
        "[solution]\nenv = {KEY = '${HOME}'}\n[environment]\n",
    ),
    "the user nobody keeps the sandbox alive": ("timeout_sec = 120.0", "user = 'nobody'"),
    "Invalid value": ("cpus = 1", "cpus = one"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_task_is_one_line(variant: Variant, message: str) -> None:
    with pytest.raises(TaskRecordError, match=message.replace("(", r"\(")) as error:
        read_task(variant(swap=BROKEN[message]))
    assert len(str(error.value).splitlines()) == 1


def test_missing_files_are_named_together(variant: Variant) -> None:
    directory = variant()
    for name in ("instruction.md", "tests/test.sh", "environment/Dockerfile"):
        (directory / name).unlink()
    with pytest.raises(TaskRecordError) as error:
        read_task(directory)
    assert len(str(error.value).splitlines()) == 3


def test_link_out_of_the_task_is_refused(variant: Variant, tmp_path: Path) -> None:
    directory = variant()
    (tmp_path / "secret").write_text("of the host")
    (directory / "tests/link").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskRecordError, match="a link out of the task's directory"):
        read_files(directory / "tests", read_task(directory))


def test_no_variable_of_the_machine_enters_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT", "of the host")
    assert resolve({"A": "${LIMIT:-7}", "B": "plain $LIMIT", "C": "${LIMIT:-}"}) == {
        "A": "7",
        "B": "plain $LIMIT",
        "C": "",
    }


DOWNLOADS = """#!/bin/bash
apt-get update && apt-get install -y curl   # curl
curl -LsSf https://example.com/install.sh | sh
uvx -p 3.13 -w pytest==8.4.1 pytest /tests
# pip install pytest
pip install --no-index /wheels/*.whl
curl http://localhost:8000/health
python3 -m pip install pytest
"""


def test_scripts_that_install_over_the_network_are_named(variant: Variant) -> None:
    assert not read_task(TASKS / "counter").downloads()
    places = [line.partition(": ")[0] for line in read_task(variant(files={"tests/test.sh": DOWNLOADS})).downloads()]
    assert places == ["test.sh:2", "test.sh:3", "test.sh:4", "test.sh:8"]


def test_directories_without_tasks_are_refused(tmp_path: Path) -> None:
    assert [path.name for path in task_directories(TASKS)] == ["counter", "greeting"]
    assert task_directories(TASKS / "counter") == [TASKS / "counter"]
    with pytest.raises(TaskRecordError, match=r"no task\.toml"):
        task_directories(tmp_path)


async def test_environment_splits_skips_and_names_every_problem(
    variant: Variant, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = EnvContext(NullBackend(), limits=SandboxSpec(memory_mb=512), grade_timeout=20.0)
    with pytest.raises(TaskRecordError, match=r"(?s)task counter.*env\.grade_timeout=30.*task greeting"):
        HarborEnvironment(context, TASKS).tasks("train")
    context = EnvContext(NullBackend(), limits=SandboxSpec(memory_mb=256))
    environment = HarborEnvironment(context, TASKS, heldout=1)
    assert [[task.id for task in environment.tasks(split)] for split in ("train", "heldout")] == [
        ["counter"],
        ["greeting"],
    ]
    broken = HarborEnvironment(EnvContext(NullBackend(), limits=SandboxSpec(memory_mb=255)), TASKS)
    for _ in range(2):
        with pytest.raises(TaskRecordError, match=r"set sandbox\.memory_mb=256 or more"):
            broken.tasks("train")
    with pytest.raises(TaskRecordError, match="has train and heldout"):
        environment.tasks("test")
    variant("\n[[steps]]\nname = 'one'\n")
    shutil.copytree(TASKS / "counter", tmp_path / "counter")
    assert [task.id for task in HarborEnvironment(context, tmp_path, skip_broken=True).tasks("any")] == ["counter"]
    assert "several steps" in caplog.text
    with pytest.raises(SandboxUnavailableError, match=r"set sandbox\.backend to docker or podman"):
        await environment.prepare("train")


# Grading


def test_reward_files() -> None:
    assert parse_reward("reward.txt", b" 0.5\n") == (0.5, {})
    assert parse_reward("reward.json", b"1") == (1.0, {})
    assert parse_reward("reward.json", b'{"reward": 0.25, "lines": 3, "fast": true}') == (
        0.25,
        {"lines": 3.0, "fast": 1.0},
    )
    many = {"reward": 1, "no name": 1, **{f"m{number}": number for number in range(99)}}
    assert len(parse_reward("reward.json", json.dumps(many).encode())[1]) == 32
    for (name, content), reason in {
        ("reward.txt", b""): "empty",
        ("reward.txt", b"\n"): "empty",
        ("reward.json", b""): "empty",
        ("reward.txt", b"nan"): "finite",
        ("reward.txt", b"inf"): "finite",
        ("reward.txt", b"passed"): "not valid",
        ("reward.json", b"{"): "not valid",
        ("reward.json", b"NaN"): "finite",
        ("reward.json", b"1e999"): "finite",
        ("reward.json", b"1" + b"0" * 400): "not valid",
        ("reward.json", b'{"reward": "1"}'): "finite",
        ("reward.json", b'{"lines": 1}'): "no number named reward",
        ("reward.json", b"null"): "finite",
        ("reward.json", b"[" * 100_000): "not valid",
    }.items():
        with pytest.raises(GradingError, match=reason):
            parse_reward(name, content)


def test_replaced_programs_are_told_from_honest_changes() -> None:
    survey = Survey(("/usr/local/bin", "/usr/bin", "/opt/venv/bin"), frozenset({"bash", "python3"}))
    honest = {
        "/app/conftest.py": "added",
        "/usr/local/bin/mytool": "added",
        "/usr/lib/python3/dist-packages/own.py": "added",
        "/usr/lib/python3.11/__pycache__/os.pyc": "changed",
        "/usr/share/doc": "removed",
        "/etc/passwd": "changed",
    }
    hacks = {
        "/usr/bin/bash": "changed",
        "/usr/local/bin/bash": "added",
        "/opt/venv/bin/pytest": "removed",
        "/opt/venv": "changed",
        "/usr/lib/x86_64-linux-gnu/libc.so.6": "changed",
        "/usr/lib/python3/dist-packages/sitecustomize.py": "added",
        "/etc/ld.so.preload": "added",
        "/conftest.py": "added",
    }
    assert replaced_programs(hacks, replace(survey, may_replace=("/opt/*", "/[!o]*"))) == []
    assert replaced_programs({**honest, **hacks}, survey) == [f"{path}: {hacks[path]}" for path in sorted(hacks)]


async def test_call_after_the_deadline_ends_the_episode() -> None:
    late = await TimedTools(None, -math.inf).call(ToolCall("execute_bash", {"cmd": "true"}))  # type: ignore[arg-type]
    assert late.submitted


# Whole episodes


@pytest.fixture(
    params=[
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]),
        pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.exhaustive]),
    ]
)
async def context(request: pytest.FixtureRequest) -> AsyncIterator[EnvContext]:
    async with context_of(request.param, SandboxSpec(memory_mb=256)) as context:
        yield context


async def played(environment: HarborEnvironment, name: str, commands: list[str] | None = None) -> Grade:
    """The grade after ``commands``, or after the task's solution."""
    task = next(task for task in environment.tasks("train") if task.id == name)
    calls = environment.solution(task) if commands is None else [environment.scaffold.shell(each) for each in commands]
    try:
        async with environment.start(task) as episode:
            for call in calls:
                assert not (result := await episode.tools.call(call)).failed, result
            return await episode.grade()
    except ImageMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["greeting", "counter"])
async def test_solution_is_resolved_and_doing_nothing_is_not(context: EnvContext, name: str) -> None:
    environment = HarborEnvironment(context, TASKS)
    solved, untouched = await played(environment, name), await played(environment, name, [])
    assert (solved.reward, solved.resolved) == (1.0, True)
    assert (untouched.reward, untouched.resolved, untouched.suspected_hack) == (0.0, False, ())


async def test_image_settings_users_and_partial_rewards(context: EnvContext) -> None:
    environment = HarborEnvironment(context, TASKS)
    part = await played(
        environment, "greeting", ['[ "$PWD $GREETING" = "/app Hello" ]', "echo 'Hello Ada!' > hello.txt"]
    )
    assert (part.reward, part.metrics) == (pytest.approx(1 / 3), {"lines": 1.0})
    commands = ["id -un | grep -qx worker && [ -w . ] && [ ! -w /etc ] && [ -w /logs/artifacts ]", "[ ! -e /tests ]"]
    assert (await played(environment, "counter", commands)).reward == 0.0


async def test_missing_reward_is_an_infrastructure_failure(context: EnvContext, variant: Variant) -> None:
    silent = variant(files={"tests/test.sh": "#!/bin/bash\necho no reward\n"})
    with pytest.raises(GradingError, match=r"neither reward.json nor reward.txt \(exit code 0: no reward\)"):
        await played(HarborEnvironment(context, silent), "greeting", [])


async def test_failed_build_and_failed_health_check_are_told_apart(context: EnvContext, variant: Variant) -> None:
    online = variant(files={"environment/Dockerfile": "FROM agent-rl-base\nRUN echo > /dev/tcp/192.0.2.1/80\n"})
    with pytest.raises(UndecidableError, match="cannot be built without a network"):
        await played(HarborEnvironment(context, online), "greeting", [])
    absent = variant(files={"environment/Dockerfile": "FROM agent-rl-absent:1\n"})
    with pytest.raises(ImageMissingError, match="agent-rl-absent:1"):
        async with HarborEnvironment(context, absent).start(HarborEnvironment(context, absent).tasks("train")[0]):
            pass
