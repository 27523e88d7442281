"""Attacks by a dataset row or an image, and on data of the user or the host."""

from __future__ import annotations

import asyncio
import io
import json
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_rl.cli import main
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.monitoring.console import Display
from envs import EnvContext, EnvsError, GradingError, TaskRecordError
from envs.swe import SweEnvironment, SweRecord, start_episode, verify_record
from envs.swe.records import parse_record
from sandbox import ImageMissingError, ImagePolicy, SandboxBackend, SandboxSpec, open_backend
from tests.envs.dataset_rows import classic, gym, nemo_around, nemo_generated, rebench, rebench_v2, smith
from tests.envs.images import SYSTEM, directory_image
from tests.redteam.attack import report_stopped

pytestmark = pytest.mark.redteam
bubblewrap = pytest.mark.bubblewrap
SECRET = "the host's own secret"
ROW = {
    "repo_name": "calc",
    "task_id": "calc-add",
    "expected_output_json": '{"test_calc.py::test_add": "PASSED"}',
    "problem_statement": "add(2, 3) gives -1.",
}
LOCAL = {**ROW, "files": {"calc.py": ""}, "test_command": "true"}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host directory next to that of the tasks, with a secret that no sandbox may read."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/secret").write_text(SECRET)
    return tmp_path / "host"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[SandboxBackend]:
    """Bubblewrap with ``tmp_path/images`` as the directory of images."""
    images = ImagePolicy(root=tmp_path / "images")
    backend = open_backend("bubblewrap", run_id=f"redteam-{uuid.uuid4().hex[:8]}", images=images)
    yield backend
    await backend.close()


def refusal_of(tasks: Path, **fields: object) -> EnvsError:
    """Read a row with ``fields`` and return its error."""
    (tasks / "train.jsonl").write_text(json.dumps({**LOCAL, **fields}) + "\n")
    with pytest.raises(TaskRecordError) as error:
        SweEnvironment(EnvContext(None), tasks / "train.jsonl").tasks("train")  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize("site", ["/", "/run", "..", "../host", "a/../../host", ".", "./.", "\0", "down/"])
def test_a_row_binds_a_directory_of_the_host_as_its_packages(tasks: Path, host: Path, site: str) -> None:
    (tasks / "down").symlink_to(host)
    error = refusal_of(tasks, site_packages=site)
    assert "site_packages" in str(error)
    assert "row 1" in str(error) or "calc-add" in str(error)
    report_stopped(f"site_packages {site!r}", error)


async def test_a_row_is_started_without_having_been_read_from_a_file(tasks: Path, host: Path) -> None:
    (tasks / "site").symlink_to(host)
    record = SweRecord.model_validate({**LOCAL, "site_packages": "site"})
    with pytest.raises(TaskRecordError, match="calc-add: site_packages") as error:
        async with start_episode(EnvContext(None), record, site_root=tasks):  # type: ignore[arg-type]
            raise AssertionError("a sandbox was started")
    report_stopped("site_packages, a link to the host, given in code", error.value)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".git/config", "", "a\0b"])
def test_a_row_writes_outside_its_working_directory(tasks: Path, path: str) -> None:
    report_stopped(f"files: {path!r}", refusal_of(tasks, files={path: "x"}))


DEEP = "[" * 200_000
LONG = f"[{'1' * 10_000}]"


@pytest.mark.parametrize("field", ["expected_output_json", "PASS_TO_PASS", "FAIL_TO_PASS"])
@pytest.mark.parametrize("text", [DEEP, LONG, "[\x00", "{" * 5000])
def test_a_row_breaks_the_reading_of_json_in_a_field(tasks: Path, field: str, text: str) -> None:
    more = {"instance_id": "a__b-1", "test_patch": ""} if field.isupper() else {}
    error = refusal_of(tasks, **more, **{field: text})
    assert len(str(error)) < 1000
    report_stopped(f"{field}: {text[:20]!r}, {len(text)} characters", error)


@pytest.mark.parametrize("line", [DEEP.encode(), LONG.encode(), b"\xff\xfe{", b'{"a": "\xff"}', b"\x00", b'"a"'])
def test_a_row_breaks_the_reading_of_its_file(tasks: Path, line: bytes) -> None:
    (tasks / "train.jsonl").write_bytes(line + b"\n")
    with pytest.raises(TaskRecordError, match=r"row 1: ") as error:
        SweEnvironment(EnvContext(None), tasks / "train.jsonl").tasks("train")  # type: ignore[arg-type]
    assert str(error.value).isprintable()
    report_stopped(f"a row of {line[:20]!r}, {len(line)} bytes", str(error.value)[:200])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [*SweRecord.model_fields, "instance_id", "repo", "patch", "image", "test_patch", "FAIL_TO_PASS"]
)


