"""``agent-rl tasks``: makes tasks from your own code and reports the rejected candidates."""

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
from agent_rl.rollout.openai_policy import API_KEY
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import write_json
from envs import EnvContext
from envs.swe.task_synthesis.bug_injection import InjectionSource
from envs.swe.task_synthesis.candidate import CandidateRejected
from envs.swe.task_synthesis.checkout import read_checkout, repository_name
from envs.swe.task_synthesis.from_commits import CommitSource
from envs.swe.task_synthesis.from_releases import ReleaseSource
from envs.swe.task_synthesis.git import open_git
from envs.swe.task_synthesis.issues import IssueWriter, writer_counts
from envs.swe.task_synthesis.pipeline import REPORT, TASKS, CandidateSource, SynthesisLimits, TaskSynthesis
from envs.swe.task_synthesis.site_packages import SitePackages
from envs.swe.task_synthesis.validation import Validation
from sandbox import SandboxSpec, open_backend


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options that the three commands share. ``timeout`` is seconds per test run."""

    out: Path
    limits: SynthesisLimits
    timeout: float = 120.0
    backend: str = "bubblewrap"
    memory_mb: int = 2048
    writer: str | None = None
    writer_model: str | None = None


@dataclass(frozen=True, slots=True)
class SourceContext:
    """The arguments for opening a candidate source."""

    context: EnvContext
    site_packages: SitePackages
    options: BuildOptions


OpenSource = Callable[[SourceContext], AbstractAsyncContextManager[CandidateSource]]


def from_git(repo: Path, commits: int) -> OpenSource:
    """Candidates from the newest ``commits`` of a repository."""

    @asynccontextmanager
    async def source(context: SourceContext) -> AsyncIterator[CandidateSource]:
        async with open_git(context.context, repo) as git:
            yield CommitSource(git, context.site_packages, repository_name(repo), commits)

    return source


def from_releases(package: str, old: str | None, new: str | None) -> OpenSource:
    """Candidates from the releases of a package, or from one step if both versions are given."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", package):
        raise UserError(f"from-releases {package!r}: right would be a package's name on the index that pip uses")
    if (old is None) != (new is None):
        raise UserError("from-releases: right would be PACKAGE alone, or PACKAGE OLD NEW")
    steps = [(old, new)] if old is not None and new is not None else []

    @asynccontextmanager
    async def source(context: SourceContext) -> AsyncIterator[CandidateSource]:
        yield ReleaseSource(package, context.options.out / "sdists", context.site_packages, steps)

    return source


def inject(repo: Path, seed: int) -> OpenSource:
    """Candidates from bugs injected into a checkout."""

    @asynccontextmanager
    async def source(context: SourceContext) -> AsyncIterator[CandidateSource]:
        checkout, options = await read_checkout(context.context, repo), context.options
        yield InjectionSource(checkout, context.context, context.site_packages, options.out, seed, options.limits.jobs)

    return source


async def build(open_source: OpenSource, options: BuildOptions) -> None:
    """Build tasks, print the report and write it."""
    if (options.writer is None) != (options.writer_model is None):
        raise UserError("--writer and --writer-model go together: the endpoint's URL and the model's name there")
    key = os.environ.get(API_KEY, "")
    writer = IssueWriter(options.writer, options.writer_model or "", key) if options.writer else None
    display = Display("tasks")
    with lock_directory(options.out), display:
        synthesis = TaskSynthesis.open(options.out)
        backend = open_backend(options.backend, run_id=f"tasks-{uuid.uuid4().hex[:8]}")
        limits = SandboxSpec(memory_mb=options.memory_mb, cpus=2.0, pids=256)
        context = EnvContext(backend, limits=limits, grade_timeout=options.timeout)
        started_at, healthy_before = time.monotonic(), len(synthesis.healthy)
        try:
            if reaped := await backend.reap():
                display.note(f"removed {reaped} sandbox(es) that a killed run had left behind")
            site_packages = SitePackages(options.out, await _sandbox_python(context))
            async with open_source(SourceContext(context, site_packages, options)) as source:
                name = source.name
                validation = Validation(context, options.out, writer)
                await synthesis.synthesize(source, validation, options.limits, display)
        except CandidateRejected as error:
            raise UserError(str(error)) from None
        finally:
            await backend.close()
            write_json(options.out / REPORT, {"sources": synthesis.report(), "writer": writer_counts(writer)})
        new = len(synthesis.healthy) - healthy_before
        _print_report(display, synthesis, name, writer, new, time.monotonic() - started_at)


async def _sandbox_python(context: EnvContext) -> str:
    """The version of the sandboxes' Python, such as "3.11"."""
    async with context.sandbox(context.limits) as sandbox:
        result = await sandbox.exec("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'", timeout=30)
    if not result.ok:
        raise UserError(f"no python3 in the sandboxes: {result.text.strip()[-200:]}")
    return result.text.strip()


def _print_report(
    display: Display, synthesis: TaskSynthesis, name: str, writer: IssueWriter | None, new: int, seconds: float
) -> None:
    row = synthesis.report()[name]
    reasons = [f"{rejected['candidates']} {reason}" for reason, rejected in row["rejected"].items()]
    table = Table("source", "candidates", "healthy", "rejected")
    table.add_row(cell(name), str(row["tried"]), str(row["healthy"]), cell("\n".join([*reasons, *row["notes"]])))
    display.table(table)
    if writer is not None:
        fallbacks = "; ".join(f"{count} {reason}" for reason, count in writer.fallbacks.items()) or "none"
        display.note(f"issues by {writer.model}: {writer.written}; from commit messages instead: {fallbacks}")
    pace = f"{60 * new / seconds:.1f} per minute" if seconds else ""
    total = f"{len(synthesis.healthy)} in {synthesis.directory / TASKS}"
    display.note(f"{new} new healthy tasks in {seconds:.0f} s ({pace}), {total}")
    display.note(f"report: {synthesis.directory / REPORT}")
    if synthesis.healthy:
        display.next("doctor", "real", f"env.options.path={synthesis.directory / TASKS}")
