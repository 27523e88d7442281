"""What a run opens to others: every listening socket of a real quickstart is on loopback, and named here with what
protects it from other users of the machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.listeners import Listener, descendants, listeners_of

from agent_rl.config.loader import install_model
from tests.redteam.attack import report_stopped
from tests.redteam.web_page import REQUESTS, Reply

pytestmark = [pytest.mark.redteam, pytest.mark.sglang, pytest.mark.megatron, pytest.mark.bubblewrap, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TOKEN, KEY, NONE = "Ray's token", "the engines' key", "none: no code runs for a client"
PROTECTION = {
    "gcs_server": TOKEN,
    "raylet": TOKEN,
    "RuntimeEnvAgent": TOKEN,
    "driver": f"{TOKEN} (Ray's port of the driver), the session's key (endpoint for agent programs)",
    "rank": f"{TOKEN} (Ray's port of a worker), {NONE} (torch's stores, gloo)",
    "idle Ray worker": TOKEN,
    "engine": KEY,
    "scheduler": f"{NONE} (torch's store, gloo)",
}
"""The listening processes of a local run, and what a client without it meets."""
PAGES = ("posts a form", "posts JSON as plain text", "opens a websocket", "reads by a name of its own")
KINDS = {
    "gcs_server": r"/gcs_server ",
    "raylet": r"/raylet/raylet ",
    "RuntimeEnvAgent": r"RuntimeEnvAgent",
    "driver": r"agent_rl\.cli train",
    "rank": r"ray::WorkerActor",
    "idle Ray worker": r"ray::IDLE|default_worker\.py",
    "engine": r"server/serve\.py",
    "scheduler": r"sglang::scheduler|multiprocessing",
}
PROGRAM = """
import json, os, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "say something"}], "max_tokens": 8}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
urllib.request.urlopen(request).read()
"""
RAY_CLIENT = """
import sys
from ray._private import services
services.resolve_ip_for_localhost = str
import ray
ray.init(sys.argv[1], logging_level=50)
print("ran", ray.get(ray.remote(lambda: 7).remote()))
"""


def kind_of(listener: Listener) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, listener.command)), None)


@dataclass
class Running:
    """A training run, its processes so far, and every listening socket that was seen."""

    process: subprocess.Popen[bytes]
    output: Path
    pids: set[int] = field(default_factory=set)
    seen: set[Listener] = field(default_factory=set)

    def look(self) -> set[Listener]:
        self.pids = descendants(self.pids | {self.process.pid})
        now = listeners_of(self.pids)
        self.seen |= now
        return now

    def until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output.read_text()
            self.look()
            time.sleep(0.1)

    def port(self, kind: str, now: set[Listener]) -> list[int]:
        return [listener.port for listener in now if kind_of(listener) == kind]


@pytest.fixture
def quickstart(tmp_path: Path) -> Iterator[Running]:
    """The quickstart with small steps and an agent program, so that the endpoint serves too."""
    install_model(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    program = shlex.join([sys.executable, str(tmp_path / "program.py")])
    settings = [
        "name=open", f"runs_dir={tmp_path}", f"model={tmp_path}/model", "train.steps=500", "train.checkpoint_every=0",
        f"env.options={{train_tasks: 16, heldout_tasks: 8, cache_dir: {ROOT}/.cache/tasks}}",
        "rollout.tasks_per_step=2", "rollout.group_size=2", "eval.tasks=0", "train.parallel.world_size=2",
        f"rollout.harness={{command: {program!r}, location: host}}",
    ]  # fmt: skip
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent_rl.cli", "train", "quickstart", *settings],
            stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    yield Running(process, output)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_socket_of_a_run_is_open_to_the_network_or_serves_without_its_key(quickstart: Running) -> None:
    run = quickstart
    run.until(lambda: "step 1: " in run.output.read_text() or run.process.poll() is not None)
    run.until(lambda: "step 3: " in run.output.read_text() or run.process.poll() is not None)
    now = run.look()
    refuse_engine_without_key(run, now)
    refuse_endpoint_without_session(run, now)
    refuse_ray_without_token(run, now)
    refuse_web_pages(now)
    run.until(lambda: "step 6: " in run.output.read_text() or run.process.poll() is not None)
    assert not visible_secrets(run)
    assert not open_directories(run)
    run.look()
    assert run.process.poll() is None, run.output.read_text()
    opened = sorted({f"{kind_of(each) or each.command}: {each.address}" for each in run.seen if not each.on_loopback})
    assert not opened, opened
    kinds = {kind_of(each) for each in run.seen}
    assert kinds >= PROTECTION.keys() - {"idle Ray worker"}, "the run started every server"
    unknown = {each.command for each in run.seen if kind_of(each) is None}
    assert not unknown, f"listeners without an entry in PROTECTION: {unknown}"
    for kind in sorted(kinds & PROTECTION.keys()):
        sockets = [each for each in run.seen if kind_of(each) == kind]
        addresses = sorted({each.address for each in sockets})
        print(f"{kind}: {len(sockets)} sockets on {addresses}; {PROTECTION[kind]}")


def refuse_ray_without_token(run: Running, now: set[Listener]) -> None:
    """A client with the address alone runs nothing, whether it has no token or another one; neither does HTTP."""
    [gcs] = run.port("gcs_server", now)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for guess in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        client = subprocess.run(
            [sys.executable, "-c", RAY_CLIENT, f"127.0.0.1:{gcs}"],
            capture_output=True, text=True, timeout=120, env={**environment, **guess, "RAY_NUM_REDIS_GET_RETRIES": "1"},
        )  # fmt: skip
        assert client.returncode != 0, client.stdout
        assert "ran" not in client.stdout
        assert "ConnectionError" in client.stderr or "AuthenticationError" in client.stderr, client.stderr
    for port in run.port("RuntimeEnvAgent", now):
        response = httpx.post(f"http://127.0.0.1:{port}/get_or_create_runtime_env", content=b"", trust_env=False)
        assert response.status_code in (401, 403), response.text


def refuse_engine_without_key(run: Running, now: set[Listener]) -> None:
    [port] = run.port("engine", now)
    for path in ("generate", "update_weights_from_tensor", "update_weights_from_disk", "flush_cache", "server_info"):
        for headers in ({}, {"authorization": "Bearer guess"}):
            response = httpx.post(f"http://127.0.0.1:{port}/{path}", json={}, headers=headers, trust_env=False)
            assert response.status_code == 401, (path, response.text)


def refuse_endpoint_without_session(run: Running, now: set[Listener]) -> None:
    """One port of the driver is the endpoint's; the other speaks Ray's protocol."""
    statuses = []
    for port in run.port("driver", now):
        try:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            response = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, trust_env=False, timeout=5)
            statuses.append(response.status_code)
        except httpx.HTTPError:
            continue
    assert statuses == [401], statuses


def refuse_web_pages(now: set[Listener]) -> None:
    """A page of another site at each port: the port needs a key, or speaks another protocol than HTTP."""
    ports = list(now)

    def send(name: str, listener: Listener) -> Reply:
        return REQUESTS[name].send(listener.port, "/api/jobs/", listener.address, 1.0)

    for name in PAGES:
        with ThreadPoolExecutor(len(ports)) as pool:  # a port that speaks no HTTP is silent for the whole second
            replies = dict(zip(ports, pool.map(partial(send, name), ports), strict=True))
        allowed = {each: reply for each, reply in replies.items() if reply.status not in (0, 401, 403, 404, 405)}
        assert not allowed, (name, allowed)
        statuses = {str(kind_of(each)): replies[each].status for each in sorted(now, key=lambda each: each.command)}
        report_stopped(f"a page that {name} (every port of a run)", statuses)


def open_directories(run: Running) -> list[Path]:
    """Directories of the local Ray that other users may enter; its sockets and Python packages are below them."""
    mark, directories = b"AGENT_RL_RAY_DIR=", set()
    for pid in run.pids:
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            directories |= {Path(os.fsdecode(each.removeprefix(mark))) for each in variables if each.startswith(mark)}
    assert len(directories) == 1
    return [directory for directory in directories if directory.stat().st_mode & 0o077]


def visible_secrets(run: Running) -> list[str]:
    """Places where other users, or readers of the run directory, would find the token or the key."""
    secrets = set()
    for pid in run.pids:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        secrets |= {
            value for name, _, value in (each.partition(b"=") for each in variables)
            if name in (b"RAY_AUTH_TOKEN", b"AGENT_RL_ENGINE_KEY")
        }  # fmt: skip
    assert len(secrets) == 2, "one token and one key"
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in run.pids}
    texts = {str(pid): path.read_bytes() for pid, path in lines.items() if path.exists()}
    texts |= {str(path): path.read_bytes() for path in run.output.parent.rglob("*") if path.is_file()}
    return [place for place, text in texts.items() if any(secret in text for secret in secrets)]