@given(st.dictionaries(FIELDS, JSON | JSON.map(json.dumps)))
def test_any_row_is_read_or_refused_in_one_line(row: dict[str, object]) -> None:
    try:
        record = parse_record({**LOCAL, **row}, "row 1")
        assert isinstance(record.gold, str)
        assert record.expected
        assert isinstance(record.command, str)
    except TaskRecordError as error:
        refusal = str(error)
        assert refusal.isprintable()
        assert "row 1: " in refusal or "parsed_commit_content" in refusal


DATA_SETS = (rebench(), rebench_v2(), gym(), smith(), classic(), nemo_around(gym(), "SWE-Gym"), nemo_generated("a/b"))
PARTS = sorted({field for row in DATA_SETS for field in (*row, "image_assets", "image_name", "docker_image")})


@given(st.sampled_from(DATA_SETS), st.dictionaries(st.sampled_from(PARTS), JSON | JSON.map(json.dumps), max_size=3))
def test_any_row_of_a_data_set_is_read_or_refused_in_one_line(
    row: dict[str, object], changes: dict[str, object]
) -> None:
    try:
        record = parse_record({**row, **changes}, "row 1")
        assert isinstance(record.gold, str)
        assert record.expected
        assert record.workdir in ("/testbed", "/calc") or "repo" in changes
    except TaskRecordError as error:
        refusal = str(error)
        assert refusal.isprintable()


@pytest.mark.parametrize("repo", ["a/etc", "a/..", "a/", "a/proc", "a/x y", "a/.git", "/"])
def test_a_row_takes_a_system_directory_of_its_box_for_its_repository(tasks: Path, repo: str) -> None:
    (tasks / "train.jsonl").write_text(json.dumps(rebench_v2(repo=repo)) + "\n")
    with pytest.raises(TaskRecordError, match="row 1: workdir: ") as error:
        SweEnvironment(EnvContext(None), tasks / "train.jsonl").tasks("train")  # type: ignore[arg-type]
    report_stopped(f"repo {repo!r} of SWE-rebench-V2", error.value)


@pytest.mark.parametrize("content", ["[]", "1", "{", DEEP, LONG, '{"file_diffs": [1]}', '{"file_diffs": [{}]}'])
def test_a_row_whose_commit_is_none(content: str) -> None:
    record = SweRecord.model_validate({**LOCAL, "parsed_commit_content": content})
    with pytest.raises(TaskRecordError, match="calc-add: parsed_commit_content") as error:
        assert record.gold
    report_stopped(f"parsed_commit_content {content[:30]!r}", str(error.value)[:200])


@pytest.mark.parametrize("task_id", ["\x1b[2Jgone", "a\nb", "a\0", "\x9b31m"])
def test_a_row_steers_the_terminal_by_its_id(tasks: Path, task_id: str) -> None:
    error = refusal_of(tasks, task_id=task_id)
    assert str(error).isprintable()
    report_stopped(f"task_id {task_id!r}", error)


