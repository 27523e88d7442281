"""The environment of tasks in Harbor's layout."""

from __future__ import annotations

import asyncio
import base64
import gzip
import logging
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.context import EnvContext, ToolStyle
from envs.harbor.grading import LOGS, Survey, copy_in, grade
from envs.harbor.tasks import CONFIG, HarborTask, HealthCheck, read_files, read_task, resolve
from envs.rows import select_split
from envs.scaffold import DEFAULT_SCAFFOLD, Scaffold
from envs.types import Finding, Grade, Message, Task, TaskRecordError, UndecidableError
from sandbox import (
    ImageBuildError,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxStartError,
    UserSandbox,
    image_builder,
)
from sandbox.files import archive
from tools import ToolCall, ToolResult, ToolSet

_log = logging.getLogger(__name__)

ROOT = "0:0"
_ROOTS = ("root", "0", "0:0", "root:root")
_SYSTEM = (
    "You are an agent in a Linux sandbox without a network. Solve the task you are given by calling tools, one at a "
    "time, and wait for what each returns. The working directory is {workdir}. No process outlives its command. Call "
    "the submitting tool when you are done."
)
_TIME_OVER = "The time for this task is over."
_SECONDS = 60.0
_CHUNK = 90_000
"""Characters per call: Linux allows at most 128 KiB in one command argument."""
# Prints the directories of PATH, then the programs in them.
_SURVEY = f"""set -- {LOGS}/agent {LOGS}/verifier {LOGS}/artifacts; mkdir -p "$@" && chmod 777 "$@" || exit
printf '%s\\n\\n' "$PATH"; IFS=:; for d in $PATH; do ls -1 "$d" 2>/dev/null; done; true"""


@dataclass(frozen=True)
class TimedTools:
    """``tools`` until ``deadline``, on the monotonic clock; then every call ends the episode, which is graded."""

    tools: ToolSet
    deadline: float

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self.tools.schemas()

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a call."""
        if time.monotonic() > self.deadline:
            return ToolResult(_TIME_OVER, submitted=True)
        return await self.tools.call(call)


@dataclass(frozen=True)
class HarborEpisode:
    """A started task. ``sandbox`` is the agent's view; ``root`` is the same sandbox for the environment."""

    task: HarborTask
    sandbox: Sandbox
    root: Sandbox
    messages: Sequence[Message]
    tools: ToolSet
    before: Survey
    users: Sequence[str]
    verifier: str

    async def grade(self) -> Grade:
        """Grade the state of the agent's sandbox; see :mod:`envs.harbor.grading`."""
        return await grade(self.root, self.task, self.before, self.users, self.verifier)


