"""The commands together, and how they end."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agent_rl import __version__
from agent_rl.cli import looking, projects, routing, tasks, training
from agent_rl.cli.running import Stopped, complain


class Commands(TyperGroup):
    """Commands of one word or of two: `eval compare` beside `eval CONFIG`, whose own arguments begin at the same
    place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with, its name, and the arguments after it."""
        name = " ".join(args[:2])
        return (name, self.commands[name], args[2:]) if name in self.commands else super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(training.app)
app.add_typer(looking.app)
app.add_typer(projects.app)
app.add_typer(projects.config_app, name="config")
app.add_typer(projects.envs_app, name="envs")
app.add_typer(projects.model_app, name="model")
app.add_typer(routing.app, name="r3")
app.add_typer(tasks.app, name="tasks")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agent-rl {__version__}")
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, evaluate and extend software-engineering agents by RL with rollout routing replay.

    A first project: agent-rl init PROJECT. A first training run on this machine: agent-rl train quickstart.
    """
    # Last, so that a directory of the user's never hides an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def main() -> None:
    """Entry point: one clear line and exit code 2 for what the user can mend, a traceback for what only we can."""
    from agent_rl.errors import EngineError, GuardStop, RolloutFailed, TrainerError, UserError, WeightSyncError
    from envs import EnvsError
    from sandbox import SandboxError

    try:
        app()
    except (UserError, EngineError, WeightSyncError, TrainerError, RolloutFailed, EnvsError, SandboxError) as error:
        sys.exit(complain(str(error)))
    except GuardStop as error:
        print(f"stopped by the guard: {error}", file=sys.stderr)
        sys.exit(3)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(complain(f"{error.filename or 'disk'}: no room left on the disk; free some and start again to resume"))
    except Stopped as stopped:
        print(f"stopped; {stopped}", file=sys.stderr)
        sys.exit(130)
    except BaseExceptionGroup as group:
        sys.exit(_complain_of_group(group))


def _complain_of_group(group: BaseExceptionGroup[BaseException]) -> int:
    """A task group's failure is told as its first cause; an unexpected one keeps its traceback."""
    from agent_rl.errors import AgentRlError
    from envs import EnvsError
    from sandbox import SandboxError

    known = group.subgroup((AgentRlError, EnvsError, SandboxError))
    if known is None:
        raise group
    first: BaseException = known
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return complain(str(first))
