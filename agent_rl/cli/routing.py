"""Commands about routing replay: ``agent-rl r3``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.cli.arguments import Overrides
from agent_rl.cli.running import complain, run_async

app = typer.Typer(no_args_is_help=True, help="Probe, compare, draw, check and balance routing replay.")


@app.command()
def compare(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A YAML config, or a finished run's directory.")],
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to roll out, each group_size times.")] = 16,
    split: Annotated[str, typer.Option(help="Split to take them from.")] = "train",
    out: Annotated[Path | None, typer.Option(help="Directory for what is found; by default in the run's own.")] = None,
    trajectories: Annotated[
        Path | None, typer.Option(help="Directory with trajectories (an earlier --out, or a run): roll none out anew.")
    ] = None,
    rescore: Annotated[
        bool, typer.Option("--rescore", help="Let the engine compute the trajectories again, and compare with that.")
    ] = False,
) -> None:
    """Roll out once, run the trainer on it with and without replay, and report how far it is from the engine."""
    from agent_rl.commands.compare import run_compare
    from agent_rl.controller.preflight import check_trainer

    check_trainer()
    run_async(
        run_compare(
            source,
            overrides or (),
            tasks=tasks,
            split=split,
            out=out,
            trajectories=trajectories,
            rescore=rescore,
        )
    )


@app.command()
def figures(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of training runs, the baseline first.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for the pictures and the table.")] = Path("figures"),
) -> None:
    """Draw training runs over each other, a colour a setting, and tabulate what their seeds say of the difference."""
    from agent_rl.commands.figures import run_figures

    run_figures(runs, out)


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a trace (r3.trace in the config).")],
    require_forward_verify: Annotated[
        bool, typer.Option("--require-forward-verify", help="Demand a record of what every router used.")
    ] = False,
    require_shard_identity: Annotated[
        bool, typer.Option("--require-shard-identity", help="Demand that all rows were compared with the tokens fed.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report here as JSON.")] = None,
) -> None:
    """Prove from a trace that the routers used the rollout's routes, or name the hand-over that first broke.

    Exit code 0: it holds, 1: broken, 2: no trace, or one that cannot be read.
    """
    from agent_rl.commands.trace_check import run_check
    from r3.trace.events import TraceError

    try:
        holds = run_check(
            directory, forward_verify=require_forward_verify, shard_identity=require_shard_identity, json=json
        )
    except TraceError as error:
        raise typer.Exit(complain(str(error))) from None
    raise typer.Exit(0 if holds else 1)


@app.command()
def balance(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, or of `agent-rl rollout`.")],
    expert_ranks: Annotated[
        str, typer.Option(metavar="R,...", help="Expert-parallel sizes to look at (train.parallel.expert).")
    ] = "2,4,8",
    slots: Annotated[int, typer.Option(min=1, help="Experts that a rank may borrow (train.balance.slots).")] = 4,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Expert ranks of a machine; all of them by default.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a micro-batch; the run's own by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="The newest so many steps.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Say from a run's captured routes what balancing expert ranks (train.balance) would make of their load."""
    from agent_rl.controller.preflight import check_trainer

    check_trainer()
    from agent_rl.commands.balance import Question, run_balance
    from agent_rl.errors import ConfigError

    if not all(part.isdigit() for part in expert_ranks.split(",")):
        raise ConfigError(f"--expert-ranks {expert_ranks}: write numbers between commas, as 2,4,8")
    question = Question(slots, ranks_per_node, tokens, steps)
    run_balance(run, [int(part) for part in expert_ranks.split(",")], question, json)


@app.command()
def probe(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, as in engine.urls.")],
    model: Annotated[
        Path | None, typer.Option(help="Directory with the model's config.json, where the server's own is not here.")
    ] = None,
    retract: Annotated[
        bool, typer.Option("--retract", help="Also put running requests back once: on an engine nobody else uses.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the findings here as JSON.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the key of a gateway before it.")
    ] = None,
) -> None:
    """Ask a running engine for routes in every way that training will, and say whether they can be replayed.

    Some twenty short requests (one of up to 1,024 tokens, aborted as it starts): a training that uses the engine
    meanwhile is slowed by that much; its cache is left alone, and nothing of it is aborted or retracted.
    Exit code 0: all is right, 1: a check failed, 2: no answer.
    """
    from rich.console import Console

    from agent_rl.config import EngineConfig
    from agent_rl.engine.route_probe.run import probe as probe_server
    from agent_rl.engine.route_probe.run import table
    from agent_rl.models.spec import read_moe_spec
    from agent_rl.utils.run_files import write_json

    facts = read_moe_spec(model) if model else None
    headers = EngineConfig(api_key_env=api_key_env).headers
    report = run_async(probe_server(url, facts, retract=retract, headers=headers))
    Console().print(table(report))
    typer.echo(report.line())
    if json is not None:
        write_json(json, report.as_json())
    raise typer.Exit(1 if report.failed else 0)
