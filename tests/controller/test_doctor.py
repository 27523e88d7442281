"""``agent-rl doctor`` on valid and invalid tasks, in real sandboxes."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_rl.commands.doctor import diagnose, run_doctor, tasks_table
from agent_rl.commands.eval import EvalOptions, run_evaluation
from agent_rl.commands.gpu_checks import check_compiled_kernel, check_kernels, check_limits, check_links
from agent_rl.commands.health import Check, check_disk, check_installation, check_parts, check_sandboxes, checks_table
from agent_rl.commands.policy import PolicyChoice
from agent_rl.config.loader import load_config
from agent_rl.controller import preflight
from agent_rl.errors import ConfigError, UserError
from agent_rl.evaluation.quarantine import read_quarantine, write_quarantine
from agent_rl.evaluation.report import EpisodeResult
from envs import Finding, Task
from envs.mini.generator import generate, to_record
from envs.new_project import write_template
from envs.swe.diff.git_diff import diff_files
from envs.swe.records import write_jsonl

ROOT = Path(__file__).resolve().parent.parent.parent


def result(index: int, outcome: bool | None, error: str = "SandboxError: x", stop: str = "submitted") -> EpisodeResult:
    return EpisodeResult("t", index, outcome, stop, 1, 1.0, error=error if outcome is None else "")


def runs(*outcomes: bool | None) -> list[EpisodeResult]:
    return [result(index, outcome) for index, outcome in enumerate(outcomes)]


def undecidable(count: int) -> list[EpisodeResult]:
    return [result(at, None, "UndecidableError: x", "undecidable") for at in range(count)]


NEVER = "gold can never be graded: UndecidableError: x"
LEAK = Finding("history", False, "commits: 2")
FINE = Finding("history", True, "one commit")


@pytest.mark.parametrize(
    ("gold", "noop", "findings", "reasons", "undecided"),
    [
        (runs(True, True), runs(False, False), [FINE], (), ()),
        (runs(False, False), runs(False), [], ("the reference fix or solution does not resolve it",), ()),
        (runs(True), runs(True, True), [], ("resolved without any change",), ()),
        (runs(True, False, True), runs(False), None, ("flaky: gold resolved in 2 of 3 runs",), ()),
        (runs(True), runs(True, False), None, ("flaky: no-op resolved in 1 of 2 runs",), ()),
        (runs(True), runs(False), [FINE, LEAK], ("history: commits: 2",), ()),
        (runs(True, None), runs(False), [], (), ("gold could not be graded: SandboxError: x",)),
        (undecidable(2), runs(False, False), None, (NEVER,), ()),
        (undecidable(1) + runs(None), runs(False), None, (), ("gold could not be graded: UndecidableError: x",)),
        (runs(True), runs(False), "SandboxError: gone", (), ("audit: SandboxError: gone",)),
        (None, runs(False), [], (), ("the environment has no reference fix or solution",)),
    ],
)
def test_diagnosis_of_one_task(gold: Any, noop: Any, findings: Any, reasons: Any, undecided: Any) -> None:
    found = diagnose(Task("t", "e", {}), {} if gold is None else {"t": gold}, {"t": noop}, findings)
    assert (found.reasons, found.undecided) == (reasons, undecided)


@pytest.mark.parametrize(("noop", "reasons"), [(True, ()), (False, ("doing nothing does not resolve it",))])
def test_task_whose_right_answer_is_to_do_nothing_is_valid(noop: bool, reasons: tuple[str, ...]) -> None:
    task = Task("t", "e", {}, noop_resolves=True)
    assert diagnose(task, {"t": runs(True)}, {"t": runs(noop)}, None).reasons == reasons


def test_no_task_is_quarantined_if_no_task_could_be_graded() -> None:
    found = diagnose(Task("t", "e", {}), {"t": undecidable(2)}, {"t": undecidable(2)}, None, grading_works=False)
    assert (found.reasons, len(found.undecided)) == ((), 2)


def valid_and_invalid_tasks(directory: Path) -> Path:
    """Five tasks: a valid one, one whose gold patch fixes nothing, one that is fixed already, one whose tests print no
    summary, and one with an unreadable reference fix."""
    tasks = list(generate("heldout", 5, 0))
    healthy, other, solved, silent, torn = map(to_record, tasks)
    wrong = other.model_copy(update={"gold_patch": commenting(other.files)})
    fixed = dict(tasks[2].fixed)
    done = solved.model_copy(update={"files": fixed, "gold_patch": commenting(fixed), "verified": True})
    mute = silent.model_copy(update={"calls": {}, "test_command": "echo nothing"})
    unread = torn.model_copy(update={"parsed_commit_content": "{", "gold_patch": ""})
    write_jsonl(directory / "heldout.jsonl", [healthy, wrong, done, mute, unread])
    return directory


def commenting(files: dict[str, str]) -> str:
    """A patch that adds a comment to every file."""
    return diff_files(files, {path: f"# a comment\n{text}" for path, text in files.items()})


def test_markup_and_control_characters_in_findings_are_escaped() -> None:
    """Brackets in a message are no markup, and nothing in it steers the terminal."""
    found = diagnose(
        Task("t[x]", "e", {}), {}, {"t[x]": runs(True)}, [Finding("leak", False, "a.py[red] and [/b]\x1b[2J")]
    )
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(tasks_table({found.task_id: found.reasons}, []))
    shown.print(checks_table([Check("sandbox", False, "sandbox [x]: [/red]\x1b[2J")]))
    text = shown.export_text()
    for whole in ("t[x]", "a.py[red] and [/b]\ufffd[2J", "sandbox [x]: [/red]\ufffd[2J"):
        assert whole in text


async def test_environment_that_cannot_be_imported_is_one_failed_check() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["env.name=nobody.here:Nothing"])
    (found,) = await check_sandboxes(config)
    assert (found.ok, "nobody" in found.detail) == (False, True)


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_invalid_tasks_are_found_once(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    tasks = valid_and_invalid_tasks(tmp_path / "tasks")
    overrides = ["env.name=swe", f"env.options={{path: {tasks}}}", "sandbox.backend=bubblewrap"]
    config = load_config(Path("configs/quickstart.yaml"), overrides)
    out, options = tmp_path / "doctor", {"tasks": None, "split": "heldout", "repeats": 2, "audit": True}
    assert not await run_doctor(config, out=out, **options)
    rows = map(json.loads, (tasks / "heldout.jsonl").read_text().splitlines())
    healthy, wrong, done, mute, unread = (row["task_id"] for row in rows)
    quarantined = read_quarantine(out / "quarantine.json")
    assert quarantined[wrong] == ["the reference fix or solution does not resolve it"]
    assert quarantined[done][0] == "resolved without any change"
    assert healthy not in quarantined
    reasons = [reason.partition(": ")[0] for reason in quarantined[mute]]
    assert reasons == ["gold can never be graded", "no-op can never be graded"]
    assert quarantined[unread][0].startswith(f"task {unread}: parsed_commit_content: ")
    told = json.loads((out / "doctor.json").read_text())
    assert {check["name"] for check in told["checks"]} == {"model", "engine", "trainer", "sandbox", "disk"}
    (row,) = [row for row in told["tasks"] if row["task_id"] == healthy]
    assert (row["gold"], row["noop"]) == ([True, True], [False, False])
    assert row["findings"]
    assert "1 of 5 tasks valid, 4 invalid" in capsys.readouterr().out

    lines = {file: file.read_bytes() for file in out.rglob("*.jsonl")}
    assert not await run_doctor(config, out=out, **options)
    again = {file: file.read_bytes() for file in out.rglob("*.jsonl")}
    assert all(again[file].startswith(before) for file, before in lines.items())
    ids = {json.loads(line)["task_id"] for file in lines for line in again[file][len(lines[file]) :].splitlines()}
    assert ids == {mute}, "decided tasks were not run again"

    overrides += [f"env.quarantine={out / 'quarantine.json'}", "rollout.concurrency=2"]
    config = load_config(Path("configs/quickstart.yaml"), overrides)
    assert await run_evaluation(config, EvalOptions(PolicyChoice("gold"), out=tmp_path / "eval")) is None
    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert [(row["task_id"], row["resolved"]) for row in report["outcomes"]] == [(healthy, 1)]


@pytest.mark.bubblewrap
async def test_a_solution_stands_for_a_patch(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    config_file = write_template("letters", tmp_path).config
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(config_file, ["sandbox.backend=bubblewrap", "env.options.count=2"])
    await run_doctor(config, tasks=None, split="train", repeats=1, audit=True, out=tmp_path / "out")
    assert "2 of 2 tasks valid, 0 invalid, 0 undecided" in capsys.readouterr().out
    await run_evaluation(config, EvalOptions(PolicyChoice("gold"), out=tmp_path / "eval"))
    assert "repository" not in capsys.readouterr().out


async def test_missing_parts_name_their_install(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("agent_rl.controller.preflight.TRAINER_PACKAGES", ("torch", "notthere"))
    config = load_config(Path("quickstart"), ["engine.python=/nowhere/python", "model=/nowhere/model"])
    found = {check.name: check for check in await check_parts(config)}
    assert {name for name, check in found.items() if not check.ok} == {"model", "engine", "trainer", "sandbox"}
    assert "`agent-rl install engine`" in found["engine"].detail
    assert found["trainer"].detail == "not installed: notthere; `agent-rl install trainer` installs them"
    assert "apt-get install bubblewrap" in found["sandbox"].detail
    elsewhere = load_config(Path("quickstart"), ["engine.urls=[http://127.0.0.1:1]"])
    engine = next(check for check in await check_parts(elsewhere) if check.name == "engine")
    assert engine.detail.startswith("engine.urls: http://127.0.0.1:1/model_info: no response (ClientConnectorError")
    assert not await check_installation()
    assert "notthere" in capsys.readouterr().out


async def test_a_gpu_config_on_a_machine_without_gpus_fails(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load_config(Path("quickstart"), ["train.device=cuda", "engine.device=cuda"])
    found = {check.name: check for check in await check_parts(config)}
    assert not any(found[name].ok for name in found if name.startswith("gpu") and name != "gpu limits")
    assert len([name for name in found if name.startswith("gpu")]) == 6
    assert found["gpu"].detail == (
        "the config asks for GPUs and this machine has no nvidia-smi: install an NVIDIA driver"
    )
    assert "g++" in found["gpu tool chain"].detail
    monkeypatch.setattr("agent_rl.controller.preflight.NVIDIA", tmp_path / "nvidiactl")
    with pytest.raises(UserError, match=r"train\.device is cuda and this machine has no NVIDIA GPU"):
        preflight.run(config, "train")


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ("2.13.0 2.29.7", None),
        ("2.14.1 2.29.7", "torch is 2.13.0 in the engine and 2.14.1 in the trainer"),
        ("2.13.0 2.30.7", "nccl is 2.29.7 in the engine and 2.30.7 in the trainer"),
    ],
)
def test_two_releases_of_torch_or_nccl_fail(
    trainer: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interpreter(name: str, torch: str, nccl: str) -> str:
        program = tmp_path / name
        program.write_text(f"""#!/bin/sh\necho '{{"torch": "{torch}", "nccl": "{nccl}", "cuda": true}}'\n""")
        program.chmod(0o755)
        return str(program)

    monkeypatch.setattr("sys.executable", interpreter("trainer", *trainer.split()))
    engine = interpreter("engine", "2.13.0", "2.29.7")
    config = load_config(Path("quickstart"), [f"engine.python={engine}", "engine.device=cuda"])
    if reason is None:
        assert "NCCL 2.29.7 in both environments" in check_kernels(config)
    else:
        with pytest.raises(ConfigError, match=reason):
            check_kernels(config)


