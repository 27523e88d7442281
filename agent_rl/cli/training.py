"""Commands that take a config: ``train``, ``sft``, ``eval``, ``doctor``, ``serve``, ``rollout``, ``plan``, ``dry-run``,
``setup``."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.cli.common import RESUMABLE, ConfigPath, Overrides, load, run_async

if TYPE_CHECKING:
    from agent_rl.config import RunConfig

app = typer.Typer()


class ToolCalls(StrEnum):
    """How a model at an endpoint calls tools."""

    TEXT = "text"
    NATIVE = "native"


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train from a config. A killed run resumes from its last checkpoint.

    Exit code 3: the guard saved a checkpoint and stopped the run.
    """
    from agent_rl.controller import preflight
    from agent_rl.controller.fork import train_with_forks
    from agent_rl.controller.train import train as run
    from agent_rl.planner.suggestions import check_expert_slots

    def train_once(loaded: RunConfig) -> None:
        checked = preflight.run(loaded, "train")
        check_expert_slots(checked.config, checked.model_spec)
        run_async(run(checked), RESUMABLE)

    train_with_forks(load(config, overrides), train_once, typer.echo)


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None) -> None:
    """Fine-tune the config's model on the rows and episodes of sft.data. A killed run resumes from its last checkpoint.

    Exit code 3: the guard saved a checkpoint and stopped the run.
    """
    from agent_rl.commands.sft import prepare
    from agent_rl.controller.sft import train_sft
    from sandbox import printable

    checked, data, lines = prepare(load(config, overrides))
    typer.echo("\n".join(map(printable, lines)))
    run_async(train_sft(checked, data), RESUMABLE)


@app.command("eval")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    policy: Annotated[
        str,
        typer.Option(
            help="engine: the config's model. gold: the reference fix. noop: submits at once. replay:TRAJECTORIES: "
            "recorded turns. http(s)://HOST/v1: an OpenAI-compatible endpoint, with --model."
        ),
    ] = "engine",
    model: Annotated[str | None, typer.Option(help="Model name at the endpoint.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Number of tasks. Default: eval.tasks.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task; more than one gives Pass@k.")] = 1,
    split: Annotated[
        str | None, typer.Option(help="Split to evaluate on. Default: eval.split, or train with replay:.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Use greedy decoding.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory. Default: in the run's. An unfinished evaluation in it is resumed."),
    ] = None,
    tool_calls: Annotated[
        ToolCalls,
        typer.Option(help="Tool calls at an endpoint. text: in the message. native: the API's tools and tool_calls."),
    ] = ToolCalls.TEXT,
    request: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Field of every request to an endpoint; null removes it."),
    ] = None,
    harness: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Agent program on this machine that drives the episodes.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML list of prices per million tokens, for the report's cost.")
    ] = None,
) -> None:
    """Measure Pass@1 on a split of the config's environment. A killed evaluation resumes.

    Compare evaluations with agent-rl eval compare A B.
    Exit code 1: no episode could be graded; the last line gives the reason.
    """
    from agent_rl.commands.eval import EvalOptions, run_evaluation
    from agent_rl.commands.policy import PolicyChoice, request_fields, with_harness
    from agent_rl.controller.run_models import resolve_models

    fields, native = request_fields(request or ()), tool_calls is ToolCalls.NATIVE
    options = EvalOptions(PolicyChoice(policy, model, greedy, native, fields), tasks, samples, split, out, prices)
    loaded = load(config, overrides)
    if policy == "engine":
        loaded = resolve_models(loaded)  # blocks, so before run_async handles Ctrl-C
    loaded = with_harness(loaded, harness, options.policy)
    if (failure := run_async(run_evaluation(loaded, options), RESUMABLE)) is not None:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("eval compare")
