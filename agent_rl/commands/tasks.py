"""``agent-rl tasks``: tasks from your own code, and what became of the candidates."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from agent_rl.errors import UserError
from agent_rl.monitoring.console import Display, cell
from agent_rl.rollout.chat_policy import API_KEY
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import write_json
from envs import EnvContext
from envs.swe.task_synthesis.bug_injection import Injection
from envs.swe.task_synthesis.candidate import Fallen
from envs.swe.task_synthesis.checkout import name_of, read_checkout
from envs.swe.task_synthesis.from_commits import History
from envs.swe.task_synthesis.from_releases import Releases
from envs.swe.task_synthesis.git import open_git
from envs.swe.task_synthesis.issues import Writer, counts
from envs.swe.task_synthesis.pipeline import REPORT, TASKS, Bounds, Source, TaskSynthesis
from envs.swe.task_synthesis.site_packages import SitePackages
from envs.swe.task_synthesis.validation import Validation
from sandbox import SandboxSpec, open_backend


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the three commands have in common."""

    out: Path
    bounds: Bounds
    timeout: float = 120.0
    backend: str = "bubblewrap"
    memory_mb: int = 2048
    writer: str | None = None
    writer_model: str | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What sources are made with."""

    context: EnvContext
    sites: SitePackages
    options: BuildOptions


Open = Callable[[Bench], AbstractAsyncContextManager[Source]]


def from_git(repo: Path, commits: int) -> Open:
    """The commits of a repository."""

    @asynccontextmanager
    async def source(bench: Bench) -> AsyncIterator[Source]:
        async with open_git(bench.context, repo) as git:
            yield History(git, bench.sites, name_of(repo), commits)

    return source


def from_releases(package: str, old: str | None, new: str | None) -> Open:
    """The releases of a package; one step, where both versions are given."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", package):
        raise UserError(f"from-releases {package!r}: right would be a package's name on the index that pip uses")
    if (old is None) != (new is None):
        raise UserError("from-releases: right would be PACKAGE alone, or PACKAGE OLD NEW")
    steps = [(old, new)] if old is not None and new is not None else []

    @asynccontextmanager
    async def source(bench: Bench) -> AsyncIterator[Source]:
        yield Releases(package, bench.options.out / "sdists", bench.sites, steps)

    return source


def inject(repo: Path, seed: int) -> Open:
    """Bugs in a checkout."""

    @asynccontextmanager
    async def source(bench: Bench) -> AsyncIterator[Source]:
        checkout = await read_checkout(bench.context, repo)
        yield Injection(checkout, bench.context, bench.sites, bench.options.out, seed, bench.options.bounds.jobs)

    return source


async def build(open_source: Open, options: BuildOptions) -> None:
    """Build tasks, print the report and write it."""
    if (options.writer is None) != (options.writer_model is None):
        raise UserError("--writer and --writer-model go together: the endpoint's URL and the model's name there")
    writer = Writer(options.writer, options.writer_model or "", os.environ.get(API_KEY, "")) if options.writer else None
    display = Display("tasks")
    with lock_directory(options.out), display:
        harvest = TaskSynthesis.open(options.out)
        backend = open_backend(options.backend, run_id=f"tasks-{uuid.uuid4().hex[:8]}")
        limits = SandboxSpec(memory_mb=options.memory_mb, cpus=2.0, pids=256)
        context = EnvContext(backend, limits=limits, grade_timeout=options.timeout)
        began, before = time.monotonic(), len(harvest.healthy)
        try:
            if reaped := await backend.reap():
                display.note(f"removed {reaped} sandbox(es) that a killed run had left behind")
            bench = Bench(context, SitePackages(options.out, await _python(context)), options)
            async with open_source(bench) as source:
                name = source.name
                await harvest.gather(source, Validation(context, options.out, writer), options.bounds, display)
        except Fallen as fallen:
            raise UserError(str(fallen)) from None
        finally:
            await backend.close()
            write_json(options.out / REPORT, {"sources": harvest.report(), "writer": counts(writer)})
        _tell(display, harvest, name, writer, len(harvest.healthy) - before, time.monotonic() - began)


async def _python(context: EnvContext) -> str:
    """The version of the sandboxes' Python, as "3.11"."""
    async with context.sandbox(context.limits) as sandbox:
        answer = await sandbox.exec("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'", timeout=30)
    if not answer.ok:
        raise UserError(f"no python3 in the sandboxes: {answer.text.strip()[-200:]}")
    return answer.text.strip()


def _tell(display: Display, harvest: TaskSynthesis, name: str, writer: Writer | None, new: int, seconds: float) -> None:
    row = harvest.report()[name]
    reasons = [f"{fallen['candidates']} {reason}" for reason, fallen in row["fallen"].items()]
    table = Table("source", "candidates", "healthy", "why the others fell")
    table.add_row(cell(name), str(row["tried"]), str(row["healthy"]), cell("\n".join([*reasons, *row["notes"]])))
    display.table(table)
    if writer is not None:
        fallbacks = "; ".join(f"{count} {why}" for why, count in writer.fallbacks.items()) or "none"
        display.note(f"issues by {writer.model}: {writer.written}; by the commits' words instead: {fallbacks}")
    pace = f"{60 * new / seconds:.1f} a minute" if seconds else ""
    display.note(
        f"{new} new healthy tasks in {seconds:.0f} s ({pace}), {len(harvest.healthy)} in {harvest.directory / TASKS}"
    )
    display.note(f"report: {harvest.directory / REPORT}")
    if harvest.healthy:
        display.next("doctor", "real", f"env.options.path={harvest.directory / TASKS}")
