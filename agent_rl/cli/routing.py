"""Commands for routing replay: ``agent-rl r3``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.cli.common import Overrides, print_error, run_async

app = typer.Typer(no_args_is_help=True, help="Probe, compare, check and balance routing replay.")


@app.command()
def compare(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A YAML config or the directory of a run.")],
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to roll out; each gets group_size episodes.")] = 16,
    split: Annotated[str, typer.Option(help="Split of the tasks.")] = "train",
    out: Annotated[Path | None, typer.Option(help="Output directory. Default: compare in the run's directory.")] = None,
    trajectories: Annotated[
        Path | None, typer.Option(help="Trajectories to reuse: an earlier --out, or a run.")
    ] = None,
    rescore: Annotated[
        bool,
        typer.Option("--rescore", help="Let the engine evaluate the trajectories again and compare these log-probs."),
    ] = False,
    dense: Annotated[
        Path | None, typer.Option(help="Directory of a dense model's comparison: adds its column and its F(tau).")
    ] = None,
) -> None:
    """Measure the mismatch between trainer and engine with and without routing replay."""
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
            dense=dense,
        )
    )


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a trace (config section r3.trace).")],
    require_forward_verify: Annotated[
        bool,
        typer.Option("--require-forward-verify", help="Fail if the trace lacks the experts that every router used."),
    ] = False,
    require_shard_identity: Annotated[
        bool, typer.Option("--require-shard-identity", help="Fail if not all rows were compared with the input tokens.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
) -> None:
    """Verify from a trace that the routers used the rollout's routes; else name the first hand-over that changed them.

    Exit code 0: verified. 1: routes differ. 2: no readable trace.
    """
    from agent_rl.commands.trace_check import run_check
    from r3.trace.events import TraceError

    try:
        holds = run_check(
            directory, forward_verify=require_forward_verify, shard_identity=require_shard_identity, json=json
        )
    except TraceError as error:
        raise typer.Exit(print_error(str(error))) from None
    raise typer.Exit(0 if holds else 1)


@app.command()
def balance(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run or the output of `agent-rl rollout`.")],
    expert_ranks: Annotated[
        str, typer.Option(metavar="R,...", help="Expert-parallel sizes to simulate (train.parallel.expert).")
    ] = "2,4,8",
    slots: Annotated[int, typer.Option(min=1, help="Experts that a rank may borrow per layer (balance.slots).")] = 4,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Expert ranks per node. Default: all.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens per micro-batch. Default: the run's value.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of most recent steps to use.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Write the table as JSON to this file.")] = None,
) -> None:
    """Simulate expert load balancing (train.balance) on the captured routes of a run."""
    from agent_rl.controller.preflight import check_trainer

    check_trainer()
    from agent_rl.commands.balance import SimulationOptions, run_balance
    from agent_rl.errors import ConfigError

    if not all(part.isdigit() for part in expert_ranks.split(",")):
        raise ConfigError(f"--expert-ranks {expert_ranks}: expected integers separated by commas, such as 2,4,8")
    options = SimulationOptions(slots, ranks_per_node, tokens, steps)
    run_balance(run, [int(part) for part in expert_ranks.split(",")], options, json)


@app.command()
def probe(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the server, as in engine.urls.")],
    model: Annotated[
        Path | None, typer.Option(help="Directory with the model's config.json. Default: the server's model path.")
    ] = None,
    retract: Annotated[
        bool,
        typer.Option("--retract", help="Also retract running requests once. Use only if no one else uses the engine."),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the API key of the server.")
    ] = None,
) -> None:
    """Check that a running engine captures routes correctly for replay.

    Sends about 35 short requests; one of up to 1,024 tokens is aborted as it starts. It does not flush the engine's
    cache, and does not abort or retract other requests, so a training run may use the engine at the same time.
    Exit code 0: all checks passed. 1: a check failed. 2: no response.
    """
    from rich.console import Console

    from agent_rl.config import EngineConfig
    from agent_rl.engine.route_probe.run import probe as probe_server
    from agent_rl.engine.route_probe.run import table
    from agent_rl.models.spec import read_moe_spec
    from agent_rl.utils.run_files import write_json

    model_spec = read_moe_spec(model) if model else None
    headers = EngineConfig(urls=(url,), api_key_env=api_key_env).headers
    report = run_async(probe_server(url, model_spec, retract=retract, headers=headers))
    Console().print(table(report))
    typer.echo(report.line())
    if json is not None:
        write_json(json, report.as_json())
    raise typer.Exit(1 if report.failed else 0)
