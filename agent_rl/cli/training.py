"""Commands about a config: train, evaluate, examine, serve, roll out, plan, rehearse, set up."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.cli.arguments import ConfigPath, Overrides
from agent_rl.cli.running import RESUMES, run_async

if TYPE_CHECKING:
    from agent_rl.config import RunConfig

app = typer.Typer()


class ToolCalls(StrEnum):
    """How a chat endpoint's model calls tools."""

    TEXT = "text"
    NATIVE = "native"


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train from a config; a run that was killed goes on from its last checkpoint.

    Exit code 3: the run's guard saved a checkpoint and stopped it.
    """
    from agent_rl.config.loader import load_config
    from agent_rl.controller.preflight import check_trainer

    loaded = load_config(config, overrides or ())
    check_trainer()
    loaded = _with_models(loaded)
    from agent_rl.controller.train import train as run
    from agent_rl.errors import ConfigError
    from agent_rl.planner.suggestions import slots_refusal

    if (refusal := slots_refusal(loaded)) is not None:
        raise ConfigError(refusal)

    run_async(run(loaded), RESUMES)


@app.command("eval")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    policy: Annotated[
        str,
        typer.Option(
            help="engine; gold (applies the true fix); noop (submits at once); replay:TRAJECTORIES (repeats the "
            "recorded turns); or an OpenAI-compatible endpoint, http(s)://HOST/v1 with --model."
        ),
    ] = "engine",
    model: Annotated[str | None, typer.Option(help="The model's name at an endpoint.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks to evaluate; the config's number by default.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes a task; more than one gives Pass@k.")] = 1,
    split: Annotated[
        str | None, typer.Option(help="Split to evaluate on; the config's by default, train of a recording.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy decoding instead of sampling.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the evaluation; by default in the run's own. Resumed if begun.")
    ] = None,
    tool_calls: Annotated[
        ToolCalls, typer.Option(help="At an endpoint: calls as text in its messages, or its own tools and tool_calls.")
    ] = ToolCalls.TEXT,
    request: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="At an endpoint: a field of every request; null leaves it out."),
    ] = None,
    harness: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="An agent program on this machine that drives the episodes.")
    ] = None,
) -> None:
    """Evaluate Pass@1 on a split of the config's environment; one that was killed goes on where it stopped.

    Two evaluations are compared by agent-rl eval compare A B.
    Exit code 1: nothing could be graded; the last line says why.
    """
    from agent_rl.commands.eval import EvalOptions, run_evaluation
    from agent_rl.commands.policy import PolicyChoice, request_fields, with_harness
    from agent_rl.config.loader import load_config

    fields, native = request_fields(request or ()), tool_calls is ToolCalls.NATIVE
    options = EvalOptions(PolicyChoice(policy, model, greedy, native, fields), tasks, samples, split, out)
    loaded = load_config(config, overrides or ())
    loaded = _with_models(loaded) if policy == "engine" else loaded
    loaded = with_harness(loaded, harness, options.policy)
    if (failure := run_async(run_evaluation(loaded, options), RESUMES)) is not None:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("eval compare")
def eval_compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="An evaluation's directory or results.jsonl or report.json; or RUN:step-N/sampled."
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another, of the same tasks.")],
    points: Annotated[
        float,
        typer.Option(min=0.1, max=100.0, help="The difference, in points, to say the needed number of tasks for."),
    ] = 3.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare two evaluations task by task: the difference in Pass@1 with its interval, and whether it may be chance.

    Tasks that only one of them graded are left out and named.
    """
    from agent_rl.commands.eval_compare import run_eval_compare

    run_eval_compare(first, second, points=points, seed=seed, json=json)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="As for train; without one the parts alone are looked at.")
    ] = None,
    overrides: Overrides = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks to examine; all of the split by default.")] = None,
    split: Annotated[str, typer.Option(help="Split to examine.")] = "train",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each task, to find flaky ones.")] = 3,
    audit: Annotated[bool, typer.Option(help="Look for leaks and try hacks, where the environment can.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the examination; by default in the run's own. Resumed if begun.")
    ] = None,
) -> None:
    """Examine a config's parts and tasks: does the true fix win, does nothing else? Exit code 1 if something is wrong.

    Without a config: what this machine lacks for a run, each with the command that mends it. With one it also writes
    quarantine.json, the list of tasks to leave out, for the config key env.quarantine.
    """
    from agent_rl.commands.doctor import run_doctor
    from agent_rl.commands.health import check_installation
    from agent_rl.config.loader import load_config

    if config is None:
        raise typer.Exit(0 if run_async(check_installation()) else 1)
    loaded = load_config(config, overrides or ())
    work = run_doctor(loaded, tasks=tasks, split=split, repeats=repeats, audit=audit, out=out)
    if not run_async(work, RESUMES):
        raise typer.Exit(1)


