"""Commands that make tasks of one's own code: ``agent-rl tasks``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_rl.cli.running import RESUMES, run_async

app = typer.Typer(
    no_args_is_help=True,
    help="Make tasks from your own code: from its commits, from a package's releases, or by putting bugs into it.\n\n"
    "Each candidate's tests run before and after the fix, three times each, in sandboxes without a network; what is "
    "flaky, "
    "leaks or can be hacked falls. OUT/tasks.jsonl has the healthy tasks of all three commands, OUT/report.json says "
    "why the others fell. A command that was stopped goes on where it was.",
)


def build_options(
    out: Annotated[Path, typer.Option("--out", help="Directory of the tasks; a build in it is gone on with.")] = Path(
        "tasks"
    ),
    tasks: Annotated[
        int | None, typer.Option("--tasks", min=1, help="Stop at so many healthy tasks of this source.")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option("--candidates", min=1, help="Try so many candidates at most.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Candidates at once.")] = 2,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds that one run of the tests may take.")
    ] = 120.0,
    disk_mb: Annotated[int, typer.Option(min=64, help="MiB that OUT may have, installed packages included.")] = 16384,
    memory_mb: Annotated[int, typer.Option(min=128, help="MiB of memory of a sandbox.")] = 2048,
    backend: Annotated[str, typer.Option(help="The sandbox where the tests run.")] = "bubblewrap",
    writer: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint, http(s)://HOST/v1, that writes the issues.")
    ] = None,
    writer_model: Annotated[str | None, typer.Option(help="The model's name at --writer.")] = None,
) -> Any:
    """The BuildOptions of what all three commands are given."""
    from agent_rl.commands.tasks import Bounds, BuildOptions

    bounds = Bounds(tasks, candidates, jobs, disk_mb)
    return BuildOptions(out, bounds, timeout, backend, memory_mb, writer, writer_model)


def builds(opens: Callable[..., Any]) -> Callable[..., None]:
    """A command of a function that opens a source of tasks: its own arguments, and then those of every build."""
    own, shared = (inspect.signature(function, eval_str=True).parameters for function in (opens, build_options))

    @wraps(opens)
    def command(**values: Any) -> None:
        from agent_rl.commands.tasks import build

        options = build_options(**{name: values.pop(name) for name in shared})
        run_async(build(opens(**values), options), RESUMES)

    parameters = [*own.values(), *shared.values()]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command("from-git")
@builds
def tasks_from_git(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Directory of a git repository.")],
    commits: Annotated[int, typer.Option(min=1, help="Look at so many of the newest commits.")] = 500,
) -> Any:
    """Make tasks of the commits that change code and its tests; the hidden tests are those of the commit.

    The issue is the commit's message, or written by the model at --writer; one that gives the fix away is not used.
    """
    from agent_rl.commands.tasks import from_git

    return from_git(repo, commits)


@app.command("from-releases")
@builds
def tasks_from_releases(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="A package of the index that pip uses.")],
    old: Annotated[str | None, typer.Argument(metavar="[OLD", help="The release that the agent finds.")] = None,
    new: Annotated[str | None, typer.Argument(metavar="NEW]", help="The release whose tests it must pass.")] = None,
) -> Any:
    """Make tasks of the steps from one release of a package to the next, all of them or the one that is named.

    The source releases are kept in OUT/sdists; `agent-rl tasks inject` takes them, too. None of their code is run
    outside a sandbox.
    """
    from agent_rl.commands.tasks import from_releases

    return from_releases(package, old, new)


@app.command("inject")
@builds
def tasks_inject(
    repo: Annotated[
        Path, typer.Argument(metavar="REPO", help="A git repository (its newest commit), a directory, or a .tar.gz.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Which bugs are put where, and in which order.")] = 0,
) -> Any:
    """Put one bug at a time into functions that tests run; kept where a test notices it and no other change would do.

    The bugs are of the families of the environment mini. The test files that notice are hidden from the agent.
    """
    from agent_rl.commands.tasks import inject

    return inject(repo, seed)
