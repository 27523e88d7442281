"""Every user error ends with one clear line and exit code 2."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from support.small_disk import small_disk
from typer.testing import CliRunner

from agent_rl import cli
from agent_rl.config.loader import install_model
from agent_rl.controller import train
from agent_rl.errors import UserError
from agent_rl.train.ray_session import check_ray
from agent_rl.utils.directory_lock import lock_directory

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


Complaint = Callable[..., str]
Local = tuple[str, ...]


@pytest.fixture
def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complaint:
    """``complaint("train", ...)``: the one line on standard error that ``agent-rl train ...`` ends with."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["agent-rl", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        lines = capsys.readouterr().err.strip().splitlines()
        assert stopped.value.code == 2
        assert len(lines) == 1, lines
        return lines[0]

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The override that selects the shipped model, unpacked."""
    assert install_model(tmp_path / "tiny-moe")
    return f"model={tmp_path}/tiny-moe"


@pytest.fixture
def local(tmp_path: Path, tiny: str) -> Local:
    """Overrides of the quickstart: the shipped model, a directory for runs, and a Python for the engine."""
    return QUICKSTART, tiny, f"runs_dir={tmp_path}", f"engine.python={sys.executable}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("lr=1", "unknown key 'lr': did you mean 'train.lr' or 'train.critic.lr'?"),
        ("rollout.steps=1", "unknown key 'rollout.steps': did you mean 'train.steps' or 'r3.trace.steps'?"),
        (
            "model=/nowhere/model",
            "error: model: /nowhere/model: no Hugging Face checkpoint there (no config.json); nam",
        ),
        ("model=/nowhere/tiny-moe", "`agent-rl model init /nowhere/tiny-moe` makes it"),
    ],
)
def test_invalid_config(complaint: Complaint, override: str, told: str) -> None:
    assert told in complaint("train", QUICKSTART, override)


@pytest.mark.parametrize(("command", "option"), [("eval", "--tasks"), ("eval", "--samples"), ("plan", "--tokens")])
def test_counts_below_one(command: str, option: str) -> None:
    for count in ("0", "-3"):
        ended = CliRunner().invoke(cli.app, (command, QUICKSTART, option, count))
        assert ended.exit_code == 2
        assert f"Invalid value for '{option}': Input should be greater than or equal to 1" in ended.output


def test_every_number_on_the_command_line_has_a_least_value() -> None:
    numbers = [
        (f"{command.__name__} --{name}", hint.__metadata__[0])
        for command in commands(cli.app)
        for name, hint in get_type_hints(command, include_extras=True).items()
        if hasattr(hint, "__metadata__") and hint.__origin__ in (int, int | None)
    ]
    assert len(numbers) >= 7
    assert [name for name, option in numbers if option.min is None] == []


def commands(app: typer.Typer) -> Iterator[Callable[..., Any]]:
    """The functions of all commands of ``app`` and beneath it."""
    yield from (command.callback for command in app.registered_commands if command.callback)
    for group in app.registered_groups:
        if group.typer_instance:
            yield from commands(group.typer_instance)


def test_real_tasks_that_were_not_built(complaint: Complaint, tmp_path: Path) -> None:
    arguments = ("eval", str(ROOT / "configs" / "real.yaml"), "--policy", "noop", f"runs_dir={tmp_path}")
    told = complaint(*arguments, f"env.options.path={tmp_path}/real.jsonl")
    assert told.endswith("real.jsonl: no such file; right would be a file of task records; `make real-tasks` builds it")


def test_reference_of_another_architecture(complaint: Complaint, tmp_path: Path, tiny: str) -> None:
    arguments = ("train", QUICKSTART, tiny, "train.kl.coefficient=0.1")
    told = complaint(*arguments, "train.kl.reference=/nowhere")
    assert told.startswith("error: train.kl.reference: /nowhere: no Hugging Face checkpoint there")
    model = json.loads((tmp_path / "tiny-moe/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"num_experts": 16}))
    told = complaint(*arguments, f"train.kl.reference={tmp_path}")
    assert f"train.kl.reference: {tmp_path} has num_experts 16, not {model['num_experts']} as" in told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "train.microbatch_tokens=400",
            "error: rollout.max_tokens is 512 and train.microbatch_tokens is 400: raise it to 512 or more (if memory "
            "does not allow that: train.recompute=full, or train.parallel.context=c",
        ),
        (
            "rollout.max_tokens=8000",
            "config.json has max_position_embeddings=4096: lower rollout.max_tokens to 4096, or extend the model",
        ),
    ],
)
def test_trajectories_longer_than_a_micro_batch_or_the_model(
    complaint: Complaint, tiny: str, override: str, told: str
) -> None:
    for command in (("train",), ("r3", "compare")):
        assert told in complaint(*command, QUICKSTART, tiny, override)


@pytest.mark.sglang
@pytest.mark.bubblewrap
@pytest.mark.slow
def test_port_taken(complaint: Complaint, local: Local) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = (f"engine.port={port}", f"engine.python={ROOT}/.venv-engine/bin/python")
        told = complaint("train", *local, *engine, "sandbox.backend=bubblewrap", "env.options.train_tasks=8")
    assert str(port) in told
    assert "taken" in told


def test_no_sandbox_at_all(complaint: Complaint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    told = complaint("eval", QUICKSTART, "--policy", "noop", "sandbox.backend=auto", f"runs_dir={tmp_path}")
    assert "bubblewrap is not installed" in told
    assert "docker" in told


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["--tasks", "2", "sandbox.image=/nowhere/rootfs"], "/nowhere/rootfs"),
        (["--split", "train", "env.name=swe", "env.options={path: rows.jsonl}"], "row 1"),
    ],
)
def test_missing_image_or_broken_task_record(
    complaint: Complaint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"repo_name": "demo"}\n')
    arguments = ("eval", QUICKSTART, "--policy", "noop", "sandbox.backend=bubblewrap", f"runs_dir={tmp_path}")
    assert told in complaint(*arguments, *overrides)


@pytest.mark.parametrize(
    ("command", "directory"),
    [
        (("train",), "quickstart"),
        (("eval", "--policy", "noop"), "quickstart/eval/noop-heldout"),
        (("doctor",), "quickstart/doctor"),
        (("rollout",), "quickstart-rollout"),
    ],
)
def test_directory_in_use_or_below_a_file(
    complaint: Complaint, tmp_path: Path, local: Local, command: tuple[str, ...], directory: str
) -> None:
    with lock_directory(tmp_path / directory):
        told = complaint(*command, *local)
    assert f"{tmp_path}/{directory}: in use by process {os.getpid()} on " in told
    (tmp_path / "runs").write_text("no directory")
    assert f"runs_dir: {tmp_path}/runs is a file" in complaint(*command, *local, f"runs_dir={tmp_path}/runs")


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("env.name=minni", "unknown environment 'minni': did you mean 'mini'?"),
        ("train.ray_address=127.0.0.1:9", "train.ray_address: 127.0.0.1:9: "),
        ("train.ray_address=head-node", "train.ray_address: head-node: write it as HOST:PORT"),
        ("engine.urls=[http://127.0.0.1:9]", "engine.urls: http://127.0.0.1:9/model_info: "),
    ],
)
def test_a_missing_environment_cluster_or_engine_is_told_before_anything_starts(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local: Local, override: str, answer: str
) -> None:
    monkeypatch.setattr(train, "open_rollout_runtime", None)
    monkeypatch.setattr(train, "RayTrainer", None)
    assert answer in complaint("train", *local, override)
    assert not (tmp_path / "quickstart" / "config.yaml").exists(), "the directory is free for another config"


async def test_a_ray_address_that_takes_no_connection_is_given_up() -> None:
    """The server's queue is full, so a further connection hangs, as to a host that drops packets."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        host, port = server.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex((host, port))
        with pytest.raises(UserError, match=r"train\.ray_address: .*: no response within 0\.2 s"):
            await check_ray(f"{host}:{port}", seconds=0.2)
        for client in waiting:
            client.close()


def test_disk_without_space(complaint: Complaint, tmp_path: Path, local: Local) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        told = complaint("train", *local, f"runs_dir={disk}/runs")
    assert "MiB free" in told
    assert "free some space" in told