@app.command()
def serve(
    config: ConfigPath,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 takes a free one.")] = 0,
) -> None:
    """Serve the config's model to agent programs, as rollout.harness does, until interrupted.

    Prints the environment variables that a program needs. Nothing is trained or kept.
    """
    from agent_rl.commands.serve import run_serve
    from agent_rl.config.loader import load_config

    run_async(run_serve(_with_models(load_config(config, overrides or ())), port=port))


@app.command()
def rollout(
    config: ConfigPath,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to roll out, each group_size times.")] = 4,
    split: Annotated[str, typer.Option(help="Split to take them from.")] = "train",
) -> None:
    """Roll out some tasks with the config's model and write their trajectories, without training."""
    from agent_rl.commands.rollout import run_rollout
    from agent_rl.config.loader import load_config

    run_async(run_rollout(_with_models(load_config(config, overrides or ())), tasks=tasks, split=split))


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Mean tokens of a trajectory, for what adds up over a step; the most by default."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what memory, disk and traffic a run would take on the hardware its config names, before it is started.

    Exit code 1: something does not fit, or the layout is not possible; the last line says what, and what would help.
    """
    from agent_rl.config.loader import load_config
    from agent_rl.planner.report import print_plan
    from agent_rl.planner.suggestions import make_plan

    made = make_plan(load_config(config, overrides or ()), tokens=tokens)
    print_plan(made, json=json)
    if (refusal := made.refusal()) is not None:
        print(f"error: {refusal}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def rehearse(
    config: ConfigPath,
    overrides: Overrides = None,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Ranks to rehearse; the first, and the last of a pipeline.")
    ] = None,
    skew: Annotated[float, typer.Option(help="How often a rank's experts are chosen, over the mean rank's.")] = 1.0,
    layers: Annotated[
        str,
        typer.Option(help="Layers of each model chunk: one number; two, from which all of the model's follow; or all."),
    ] = "2,4",
) -> None:
    """Run the trainer's own code for a rank on a GPU that is not there: what it would hold, compute and send.

    Exit code 1: a call would fail on a GPU; the last lines name it by rank. docs/gpu.md says what this can't see.
    """
    from agent_rl.config.loader import load_config
    from agent_rl.dryrun.report import print_rehearsal
    from agent_rl.dryrun.run import rehearse as rehearse_ranks

    loaded = load_config(config, overrides or ())
    results = rehearse_ranks(loaded, ranks=rank or (), skew=skew, layers=layers)
    print_rehearsal(loaded, results)
    faults = [f"error: rank {result.rank}: {result.fault}" for result in results if result.fault is not None]
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def setup(config: ConfigPath, overrides: Overrides = None) -> None:
    """Make what a config needs and is not there yet: sandbox image, verified tasks."""
    from agent_rl.commands.setup import prepare
    from agent_rl.config.loader import load_config

    run_async(prepare(load_config(config, overrides or ())), RESUMES)
    typer.echo(f"next: agent-rl train {shlex.quote(str(config))}")


def _with_models(config: RunConfig) -> RunConfig:
    """``config`` with the models that it names by a hub id fetched, before anything listens for Ctrl-C."""
    from agent_rl.models.hub import with_models

    return with_models(config)