def eval_compare(
    evaluations: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...", help="Directory, results.jsonl or report.json of an evaluation, or RUN:step-N/sampled."
        ),
    ],
    points: Annotated[
        float, typer.Option(min=0.1, max=100.0, help="Percentage points for the power calculation.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    pool: Annotated[
        bool, typer.Option("--pool", help="Count evaluations of one model with equal settings as one with all samples.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Print the resolved samples of each task, most different tasks first.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare evaluations task by task: Pass@k with intervals, effort, and the differences to the first.

    Tasks that one evaluation did not grade are excluded and listed.
    """
    from agent_rl.commands.eval_compare import run_eval_compare

    run_eval_compare(evaluations, points=points, seed=seed, pooled=pool, by_task=tasks, json=json)


@app.command("eval diff")
def eval_diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Directory of an evaluation, or RUN:step-N/sampled.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Second evaluation, or the same.")],
    task: Annotated[str, typer.Argument(metavar="TASK", help="Task id.")],
    sample: Annotated[int, typer.Option(min=0, help="Number of the sample in A.")] = 0,
    other: Annotated[int | None, typer.Option(min=0, help="Number of the sample in B. Default: that in A.")] = None,
) -> None:
    """Compare two episodes of a task: outcomes, where they first differ, calls side by side, and their patches."""
    from rich.console import Console

    from agent_rl.commands.eval_diff import run_eval_diff

    samples = (sample, sample if other is None else other)
    run_eval_diff((first, second), task, samples, Console(highlight=False))


@app.command("eval submission")
def eval_submission(
    evaluation: Annotated[Path, typer.Argument(metavar="EVALUATION", help="Directory of a finished evaluation.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory, by convention DATE_MODEL.")],
    sample: Annotated[int, typer.Option(min=0, help="Number of the sample of each task.")] = 0,
) -> None:
    """Write an evaluation as a submission to SWE-bench's leaderboard: predictions, trajectories, logs and metadata."""
    from agent_rl.commands.eval_submission import run_eval_submission

    run_eval_submission(evaluation, out, sample=sample)


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="Config, as for train. Default: check the installation only."),
    ] = None,
    overrides: Overrides = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Number of tasks to check. Default: all.")] = None,
    split: Annotated[str, typer.Option(help="Split to check.")] = "train",
    repeats: Annotated[int, typer.Option(min=1, help="Runs per task, to detect flaky tests.")] = 3,
    audit: Annotated[bool, typer.Option(help="Check for leaked solutions and reward hacks, where supported.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory. Default: in the run's directory. An unfinished check in it is resumed."),
    ] = None,
) -> None:
    """Check a config's components and tasks: verify that the reference fix passes and nothing else does.

    Without a config: list what this machine lacks, with the command that installs it. With a config: also write
    quarantine.json, the tasks to skip, for the config key env.quarantine. Exit code 1: a check failed.
    """
    from agent_rl.commands.doctor import run_doctor
    from agent_rl.commands.health import check_installation

    if config is None:
        raise typer.Exit(0 if run_async(check_installation()) else 1)
    loaded = load(config, overrides)
    work = run_doctor(loaded, tasks=tasks, split=split, repeats=repeats, audit=audit, out=out)
    if not run_async(work, RESUMABLE):
        raise typer.Exit(1)


@app.command()
def serve(
    config: ConfigPath,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: a free port.")] = 0,
    record: Annotated[
        Path | None,
        typer.Option(help="Directory for the trajectory, for view and show; prints branches and changed replies."),
    ] = None,
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="Serve the model of a chat endpoint, with --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name at the endpoint.")] = None,
) -> None:
    """Serve a model to agent programs, as rollout.harness does: the config's, or one behind a chat endpoint.

    Prints the environment variables that a program needs. Trains nothing. Ctrl-C stops it.
    """
    from agent_rl.commands.serve import run_serve, upstream_endpoint

    chat = upstream_endpoint(upstream, model)
    run_async(run_serve(load(config, overrides), port=port, record=record, upstream=chat))


