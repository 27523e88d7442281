"""What `agent-rl --help` says: of every command, option and argument, at once."""

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
    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 15
    silent = [name for name, command in found if not command.help]
    silent += [f"{name} {p.name}" for name, command in found for p in command.params if not getattr(p, "help", None)]
    assert not silent


def test_help_opens_with_what_the_command_is_for() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "Train, evaluate and extend software-engineering agents" in text
    assert "import" not in text


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"agent-rl {__version__}\n"