@dataclass
class HarborEnvironment:
    """Tasks in the directories of ``path``, or the one task in ``path``, in the order of their names. Options:

    - ``heldout``: the number of last tasks that form the split "heldout", the others are "train"; with None every split
      holds all tasks.
    - ``limit``: keep only the first ``limit`` tasks of a split.
    - ``image``: the image of every task, with ``{task}`` for its name, in place of the one that it names or builds.
    - ``may_replace``: patterns of paths, such as "/usr/lib/python3/*", that an agent may change without losing its
      reward, although programs and libraries of the image lie there.
    - ``skip_broken``: skip tasks that are broken or need what agent-rl lacks, and name them in the log, instead of
      raising.
    """

    context: EnvContext
    path: str | Path
    _: KW_ONLY
    heldout: int | None = None
    limit: int | None = None
    image: str | None = None
    may_replace: Sequence[str] = ()
    skip_broken: bool = False
    _read: dict[str, HarborTask] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        return "harbor"

    @property
    def scaffold(self) -> Scaffold:
        scaffold = self.context.scaffold
        return replace(scaffold, initial_messages=initial_messages) if scaffold.name == DEFAULT_SCAFFOLD else scaffold

    async def prepare(self, *splits: str) -> None:
        """Read the tasks, so that what cannot run raises before anything starts. Raises ``TaskRecordError`` and, for a
        backend without images, ``SandboxUnavailableError``."""
        image_builder(self.context.backend)
        tasks = await asyncio.to_thread(self._tasks)
        downloads = [task.id for task in tasks if task.downloads()]
        networks = [task.id for task in tasks if task.network]
        lacking = "and sandboxes have none"
        for ids, what in (
            (downloads, f"install over the network while grading, {lacking}"),
            (networks, f"ask for a network, {lacking}"),
        ):
            if ids:
                named = ", ".join(ids[:5])
                _log.warning("%s: %d of %d tasks %s: %s", self.path, len(ids), len(tasks), what, named)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split``. Raises ``TaskRecordError`` as :meth:`prepare` does."""
        tasks = select_split(Path(self.path), split, self.heldout, lambda _: self._tasks(), is_data_set=True)
        return [Task(task.id, self.name, {"instruction": task.instruction}) for task in tasks[: self.limit]]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[HarborEpisode]:
        """Start ``task``: its image, the log directories, then the health check."""
        own = self._find(task)
        config = own.config
        spec, user = await self._spec(own)
        agent, verifier = (
            user if section.user is None else str(section.user) for section in (config.agent, config.verifier)
        )
        async with self.context.sandbox(self.context.for_agent(spec)) as root:
            before = await _survey(root, own, tuple(self.may_replace))
            if own.uploads_environment:
                await copy_in(root, read_files(own.directory / "environment", own), spec.workdir)
            numbers = {name: await _numeric(root, own, name) for name in (user, agent, verifier)}
            sandbox = root if numbers[agent] == ROOT else UserSandbox(root, numbers[agent])
            if config.environment.healthcheck is not None:
                await _wait_until_healthy(root, own, config.environment.healthcheck, numbers[user])
            scaffold, style = self.scaffold, self.context.tool_style
            tools = scaffold.tools(sandbox, style=style, timeout=self.context.tool_timeout)
            timed = TimedTools(tools, time.monotonic() + (config.agent.timeout_sec or float("inf")))
            messages = scaffold.initial_messages(own.instruction, spec.workdir, style)
            users = (ROOT, *sorted({*numbers.values()} - {ROOT}))
            yield HarborEpisode(own, sandbox, root, messages, timed, before, users, numbers[verifier])

    def gold(self, task: Task) -> str:
        """There is no patch; see :meth:`solution`."""
        return ""

    def solution(self, task: Task) -> Sequence[ToolCall]:
        """The calls that copy ``solution/`` to /solution (or, for an agent that is not root, to /tmp/solution) and run
        ``solve.sh`` there. Empty without one."""
        own = self._find(task)
        files = read_files(own.directory / "solution", own)
        if "solve.sh" not in files:
            return []
        text = base64.b64encode(
            gzip.compress(archive({name: content for name, (content, _) in files.items()}))
        ).decode()
        programs = shlex.join(["solve.sh", *(name for name, (_, executable) in files.items() if executable)])
        packed = "/tmp/.solution.b64"
        exports = "".join(
            f"export {name}={shlex.quote(value)}; " for name, value in resolve(own.config.solution.env).items()
        )
        commands = [f"printf %s {text[at : at + _CHUNK]} >> {packed}" for at in range(0, len(text), _CHUNK)]
        commands.append(
            "to=/solution; mkdir -p $to 2>/dev/null || { to=/tmp/solution; mkdir -p $to; }; "
            f"base64 -d {packed} | tar -xz -C $to && rm {packed} && (cd $to && chmod 755 {programs}) && {exports}"
            "DEBIAN_FRONTEND=noninteractive $to/solve.sh"
        )
        return [self.scaffold.shell(command) for command in commands]

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Whether the grading works without a network, and rewards a reward that the agent wrote itself."""
        downloads = self._find(task).downloads()
        network = f"installs over the network while grading: {'; '.join(downloads[:3])}" if downloads else "not needed"
        forge = f"mkdir -p {LOGS}/verifier; for n in txt json; do echo 1 > {LOGS}/verifier/reward.$n; done"
        async with self.start(task) as episode:
            present = await episode.root.exec("ls -d /tests/* /solution/* 2>/dev/null", timeout=_SECONDS, cwd="/")
            await episode.sandbox.exec(forge, timeout=_SECONDS)
            forged = await episode.grade()
        leaked = " ".join(present.text.split())[:200]
        return [
            Finding("network", not downloads, network),
            Finding("hidden tests", not leaked, leaked or "neither /tests nor /solution is in the image"),
            Finding("hack: forged reward", not forged.resolved, f"reward {forged.reward:g}"),
        ]

    def _tasks(self) -> list[HarborTask]:
        """The tasks, read once. Raises ``TaskRecordError``, a line for each problem."""
        if not self._read:
            problems: list[str] = []
            tasks: dict[str, HarborTask] = {}
            for directory in task_directories(Path(self.path)):
                try:
                    task = read_task(directory)
                    self._check_limits(task)
                    tasks[task.id] = task
                except TaskRecordError as error:
                    problems += str(error).splitlines()
            if problems and not self.skip_broken:
                raise TaskRecordError("\n".join(problems))
            if problems:
                _log.warning("%s: skipped, a line each:\n%s", self.path, "\n".join(problems))
            self._read = tasks
        return list(self._read.values())

    def _find(self, task: Task) -> HarborTask:
        self._tasks()
        return self._read[task.id]

    def _check_limits(self, task: HarborTask) -> None:
        """Raise ``TaskRecordError`` for a task that asks for more than the config gives."""
        needs, limits = task.config.environment, self.context.limits
        for what, key, needed, given in (
            ("MiB of memory", "sandbox.memory_mb", needs.memory_mb, limits.memory_mb),
            ("CPU cores", "sandbox.cpus", needs.cpus, limits.cpus),
            ("s for its tests", "env.grade_timeout", task.config.verifier.timeout_sec, self.context.grade_timeout),
        ):
            if needed is not None and needed > given:
                raise TaskRecordError(f"task {task.id}: it asks for {needed:g} {what}: set {key}={needed:g} or more")

    async def _spec(self, task: HarborTask) -> tuple[SandboxSpec, str]:
        """The spec of the task's sandbox, and the user of its image. Raises ``UndecidableError`` for a failed build."""
        builder, section, limits = image_builder(self.context.backend), task.config.environment, self.context.limits
        try:
            if self.image is not None:
                image = self.image.replace("{task}", task.id)
            else:
                image = task.image or await builder.build(
                    task.directory / "environment", timeout=section.build_timeout_sec
                )
            settings = await builder.image_settings(image)
        except ImageBuildError as error:
            raise UndecidableError(f"task {task.id}: {error}") from None
        spec = replace(
            limits,
            image=image,
            workdir=section.workdir or settings.workdir,
            env={**resolve(section.env), **limits.env},
            memory_mb=section.memory_mb or limits.memory_mb,
            cpus=float(section.cpus or limits.cpus),
            disk_mb=min(section.storage_mb or limits.disk_mb, limits.disk_mb),
        )
        return spec, settings.user


