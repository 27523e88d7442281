"""``agent-rl tasks``: commands that make tasks from your own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_rl.cli.common import RESUMABLE, run_async

app = typer.Typer(
    no_args_is_help=True,
    help="Make tasks from your own code: from its commits, from a package's releases, or by injecting bugs.\n\n"
    "Each candidate's tests run three times before and three times after the fix, in sandboxes without a network. "
    "Candidates that are flaky, leak the fix or can be hacked are rejected. OUT/tasks.jsonl has the healthy tasks of "
    "all three commands, OUT/report.json the reasons of the rejections. A stopped command resumes where it stopped.",
)


def build_options(
    out: Annotated[Path, typer.Option("--out", help="Output directory; a build in it is resumed.")] = Path("tasks"),
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Stop after this many healthy tasks.")] = None,
    candidates: Annotated[int | None, typer.Option("--candidates", min=1, help="Maximum candidates to try.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Candidates validated in parallel.")] = 2,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Timeout of one test run in seconds.")] = 120.0,
    disk_mb: Annotated[int, typer.Option(min=64, help="Largest size of OUT in MiB, with installed packages.")] = 16384,
    memory_mb: Annotated[int, typer.Option(min=128, help="Memory limit of a sandbox in MiB.")] = 2048,
    backend: Annotated[str, typer.Option(help="Sandbox backend for the tests.")] = "bubblewrap",
    writer: Annotated[
        str | None, typer.Option(help="OpenAI-compatible endpoint to write issues, http(s)://HOST/v1.")
    ] = None,
    writer_model: Annotated[str | None, typer.Option(help="Name of the model at --writer.")] = None,
) -> Any:
    """The options that the three commands share, as ``BuildOptions``."""
    from agent_rl.commands.tasks import BuildOptions, SynthesisLimits

    limits = SynthesisLimits(tasks, candidates, jobs, disk_mb)
    return BuildOptions(out, limits, timeout, backend, memory_mb, writer, writer_model)


def build_command(open_source: Callable[..., Any]) -> Callable[..., None]:
    """A command from a function that returns a candidate source: its arguments followed by the shared options."""
    specific, shared = (inspect.signature(each, eval_str=True).parameters for each in (open_source, build_options))

    @wraps(open_source)
    def command(**values: Any) -> None:
        from agent_rl.commands.tasks import build

        options = build_options(**{name: values.pop(name) for name in shared})
        run_async(build(open_source(**values), options), RESUMABLE)

    parameters = [*specific.values(), *shared.values()]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command("from-git")
@build_command
def tasks_from_git(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Directory of a git repository.")],
    commits: Annotated[int, typer.Option(min=1, help="Number of newest commits to examine.")] = 500,
) -> Any:
    """Make tasks from commits that change code and its tests. The hidden tests are the commit's tests.

    The issue is the commit message, or is written by the model at --writer. Text that leaks the fix is not used.
    """
    from agent_rl.commands.tasks import from_git

    return from_git(repo, commits)


@app.command("from-releases")
@build_command
def tasks_from_releases(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="Name of a package on pip's index.")],
    old: Annotated[str | None, typer.Argument(metavar="[OLD", help="Release that the agent starts from.")] = None,
    new: Annotated[str | None, typer.Argument(metavar="NEW]", help="Release whose tests must pass.")] = None,
) -> Any:
    """Make tasks from the steps between releases of a package: all steps, or the step from OLD to NEW.

    The source releases are stored in OUT/sdists, where `agent-rl tasks inject` can read them. Their code runs only in
    sandboxes.
    """
    from agent_rl.commands.tasks import from_releases

    return from_releases(package, old, new)


@app.command("inject")
@build_command
def tasks_inject(
    repo: Annotated[
        Path,
        typer.Argument(metavar="REPO", help="Git repository (its newest commit is used), directory, or .tar.gz file."),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the bugs and their order.")] = 0,
) -> Any:
    """Make tasks by injecting one bug at a time into tested functions.

    A bug becomes a task if a test fails with it and no other mutation at the same place passes the tests. The bugs
    belong to the families of the environment mini. The failing test files are hidden from the agent.
    """
    from agent_rl.commands.tasks import inject

    return inject(repo, seed)
