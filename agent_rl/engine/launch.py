"""Starts an SGLang server on this machine, waits until it is healthy, and removes everything it leaves.

The server runs in the engine environment's interpreter, in its own process group. It is killed when its owner ends,
however the owner ends (see ``agent_rl/engine/server/serve.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.shared_memory import remove_stale
from agent_rl.errors import ConfigError, EngineError, EngineStartError
from agent_rl.models.families import FAMILIES, Family
from agent_rl.models.files import read_object
from agent_rl.models.spec import ModelSpec
from agent_rl.utils.concurrency import shielded
from agent_rl.utils.http import AsyncHttp
from agent_rl.utils.sockets import LOOPBACK, LOOPBACK_INTERFACE, NCCL_SETTINGS, family_of, is_loopback

_SERVE = Path(__file__).resolve().parent / "server" / "serve.py"
_DEVICES = Path("/dev")
_PORT_ATTEMPTS = 3
_HEALTH_SECONDS = 5.0
_KILL_SECONDS = 5.0
_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"
_VERSION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServerNode:
    """The node of a server: its address, and for an engine over ``nodes`` nodes its ``rank`` and the address
    HOST:PORT at which the nodes meet (SGLang's ``--dist-init-addr``)."""

    address: str = LOOPBACK
    rank: int = 0
    nodes: int = 1
    dist_init_addr: str = ""

    @property
    def arguments(self) -> list[str]:
        """SGLang's arguments for this node."""
        nodes = ["--nnodes", str(self.nodes), "--node-rank", str(self.rank), "--dist-init-addr", self.dist_init_addr]
        return ["--host", self.address, *(nodes if self.nodes > 1 else ())]


class EngineServer:
    """One SGLang server as an async context manager; it can be stopped and started again.

    ``model`` is a checkpoint's directory. ``key``: required of every client; None: the server is open to all that reach
    it. ``log`` receives the server's output; the log of the start before is kept
    beside it. ``number``: index among ``engine.count`` servers. ``node``: where it listens, by default on loopback.
    Entering raises ConfigError for an invalid config, and EngineStartError with the reason from the log if the server
    dies or is not healthy in time.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Path,
        log: Path,
        *,
        number: int = 0,
        capture_routes: bool = True,
        node: ServerNode | None = None,
        key: str | None = None,
    ) -> None:
        self._config, self._model, self._log, self._number = config, model, log, number
        self._node, self._capture, self._key = node or ServerNode(), capture_routes, key
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """The server's address. Raises RuntimeError before the first start."""
        if self._url is None:
            raise RuntimeError("the engine server was not started")
        return self._url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def death(self) -> str | None:
        """Why the server is dead, in one line; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._reason(self._process.returncode)

    async def __aenter__(self) -> EngineServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> str:
        """Start the server and wait until it is healthy; returns its address. A failed start stops what was started."""
        command = self._command()
        await asyncio.to_thread(remove_stale)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = self._select_port()
            try:
                await self._start_on(port, command)
                return self.url
            except EngineStartError as error:
                # A free port may be taken before the server binds it; a configured port is not changed.
                if self._config.port or attempt == _PORT_ATTEMPTS or "is taken" not in str(error):
                    raise
        raise AssertionError("unreachable: the last attempt raises")

    def _select_port(self) -> int:
        address, first = self._node.address, self._config.port
        return _refuse_taken(first + self._number, address) if first else free_port(address)

    async def _start_on(self, port: int, command: list[str]) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._spawn([*command, "--port", str(port)])
            self._url = f"http://{host_port(self._node.address, port)}"
            await self._wait_healthy()
        except BaseException:
            await self.stop()
            raise

    def _spawn(self, command: list[str]) -> None:
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".before.log"))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # never written: its closing tells the server that its owner is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment(),
            )

    def _command(self) -> list[str]:
        python = shutil.which(self._config.python)
        if python is None:
            raise ConfigError(
                f"engine.python: {self._config.python} is not an interpreter; run `agent-rl install engine`"
            )
        config = self._config
        command = [
            os.path.abspath(python), str(_SERVE), "--model-path", str(self._model.resolve()), *self._node.arguments,
            "--device", self.device, "--dtype", config.dtype, "--max-total-tokens", str(config.max_total_tokens),
            "--max-running-requests", str(config.max_running_requests), "--skip-tokenizer-init",
        ]  # fmt: skip
        if self._capture:
            command.append("--enable-return-routed-experts")
        if config.colocate:
            if self.device == "cpu":
                raise ConfigError("engine.colocate: this machine has no GPU to share with the trainer; set it to false")
            command.append("--enable-memory-saver")
        if (ranks := config.gpus if self.device == "cuda" else config.nodes) > 1:
            command += ["--tp-size", str(ranks)]
        if self.device == "cpu":
            # An idle scheduler would use a whole core for polling.
            command += ["--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"]
            # By default the states of linear attention take a share of all memory. A request uses at most three slots,
            # and the cache of prefixes one for each prefix.
            command += ["--max-mamba-cache-size", str(16 * config.max_running_requests)]
        if (family := _family(self._model)) is not None:
            command += (*family.engine_arguments, *(family.gpu_arguments if self.device == "cuda" else ()))
        return [*command, *config.extra_args]

    @property
    def device(self) -> str:
        return self._config.local_device

    def _environment(self) -> dict[str, str]:
        # The engine environment has its own packages: remove the paths of the trainer's interpreter.
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        environment["PYTHONUNBUFFERED"] = "1"
        environment["HF_HUB_OFFLINE"] = "1"
        environment["AGENT_RL_WEIGHT_SYNC"] = self._config.weight_sync
        if (family := _family(self._model)) is not None:
            values = family.engine_environment.items()
            environment |= {key: value.format(dtype=self._config.dtype) for key, value in values}
        if self._key is not None:
            environment["AGENT_RL_ENGINE_KEY"] = self._key  # a command line is visible to other users
        if is_loopback(self._node.address):
            environment = {**LOOPBACK_INTERFACE, **environment}
        if self.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            environment["OMP_NUM_THREADS"] = str(self._config.threads or len(os.sched_getaffinity(0)))
            # Threads spinning at a barrier would starve the sandboxes that share these cores, and each other.
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
            return environment
        environment = {**NCCL_SETTINGS, **environment}
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # the trainer's; torch-memory-saver refuses its option
        if self._config.count > 1:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        return environment

    @property
    def gpus(self) -> list[str]:
        """The GPUs of this server among those that this process may use, by tensor rank. Raises ConfigError where there
        are too few."""
        if self.device == "cpu":
            return []
        required = self._config.count * self._config.gpus
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        available = visible.split(",") if visible else [path.name[6:] for path in sorted(_DEVICES.glob("nvidia[0-9]*"))]
        if len(available) < required:
            raise ConfigError(
                f"engine: {self._config.count} servers of {self._config.gpus} GPUs need {required} GPUs, "
                f"but this machine has {len(available)}: lower engine.count or engine.gpus"
            )
        return available[self._number * self._config.gpus :][: self._config.gpus]

    async def _wait_healthy(self) -> None:
        deadline = time.monotonic() + self._config.start_seconds
        async with AsyncHttp(_HEALTH_SECONDS) as http:
            while time.monotonic() < deadline:
                reason = self.death()
                if reason is not None:
                    raise EngineStartError(reason)
                # Not listening or not ready yet: only the deadline and the process's end count.
                with contextlib.suppress(EngineError):
                    await http.get(f"{self.url}/health")
                    return
                await asyncio.sleep(0.1)
        raise EngineStartError(
            f"the engine was not healthy within engine.start_timeout={self._config.start_seconds:g} s; log: {self._log}"
        )

    def _reason(self, code: int) -> str:
        reason = reason_in_log(self._log.read_text(errors="replace"))
        return f"the engine server died ({_exit_text(code)}): {reason}; log: {self._log}"

    async def stop(self) -> None:
        """Stop the server and all its processes. Idempotent; completes even if the caller is cancelled."""
        process = self._process
        if process is not None:
            await shielded(asyncio.to_thread(_stop_group, process))


def _family(model: Path) -> Family | None:
    """The family of the checkpoint in ``model``; None where its config cannot be read, which SGLang reports."""
    try:
        return FAMILIES.get(str(read_object(model / "config.json").get("model_type")))
    except (OSError, ValueError):
        return None


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


_REASONS = (
    (
        re.compile(r"address already in use|port \d+ is not available|Port \d+ is (already )?in use", re.I),
        "its port is taken",
    ),
    (re.compile(r"out of memory|Cannot allocate memory|DefaultCPUAllocator|MemoryError", re.I), "out of memory"),
    (re.compile(r"No space left on device", re.I), "the disk is full"),
    (
        re.compile(r"No module named 'torch_memory_saver'"),
        "engine.colocate needs torch-memory-saver: install it in the engine's environment with pip",
    ),
)
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b:? .*)$", re.M)


def reason_in_log(log: str) -> str:
    """Why a server ended according to its log, in one line: a known cause, the last error, or the last line."""
    errors = _ERROR_LINE.findall(log)
    detail = errors[-1].strip() if errors else ""
    for pattern, cause in _REASONS:
        match = pattern.search(log)
        if match:
            return f"{cause} ({detail or match.group(0)})"
    lines = [line for line in log.splitlines() if line.strip()]
    return detail or (lines[-1].strip() if lines else "its log is empty")


def refuse_unservable(model_spec: ModelSpec, model: Path) -> None:
    """Raises ConfigError for a checkpoint with dense layers of a family where SGLang 0.5.23 treats every layer as an
    MoE layer: it would drop these layers' weights without an error and route with uninitialized memory."""
    dense = [layer for layer, moe in enumerate(model_spec.moe) if not moe]
    if dense and model_spec.family.experts and not model_spec.family.serves_dense_layers:
        raise ConfigError(f"model: {model} has dense layers {dense}, which SGLang would not load")


def sglang_version(python: str) -> str:
    """The SGLang release of an interpreter. Blocking. Raises ConfigError if there is none."""
    if shutil.which(python) is None:
        raise ConfigError(f"engine.python: no interpreter {python}; run `agent-rl install engine`")
    try:
        run = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: cannot read the SGLang release of {python}: {error}") from None
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1:] or [_exit_text(run.returncode)]
        raise ConfigError(f"engine.python: {python} has no SGLang: {reason[0]}")
    return run.stdout.strip()


def host_port(address: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def free_port(address: str = LOOPBACK) -> int:
    with socket.socket(family_of(address)) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _refuse_taken(port: int, address: str) -> int:
    """``port`` if it is free. Raises EngineStartError otherwise."""
    with socket.socket(family_of(address)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise EngineStartError(
                f"engine.port: port {port} is taken ({error.strerror}); free it, or set engine.port=0 for any free port"
            ) from None
    return port


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, wait until it has no running process, and remove its shared memory.

    SIGKILL, because a server that receives SIGTERM first waits five seconds to log how its workers died.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while group_members(process.pid) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel ends it later
        process.wait(_KILL_SECONDS)
    if process.stdin:
        process.stdin.close()
    remove_stale()


def group_members(group: int) -> list[int]:
    """Ids of the running processes of process group ``group`` (without zombies)."""
    members = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            state, _, pgrp = (directory / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it ended meanwhile
        if int(pgrp) == group and state != "Z":
            members.append(int(directory.name))
    return members