def task_directories(path: Path) -> list[Path]:
    """The directories of the tasks in ``path``. Raises ``TaskRecordError`` if there are none."""
    path = path.resolve()
    if (path / CONFIG).is_file():
        return [path]
    directories = sorted(file.parent for file in path.glob(f"*/{CONFIG}"))
    if not directories:
        old = (
            " (tasks of Terminal-Bench 1 have a task.yaml: convert them with Harbor)"
            if any(path.glob("*/task.yaml"))
            else ""
        )
        raise TaskRecordError(
            f"{path}: no {CONFIG}, neither there nor in a directory below; right would be Harbor tasks{old}"
        )
    return directories


def initial_messages(statement: str, workdir: str, style: ToolStyle) -> tuple[Message, Message]:
    """The system and the user message. The user message is the task's instruction."""
    return {"role": "system", "content": _SYSTEM.format(workdir=workdir)}, {"role": "user", "content": statement}


async def _survey(root: Sandbox, task: HarborTask, may_replace: tuple[str, ...]) -> Survey:
    """Create the log directories, and list the programs of the image."""
    result = await root.exec(["sh", "-c", _SURVEY], timeout=_SECONDS, cwd="/")
    if not result.ok:
        raise SandboxStartError(f"task {task.id}: {LOGS} could not be created: {result.text.strip()[-200:]}")
    path, _, programs = result.stdout.decode(errors="replace").partition("\n\n")
    return Survey(tuple(path.split(":")), frozenset(programs.split("\n")) - {""}, may_replace)


async def _numeric(root: Sandbox, task: HarborTask, user: str) -> str:
    """``uid:gid`` of a user of the image. Raises ``UndecidableError`` for one who cannot run commands."""
    if user in _ROOTS:
        return ROOT
    try:
        result = await root.exec(["sh", "-c", "id -u; id -g"], timeout=_SECONDS, cwd="/", user=user)
    except SandboxError as error:
        if "user" in str(error):  # the engine finds no such user, or it is nobody
            raise UndecidableError(f"task {task.id}: user {user!r}: {error}") from None
        raise
    return ":".join(result.text.split())


async def _wait_until_healthy(root: Sandbox, task: HarborTask, check: HealthCheck, user: str) -> None:
    """Run the health check as the image's user until it succeeds. Raises ``SandboxStartError`` after the last retry."""
    begin, failures = time.monotonic(), 0
    while not (result := await root.exec(check.command, timeout=check.timeout_sec, user=user)).ok:
        starting = time.monotonic() - begin < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            raise SandboxStartError(f"task {task.id}: its health check failed: {result.text.strip()[-200:]}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