@app.command()
def rollout(
    config: ConfigPath,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks; each gets group_size episodes.")] = 4,
    split: Annotated[str, typer.Option(help="Split of the tasks.")] = "train",
) -> None:
    """Roll out tasks with the config's model and write the trajectories, without training."""
    from agent_rl.commands.rollout import run_rollout
    from agent_rl.controller import preflight

    checked = preflight.run(load(config, overrides), "rollout")
    run_async(run_rollout(checked, tasks=tasks, split=split))


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Mean tokens per trajectory, for totals per step. Default: the maximum."),
    ] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Also predict seconds per step, hours and GPU hours, with all assumptions.")
    ] = False,
    assume: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Replace an assumption of --time; repeatable.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option("--from", help="Run whose metrics replace assumptions of --time and correct its phases."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory, disk space, network traffic and, with --time, the duration of a run on the config's hardware.

    Exit code 1: the run does not fit, or the layout is not supported; the last line gives the reason and a remedy.
    """
    from agent_rl.planner.recorded import predict_time
    from agent_rl.planner.report import print_plan
    from agent_rl.planner.suggestions import make_plan

    loaded = _load_rl(config, overrides)
    run_plan = make_plan(loaded, tokens=tokens)
    if time or assume or measured:
        run_plan = predict_time(run_plan, loaded, tokens=tokens, settings=assume or (), run=measured)
    print_plan(run_plan, json=json)
    if (refusal := run_plan.refusal()) is not None:
        print(f"error: {refusal}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("dry-run")
def dry_run(
    config: ConfigPath,
    overrides: Overrides = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Ranks to simulate. Default: the first rank, and the last of a pipeline."),
    ] = None,
    skew: Annotated[float, typer.Option(help="Load of a rank's experts, relative to the mean rank.")] = 1.0,
    layers: Annotated[
        str,
        typer.Option(help="Layers per model chunk to simulate: one number, two numbers to extrapolate from, or all."),
    ] = "2,4",
) -> None:
    """Dry-run the trainer on a simulated GPU and report memory, compute and traffic.

    Exit code 1: a call would fail on a GPU; the last lines name it for each rank. docs/how-to/plan-a-run.md lists the
    limits.
    """
    from agent_rl.dryrun.report import print_dry_run
    from agent_rl.dryrun.run import dry_run as dry_run_ranks

    loaded = _load_rl(config, overrides)
    results = dry_run_ranks(loaded, ranks=rank or (), skew=skew, layers=layers)
    print_dry_run(loaded, results)
    faults = [f"error: rank {result.rank}: {result.fault}" for result in results if result.fault is not None]
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        raise typer.Exit(1)


def _load_rl(config: Path, overrides: list[str] | None) -> RunConfig:
    """As :func:`load`. Raises UserError for a config of `agent-rl sft`."""
    from agent_rl.errors import UserError

    loaded = load(config, overrides)
    if loaded.sft is not None:
        raise UserError("the config has the section sft, and this command describes RL: add the override sft=null")
    return loaded


@app.command()
def setup(config: ConfigPath, overrides: Overrides = None) -> None:
    """Create what a config needs and is missing: the sandbox image and verified tasks."""
    from agent_rl.commands.setup import prepare

    run_async(prepare(load(config, overrides)), RESUMABLE)
    typer.echo(f"next: agent-rl train {shlex.quote(str(config))}")


@app.command("launch slurm")
def launch_slurm(
    config: ConfigPath,
    overrides: Overrides = None,
    time: Annotated[str, typer.Option(help="Time limit of the job, in Slurm's form.")] = "24:00:00",
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: what the config's GPUs need.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Option of sbatch, such as --partition=gpu. Repeatable.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="COMMAND", help="Shell command before the run, such as 'module load cuda'. Repeatable."),
    ] = None,
    grace: Annotated[int, typer.Option(min=60, help="Seconds before the limit at which the run is stopped.")] = 300,
    requeues: Annotated[int, typer.Option(min=0, help="How often the job may requeue itself.")] = 20,
    out: Annotated[Path | None, typer.Option(help="The script. Default: NAME.sbatch, with the run's name.")] = None,
) -> None:
    """Write a batch script that trains on the nodes of a Slurm job; submit it with sbatch.

    A job that is preempted or reaches its time limit requeues itself, and the run resumes.
    """
    from agent_rl.commands.launch import SlurmJob, slurm_script

    job = SlurmJob(time, nodes, tuple(option or ()), tuple(setup or ()), grace, requeues)
    loaded = load(config, overrides)
    path = out or Path(f"{loaded.name}.sbatch")
    named = str(config.absolute()) if config.is_file() else str(config)
    path.write_text(slurm_script(loaded, [named, *(overrides or ())], job))
    typer.echo(f"next: sbatch {path}")


@app.command("launch k8s")
def launch_k8s(
    config: ConfigPath,
    image: Annotated[str, typer.Option(help="Image with agent-rl, its engine environment and Ray.")],
    claim: Annotated[str, typer.Option(metavar="NAME:PATH", help="PersistentVolumeClaim, and where pods mount it.")],
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of a pod.")],
    memory: Annotated[str, typer.Option(help="Memory of a pod, such as 900Gi.")],
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Pods. Default: what the config's GPUs need.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The manifests. Default: NAME.k8s.yaml, with the run's name.")
    ] = None,
) -> None:
    """Write manifests of a Ray cluster for Kubernetes with KubeRay; apply them with kubectl. Never run on a cluster."""
    from agent_rl.commands.launch_k8s import Pods, manifests, run_command

    loaded = load(config, overrides)
    path = out or Path(f"{loaded.name}.k8s.yaml")
    path.write_text(manifests(loaded, Pods(image, claim, cpus, memory, nodes)))
    typer.echo(f"next: kubectl apply -f {path}\nthen: {run_command(loaded)}")
