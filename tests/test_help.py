"""Help texts of all commands, options and arguments."""

from __future__ import annotations

from collections.abc import Iterator

import click
import typer
from typer.testing import CliRunner

from agent_rl import __version__
from agent_rl.cli import app


def commands(command: click.Command, name: str = "agent-rl") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for below, member in getattr(command, "commands", {}).items():
        yield from commands(member, f"{name} {below}")


def test_every_command_option_and_argument_has_help() -> None:
    all_commands = list(commands(typer.main.get_command(app)))
    assert len(all_commands) > 15
    undocumented = [name for name, command in all_commands if not command.help]
    undocumented += [
        f"{name} {p.name}" for name, command in all_commands for p in command.params if not getattr(p, "help", None)
    ]
    assert not undocumented


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"agent-rl {__version__}\n"