@bubblewrap
@pytest.mark.parametrize("image", ["/", "/usr/..", ".", "..", "../host", "link", "/proc/self/root"])
async def test_a_row_takes_the_host_for_its_image(backend: SandboxBackend, tmp_path: Path, image: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/link").symlink_to("/")
    record = SweRecord.model_validate({**ROW, "docker_image": image})
    with pytest.raises(ImageMissingError, match=r"calc-add: docker_image: .*below sandbox.image_root") as error:
        async with start_episode(EnvContext(backend, start_retries=0), record):
            raise AssertionError("a sandbox was started")
    report_stopped(f"docker_image {image!r}", error.value)


@bubblewrap
async def test_a_row_names_an_image_where_none_is_allowed(tmp_path: Path) -> None:
    image = directory_image(tmp_path / "image", {}, "true")
    backend = open_backend("bubblewrap", run_id="redteam-no-images")
    try:
        with pytest.raises(ImageMissingError, match=r"set it, or sandbox\.backend to docker") as error:
            await backend.start(SandboxSpec(image=str(image)))
    finally:
        await backend.close()
    report_stopped("docker_image of a directory, sandbox.image_root not set", error.value)


@bubblewrap
@pytest.mark.parametrize(("setting", "reason"), [("", "set it, or"), ("image_root: images", "leads to /; it must be")])
def test_a_row_takes_the_host_for_its_image_in_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, reason: str
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "train.jsonl").write_text(json.dumps({**ROW, "docker_image": "/", "gold_patch": "x"}) + "\n")
    (tmp_path / "c.yaml").write_text(
        f"name: c\nmodel: tiny-moe\nsandbox: {{backend: bubblewrap, {setting}}}\n"
        "env: {name: swe, options: {path: train.jsonl}}\neval: {tasks: 1, split: train}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["agent-rl", "eval", "c.yaml", "--policy", "gold", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        main()
    line = capsys.readouterr().err
    assert (ended.value.code, line.count("\n")) == (2, 1)
    assert line.startswith("error: task calc-add: docker_image: image '/'")
    assert reason in line
    report_stopped(f"docker_image '/' in an evaluation with {setting or 'no image_root'}", line.strip())


@bubblewrap
async def test_the_users_own_image_needs_no_root(tmp_path: Path) -> None:
    """What the config names is the user's, wherever it lies; another directory is refused all the same."""
    own, other = (str(directory_image(tmp_path / name, {}, "true")) for name in ("own", "other"))
    backend = open_backend("bubblewrap", run_id="redteam-own", images=ImagePolicy(configured=own))
    try:
        sandbox = await backend.start(SandboxSpec(image=own, ro_binds=SYSTEM))
        assert (await sandbox.exec("true", timeout=20)).ok
        with pytest.raises(ImageMissingError) as error:
            await backend.start(SandboxSpec(image=other))
    finally:
        await backend.close()
    report_stopped("docker_image beside the one that sandbox.image names", error.value)


@bubblewrap
async def test_an_image_links_to_the_host(backend: SandboxBackend, tmp_path: Path, host: Path) -> None:
    image = directory_image(tmp_path / "images/image", {}, f"ln -s {host} inner; ln -s {host}/secret file")
    (image / "data").symlink_to(host)
    sandbox = await backend.start(SandboxSpec(image=str(image), ro_binds=SYSTEM))
    seen = await sandbox.exec("cat /data/* inner/* file; ls -d /data", timeout=20)
    assert SECRET not in seen.text
    report_stopped("links at an image's top and in its working directory", seen.text.strip())


@bubblewrap
@pytest.mark.parametrize("link", ["testbed", "usr"])
async def test_an_image_whose_own_directory_is_a_link(
    backend: SandboxBackend, tmp_path: Path, host: Path, link: str
) -> None:
    image = directory_image(tmp_path / "images/image", {}, "true")
    (image / link).rmdir()
    (image / link).symlink_to(host)
    with pytest.raises(ImageMissingError, match="link") as error:
        await backend.start(SandboxSpec(image=str(image), ro_binds=SYSTEM))
    report_stopped(f"an image whose {link}/ is a link to the host", error.value)


@bubblewrap
async def test_an_image_leads_a_mount_point_out(backend: SandboxBackend, tmp_path: Path, host: Path) -> None:
    """Bubblewrap makes missing mount points as the host's user, while the host's root is still at /oldroot."""
    image = directory_image(tmp_path / "images/image", {}, "true")
    (image / "opt").mkdir()
    (image / "opt/agent-rl").symlink_to(f"/oldroot{host}")
    with pytest.raises(ImageMissingError, match="on the way to /opt/agent-rl/site") as error:
        await backend.start(SandboxSpec(image=str(image), ro_binds={**SYSTEM, str(host): "/opt/agent-rl/site"}))
    assert os.listdir(host) == ["secret"]
    report_stopped("an image with a link on the way to a mount point", error.value)


@bubblewrap
async def test_an_image_holds_pipes_and_devices(backend: SandboxBackend, tmp_path: Path) -> None:
    image = directory_image(tmp_path / "images/image", {"kept": "1"}, "mkfifo pipe; mknod zero c 1 5 || true")
    sandbox = await asyncio.wait_for(backend.start(SandboxSpec(image=str(image), ro_binds=SYSTEM)), 20)
    seen = await sandbox.exec("ls", timeout=20)
    assert seen.stdout == b"kept\n"
    report_stopped(
        "a pipe and a device that never end in an image's working directory", f"left out; the sandbox has {seen.text!r}"
    )


def log_of(task_id: str) -> Path:
    result = EpisodeResult(task_id=task_id, sample=0, resolved=True, stop="", turns=0, seconds=0.0)
    return EvaluationDirectory(Path("/nowhere"), {}).log_of(result)


@pytest.mark.parametrize("task_id", ["..", ".", "", "../..", "/etc", "a/../../b", "~", "x" * 5000, "é" * 300, "\ud800"])
def test_a_task_id_leaves_the_directory_of_logs(task_id: str) -> None:
    path = Path(os.path.normpath(log_of(task_id)))
    assert path.parts[:-2] == ("/", "nowhere", "logs")
    assert len(path.parts[-2]) <= 200
    report_stopped(f"task_id {task_id[:20]!r}", path.parts[-2][:40])


@given(st.text(), st.text())
def test_two_task_ids_never_share_a_directory(one: str, other: str) -> None:
    for task_id in (one, other):
        assert os.path.normpath(log_of(task_id)) == str(log_of(task_id))
        assert log_of(task_id).parent.parent == Path("/nowhere/logs")
    assert (log_of(one) == log_of(other)) == (one == other)


PROXY = "http://user:password@proxy.invalid:3128"
HOST_ENV = {
    "HTTP_PROXY": PROXY,
    "https_proxy": PROXY,
    "OPENAI_API_KEY": "key",
    "HF_TOKEN": "token",
    "MY_SECRET": SECRET,
}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with proxies and credentials, in the environment and in docker's config."""
    (tmp_path / "docker").mkdir()
    config = {
        "proxies": {"default": {"httpProxy": PROXY, "httpsProxy": PROXY}},
        "auths": {"registry.invalid": {"auth": "dXNlcjpwYXNzd29yZA=="}},
    }
    (tmp_path / "docker/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name, value in HOST_ENV.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(
    "name", [pytest.param("bubblewrap", marks=bubblewrap), pytest.param("docker", marks=pytest.mark.docker)]
)
async def test_the_users_proxies_and_keys_are_read_in_a_sandbox(name: str) -> None:
    backend = open_backend(name, run_id=f"redteam-{uuid.uuid4().hex[:8]}")
    try:
        sandbox = await backend.start(SandboxSpec())
        seen = (await sandbox.exec("env; cat /proc/1/environ /proc/self/environ | tr '\\0' '\\n'", timeout=60)).text
    finally:
        await backend.close()
    assert "PATH=" in seen
    assert not [word for word in ("proxy", "password", "token", "key", SECRET) if word in seen.lower()], seen
    report_stopped(
        f"the user's proxies and keys in a sandbox of {name}", f"variables there: {sorted(set(seen.split()))}"
    )


@bubblewrap
async def test_the_hosts_keyrings_and_timers_are_read(backend: SandboxBackend) -> None:
    sandbox = await backend.start(SandboxSpec())
    files = "/proc/keys /proc/key-users /proc/timer_list /proc/sched_debug /proc/kcore"
    seen = await sandbox.exec(f"head -c 100 {files}", timeout=20)
    assert seen.stdout == b""
    report_stopped("reading what /proc tells of the whole machine", seen.text.strip())


STEERING = "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\r"


@bubblewrap
async def test_a_test_log_steers_the_terminal(backend: SandboxBackend) -> None:
    """Through the whole way: printed in a sandbox, quoted by an error, shown."""
    codes = "".join(f"\\{ord(letter):03o}" for letter in STEERING.encode().decode("latin-1"))
    record = SweRecord.model_validate({**LOCAL, "test_command": f"printf 'seen {codes}'; exit 3"})
    with pytest.raises(GradingError) as error:
        await verify_record(EnvContext(backend), record)
    assert "seen" in str(error.value)
    assert str(error.value).isprintable()
    report_stopped("escape sequences in a test log that an error quotes", repr(str(error.value))[-80:])


def test_a_note_steers_the_terminal() -> None:
    screen = io.StringIO()
    Display("run", Console(file=screen, force_terminal=True)).note(f"seen {STEERING}")
    assert not set(screen.getvalue()) & set(STEERING) - set("[2J]0;owned31m")
    report_stopped("escape sequences in a line of the display", repr(screen.getvalue()))