def program(directory: Path, name: str, output: str) -> str:
    """A program that prints ``output``."""
    file = directory / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    file.chmod(0o755)
    return str(file)


def test_a_compiled_kernel_that_computes_wrongly_fails(tmp_path: Path) -> None:
    def check(error: str) -> str:
        python = program(tmp_path, "python", f'{{"error": {error}, "seconds": 41.2}}')
        return check_compiled_kernel(load_config(Path("quickstart"), [f"engine.python={python}"]))

    assert check("0.004") == "silu_and_mul compiled and correct, 41 s"
    for error in ("7.5", "NaN"):
        with pytest.raises(ConfigError, match=r"compiled silu_and_mul differs from torch's by (7\.5|nan)"):
            check(error)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (["GPU0 X 0-15 0 N/A"], "1 GPUs, no link needed"),
        (["GPU0 X NV18 0-15", "GPU1 NV18 X 0-15"], "2 GPUs, NV18"),
        (["GPU0 X SYS", "GPU1 SYS X"], "2 GPUs without NVLink (SYS): all exchanges use PCIe"),
        (["GPU0 X NV18 NV18", "GPU1 NV18 X PHB", "GPU2 NV18 PHB X"], "some GPUs only; without it: GPU2-GPU1"),
    ],
)
def test_nvlink_connects_all_gpus_or_none(
    rows: list[str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = "\x1b[4mGPU0 GPU1 CPU Affinity NUMA Affinity\x1b[0m"
    legend = "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe"
    program(tmp_path, "nvidia-smi", "\n".join([header, *rows, "", legend]))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    config = load_config(Path("quickstart"))
    if found.startswith("some"):
        with pytest.raises(ConfigError, match=found):
            check_links(config)
    else:
        assert check_links(config) == found


def test_too_few_open_files_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (resource.RLIM_INFINITY,) * 2, resource.RLIMIT_NOFILE: (1024, 4096)}
    monkeypatch.setattr("resource.getrlimit", limits.__getitem__)
    monkeypatch.setattr("agent_rl.commands.gpu_checks.MIN_SHARED_BYTES", 0)
    config = load_config(Path("quickstart"))
    with pytest.raises(ConfigError, match=r"ulimit -Hn is 4096: set the hard limit of open files to 65536 or more"):
        check_limits(config)
    limits[resource.RLIMIT_NOFILE] = (1024, resource.RLIM_INFINITY)
    assert check_limits(config).endswith("open files unlimited")


async def test_a_disk_smaller_than_the_plan_fails(monkeypatch: Any) -> None:
    monkeypatch.setattr("agent_rl.controller.preflight.check_disk_space", lambda runs_dir: 50 << 30)
    with pytest.raises(ConfigError, match=r"runs: 50\.0 GiB free, the plan needs up to [12]\d{3}\.\d GiB"):
        await check_disk(load_config(ROOT / "configs/two-nodes.yaml"))
    assert "50.0 GiB free, the plan needs up to" in await check_disk(load_config(Path("quickstart")))


async def test_a_cluster_without_a_token_fails(monkeypatch: Any) -> None:
    async def reachable(address: str) -> None: ...

    monkeypatch.setattr("agent_rl.commands.health.check_ray", reachable)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    config = load_config(Path("quickstart"), ["train.ray_address=127.0.0.1:6379", "engine.python=/nowhere/python"])
    found = {check.name: check for check in await check_parts(config)}
    assert not found["ray"].ok
    assert found["ray"].detail.startswith("127.0.0.1:6379 needs no token: whoever reaches it runs code on every node")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert next(check for check in await check_parts(config) if check.name == "ray").ok


def test_invalid_quarantine_file_is_rejected(tmp_path: Path) -> None:
    write_quarantine(tmp_path / "ours.json", {"a": ["flaky"]})
    assert read_quarantine(tmp_path / "ours.json") == {"a": ["flaky"]}
    for text in ("", "[]", '{"tasks": [1]}', '{"tasks": {"a": 3}}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ConfigError, match=r"env\.quarantine: .*wrong\.json: not a quarantine file"):
            read_quarantine(tmp_path / "wrong.json")
    with pytest.raises(ConfigError, match="not a quarantine file"):
        read_quarantine(tmp_path / "absent.json")
