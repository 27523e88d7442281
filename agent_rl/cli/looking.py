"""Commands that look at the files of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command("runs")
def runs_list(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(help="Directories of runs or evaluations, or that hold some; by default runs."),
    ] = None,
) -> None:
    """List runs and evaluations: steps, Pass@1, state, and how often the guard spoke."""
    from rich.console import Console

    from agent_rl.commands.runs import list_runs

    list_runs(directories or [Path("runs")], Console())


@app.command()
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs or evaluations; several are compared.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 is one that is free.")] = 8642,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write the page instead: OUT.html, one file that opens by itself, or a directory for a server."
        ),
    ] = None,
    trajectories: Annotated[
        int, typer.Option(min=0, help="Trajectories of each run in an export, the largest gaps first.")
    ] = 200,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Look at runs in a browser: curves, trajectories, and each token with its gap and its experts.

    The page is served to this machine alone, and follows a run that is going on. Ctrl-C stops it.
    """
    from agent_rl.commands.view import run_view

    run_view(runs, port=port, out=export, trajectories=trajectories, open_browser=not no_open)


@app.command()
def show(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN|FILE", help="A run's or an evaluation's directory, or a file with trajectories."),
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Step of a run; its last by default.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="Only this sample of a task, counted from 0.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List them, also where there is only one.")] = False,
) -> None:
    """Show what an agent did, turn by turn: what it wrote, called and saw, and what came of it. Lists where several
    were found."""
    from rich.console import Console

    from agent_rl.commands.show import show as show_episodes

    show_episodes(path, step=step, task=task, sample=sample, as_list=as_list, console=Console(highlight=False))


@app.command()
def ledger(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Prove from a run's files that every task it drew was trained on, discarded, dropped or left out exactly once."""
    from rich.console import Console

    from agent_rl.commands.ledger import ledger as show_ledger

    show_ledger(run, Console(highlight=False))
