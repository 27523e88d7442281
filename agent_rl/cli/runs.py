"""Commands that read the files of runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agent_rl.cli.common import Overrides

app = typer.Typer()

RunAtStep = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="Directory of a run, and the step of a checkpoint. Default: newest.")
]


@app.command("runs")
def runs_list(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(help="Directories of runs or evaluations, or parents of such directories. Default: runs."),
    ] = None,
) -> None:
    """List runs and evaluations with steps, Pass@1, state, number of guard warnings, age and size."""
    from rich.console import Console

    from agent_rl.commands.runs import list_runs

    list_runs(directories or [Path("runs")], Console())


@app.command()
def clean(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories of runs, or their parents. Default: runs.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Default: only list it.")] = False,
) -> None:
    """List or remove what runs no longer need: failed starts, exported models, weights for engines.

    Checkpoints, trajectories and results stay. A running run keeps everything.
    """
    from rich.console import Console

    from agent_rl.commands.clean import clean as clean_runs

    clean_runs(directories or [Path("runs")], Console(), remove=yes)


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs or evaluations to show.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: a free port.")] = 8642,
    export: Annotated[
        Path | None,
        typer.Option(help="Export the page instead of serving it: OUT.html (one file) or a directory (web server)."),
    ] = None,
    trajectories: Annotated[
        int,
        typer.Option(min=0, help="Trajectories per run in an export; those with the largest log-prob gaps are taken."),
    ] = 200,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Show runs in a browser: curves, trajectories, and each token's log-prob gap and experts.

    The server listens on loopback only, and updates the page of a running run. Ctrl-C stops it.
    """
    from agent_rl.commands.runs import run_view

    run_view(runs, port=port, out=export, trajectories=trajectories, open_browser=not no_open)


@app.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|FILE", help="Directory of a run or an evaluation, or a trajectories file.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the run. Default: the last step.")] = None,
    task: Annotated[str | None, typer.Option(help="Show only this task.")] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="Show only this sample of each task, from 0.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="Print a list even for a single episode.")] = False,
) -> None:
    """Print an episode turn by turn: model output, tool calls, observations, outcome. Several episodes are listed."""
    from rich.console import Console

    from agent_rl.commands.show import show as show_episodes

    show_episodes(path, step=step, task=task, sample=sample, as_list=as_list, console=Console(highlight=False))


@app.command()
def rows(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run or an evaluation.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File to write.")],
    unresolved: Annotated[bool, typer.Option("--all", help="Also write episodes that are not resolved.")] = False,
    per_task: Annotated[int | None, typer.Option(min=1, help="Largest number of rows of a task.")] = None,
) -> None:
    """Write the resolved episodes as chat rows for supervised fine-tuning: messages with reasoning and tool calls.

    Rows of a run have the sampled tokens and their loss mask too.
    """
    from agent_rl.commands.rows import RowChoice, write_rows

    typer.echo(write_rows(source, out, RowChoice(unresolved, per_task)))


@app.command()
def ledger(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]) -> None:
    """Verify that every task a run drew was trained on, discarded, dropped or left out exactly once."""
    from rich.console import Console

    from agent_rl.commands.runs import check_ledger

    check_ledger(run, Console(highlight=False))


@app.command()
def fork(
    run: RunAtStep,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new run, in the same directory.")],
    overrides: Overrides = None,
) -> None:
    """Start a new run from a checkpoint of another, with config overrides. Training continues with the next step."""
    from agent_rl.config.loader import load_recorded
    from agent_rl.controller.fork import fork as fork_run

    directory, _, step = run.partition("@")
    config = fork_run(Path(directory), step, name, overrides or ()) / "config.yaml"
    command = "train" if load_recorded(config).sft is None else "sft"
    typer.echo(f"{config.parent}: created from {run}\nnext: agent-rl {command} {shlex.quote(str(config))}")


@app.command("export")
def export_run(
    run: RunAtStep,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory of the Hugging Face checkpoint.")],
    ema: Annotated[bool, typer.Option("--ema", help="Export the average of the weights (train.ema).")] = False,
) -> None:
    """Export a checkpoint of a run as a Hugging Face checkpoint, with adapters merged. Needs no GPU.

    A config accepts RUN[@STEP] too: model=runs/NAME@STEP, or model=runs/NAME@STEP+ema for the average of the weights.
    """
    from agent_rl.controller.run_models import export, find_checkpoint
    from agent_rl.errors import UserError

    directory, _, step = run.partition("@")
    if out.exists():
        raise UserError(f"{out}: exists; name a new directory")
    export(find_checkpoint(Path(directory), step, "export"), Path(directory), out, averaged=ema)
    typer.echo(f"{out}: written")
