"""The root command and its exit codes."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agent_rl import __version__
from agent_rl.cli import projects, routing, runs, tasks, training
from agent_rl.cli.common import CommandStopped, print_error


class TwoWordCommandGroup(TyperGroup):
    """A group with commands of one or two words, such as `eval CONFIG` and `eval compare A B`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the name of the command at the start of ``args``, the command, and the remaining arguments."""
        name = " ".join(args[:2])
        return (name, self.commands[name], args[2:]) if name in self.commands else super().resolve_command(ctx, args)


app = typer.Typer(cls=TwoWordCommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(training.app)
app.add_typer(runs.app)
app.add_typer(projects.app)
app.add_typer(projects.config_app, name="config")
app.add_typer(projects.envs_app, name="envs")
app.add_typer(projects.model_app, name="model")
app.add_typer(routing.app, name="r3")
app.add_typer(tasks.app, name="tasks")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"agent-rl {__version__}")
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train and evaluate software-engineering agents by RL with rollout routing replay.

    First project: agent-rl init PROJECT. First training run on this machine: agent-rl train quickstart.
    """
    # Appended, so that a user's directory never shadows an installed package.
    if (working_directory := str(Path.cwd())) not in sys.path:
        sys.path.append(working_directory)


def main() -> None:
    """Entry point. Prints one line and exits with code 2 for errors of the user; shows a traceback for bugs."""
    from agent_rl.errors import EngineError, GuardStop, RolloutFailed, TrainerError, UserError, WeightSyncError
    from envs import EnvsError
    from sandbox import SandboxError

    try:
        app()
    except (UserError, EngineError, WeightSyncError, TrainerError, RolloutFailed, EnvsError, SandboxError) as error:
        sys.exit(print_error(str(error)))
    except GuardStop as error:
        print(f"stopped by the guard: {error}", file=sys.stderr)
        sys.exit(3)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(
            print_error(f"{error.filename or 'disk'}: the disk is full; free some space and start again to resume")
        )
    except CommandStopped as stopped:
        from agent_rl.utils.concurrency import exit_code

        print(f"stopped; {stopped}", file=sys.stderr)
        sys.exit(exit_code(stopped.number))
    except BaseExceptionGroup as group:
        sys.exit(_print_group_error(group))


def _print_group_error(group: BaseExceptionGroup[BaseException]) -> int:
    """Print the first known error of a task group and return its exit code; reraise a group of unknown errors."""
    from agent_rl.errors import AgentRlError
    from envs import EnvsError
    from sandbox import SandboxError

    known = group.subgroup((AgentRlError, EnvsError, SandboxError))
    if known is None:
        raise group
    first: BaseException = known
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return print_error(str(first))
