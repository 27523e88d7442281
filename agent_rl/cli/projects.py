"""Commands that set up a project: ``install``, ``init``, ``config``, ``envs``, ``model`` and ``convert``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agent_rl.cli.common import RESUMABLE, CommandStopped, ConfigPath, Overrides, load, run_async

app = typer.Typer()
config_app = typer.Typer(no_args_is_help=True, help="List and show configs.")
envs_app = typer.Typer(no_args_is_help=True, help="List, create and check environments.")
model_app = typer.Typer(no_args_is_help=True, help="Create a starting model.")


class Component(StrEnum):
    """What `agent-rl install` installs."""

    ENGINE = "engine"
    TRAINER = "trainer"
    SANDBOX = "sandbox"


class ModelShape(StrEnum):
    """Sizes of the starting model."""

    TINY = "tiny"
    PAPER = "paper"


@app.command()
def install(components: Annotated[list[Component], typer.Argument(help="Components to install.")]) -> None:
    """Install the engine environment, the trainer's packages or a sandbox, which pip does not install.

    The engine environment is the directory .venv-engine next to the environment that contains agent-rl.
    """
    from agent_rl.bootstrap import main as bootstrap

    steps = {Component.ENGINE: "engine", Component.TRAINER: "trainer-packages", Component.SANDBOX: "sandbox"}
    raise typer.Exit(bootstrap([steps[component] for component in components]))


@app.command()
def init(directory: Annotated[Path, typer.Argument(help="Project directory; created if missing.")] = Path(".")) -> None:
    """Create a project with an environment, its test and a training config."""
    from envs.new_project import FIRST, write_template

    typer.echo(write_template(FIRST, directory).next_steps())


@config_app.command("list")
def config_list() -> None:
    """List the configs that ship with the package."""
    from agent_rl.config.loader import shipped_configs

    for name, summary in shipped_configs().items():
        typer.echo(f"{name:<18} {summary}")


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved config, defaults included. Fails if the parallel layout is not supported."""
    import yaml

    from agent_rl.train.parallel_checks import check_layout

    resolved = load(config, overrides)
    typer.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
    check_layout(resolved)


@envs_app.command("list")
def envs_list() -> None:
    """List the registered environments."""
    from envs import ENVIRONMENTS

    for name, target in ENVIRONMENTS.targets().items():
        typer.echo(f"{name:<12} {target}")


@envs_app.command("new")
def envs_new(
    name: Annotated[str, typer.Argument(help="Module name, in lower case.")],
    directory: Annotated[Path, typer.Option(help="Directory to write to.")] = Path("."),
) -> None:
    """Create an environment with its test and config, as a starting point for your own."""
    from envs.new_project import write_template

    typer.echo(write_template(name, directory).next_steps())


@envs_app.command("check")
def envs_check(
    name: Annotated[str, typer.Argument(help="A registered name or package.module:Class.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[option=value]...", help="Options of the environment; values are YAML."),
    ] = None,
    splits: Annotated[str, typer.Option(help="Splits to check, separated by commas.")] = "train,heldout",
) -> None:
    """Check an environment against the environment protocol. Exit code 1: a check failed."""
    from agent_rl.commands.envs_check import run_check

    if not run_async(run_check(name, options or (), splits.split(","))):
        raise typer.Exit(1)


@model_app.command("init")
def model_init(
    out: Annotated[Path, typer.Argument(help="Directory of the new model.")] = Path(".cache/models/tiny-moe"),
    shape: Annotated[
        ModelShape, typer.Option(help="Model size. tiny: the quickstart's model. paper: 8 layers of 128 experts.")
    ] = ModelShape.TINY,
) -> None:
    """Create the tiny Qwen3-MoE model of the quickstart, or the model of configs/paper-small.yaml."""
    from agent_rl.config.loader import install_model

    typer.echo(f"{out}: {'created' if install_model(out, f'{shape}-moe') else 'exists already'}")


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Directory of a quantized checkpoint, or its id on the hub.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New directory of the bfloat16 checkpoint.")],
) -> None:
    """Convert an fp8 or mxfp4 checkpoint to bfloat16, which the trainer reads. A killed conversion resumes.

    Reads fp8 with scales for blocks or rows, and gpt-oss's mxfp4. Needs the trainer's packages.
    """
    from agent_rl.commands.convert import run_convert

    try:
        run_convert(source, target)
    except KeyboardInterrupt:
        raise CommandStopped(RESUMABLE) from None
