"""Commands that start something of one's own: projects, configs, environments, a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agent_rl.cli.arguments import ConfigPath, Overrides
from agent_rl.cli.running import RESUMES, run_async

app = typer.Typer()
config_app = typer.Typer(no_args_is_help=True, help="List and show configs.")
envs_app = typer.Typer(no_args_is_help=True, help="List, write and check environments.")
model_app = typer.Typer(no_args_is_help=True, help="Make a starting model.")


class Part(StrEnum):
    """What `agent-rl install` installs."""

    ENGINE = "engine"
    TRAINER = "trainer"
    SANDBOX = "sandbox"


class Shape(StrEnum):
    """The sizes of a starting model."""

    TINY = "tiny"
    PAPER = "paper"


@app.command()
def install(
    parts: Annotated[list[Part], typer.Argument(help="What to install.")],
) -> None:
    """Install what pip leaves out: the engine's own environment, the trainer's packages, a sandbox.

    The engine environment is the directory .venv-engine beside the one that agent-rl is installed in.
    """
    from agent_rl.bootstrap import main as bootstrap

    steps = {Part.ENGINE: "engine", Part.TRAINER: "trainer-packages", Part.SANDBOX: "sandbox"}
    raise typer.Exit(bootstrap([steps[part] for part in parts]))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="The project's directory; made where it is missing.")] = Path("."),
) -> None:
    """Start a project: a directory with a first environment, its test and a config that trains on it."""
    from envs.new_project import FIRST, write_template

    typer.echo(write_template(FIRST, directory).next_steps())


@config_app.command("list")
def config_list() -> None:
    """List the configs that come with the package and go by their name."""
    from agent_rl.config.builtin import shipped_configs

    for name, summary in shipped_configs().items():
        typer.echo(f"{name:<18} {summary}")


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print a config as it is resolved, defaults included. Fails where its parallel layout can't be trained in."""
    import yaml

    from agent_rl.config.loader import load_config
    from agent_rl.train.parallel_checks import check_layout

    resolved = load_config(config, overrides or ())
    typer.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
    check_layout(resolved)


@envs_app.command("list")
def envs_list() -> None:
    """List the environments that a config can name."""
    from envs import ENVIRONMENTS

    for name, target in ENVIRONMENTS.targets().items():
        typer.echo(f"{name:<12} {target}")


@envs_app.command("new")
def envs_new(
    name: Annotated[str, typer.Argument(help="The module's name, lower case.")],
    directory: Annotated[Path, typer.Option(help="Where to write it.")] = Path("."),
) -> None:
    """Write a working environment with its test and config, to start your own from."""
    from envs.new_project import write_template

    typer.echo(write_template(name, directory).next_steps())


@envs_app.command("check")
def envs_check(
    name: Annotated[str, typer.Argument(help="A registered name or package.module:Class.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[option=value]...", help="Its options.")] = None,
    splits: Annotated[str, typer.Option(help="Its splits, separated by commas.")] = "train,heldout",
) -> None:
    """Check that an environment keeps every promise the training loop relies on. Exit code 1 if one is broken."""
    from agent_rl.commands.envs_check import run_check

    if not run_async(run_check(name, options or (), splits.split(","))):
        raise typer.Exit(1)


@model_app.command("init")
def model_init(
    out: Annotated[Path, typer.Argument(help="Directory to make.")] = Path(".cache/models/tiny-moe"),
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Warm it up anew on recorded demonstrations (10 to 30 minutes).")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a warm-up from scratch.")] = 0,
    shape: Annotated[Shape, typer.Option(help="Its sizes: the quickstart's, or 8 layers of 128 experts.")] = Shape.TINY,
) -> None:
    """Make the tiny Qwen3-MoE that the quickstart starts from, or the one of configs/paper-small.yaml.

    A warm-up from scratch that was stopped goes on where it was.
    """
    from agent_rl.models.builtin import install_model

    if not from_scratch:
        typer.echo(f"{out}: {'made' if install_model(out, f'{shape}-moe') else 'there already'}")
        return
    from agent_rl.commands.setup import warm_up
    from agent_rl.controller.preflight import check_trainer

    check_trainer()
    run_async(warm_up(out, shape, seed), RESUMES)
