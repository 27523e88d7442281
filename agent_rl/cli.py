"""The command line. Heavy imports come after the arguments are parsed, so that ``--help`` answers at once."""

from __future__ import annotations

import errno
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from agent_rl import __version__

if TYPE_CHECKING:
    from agent_rl.config import RunConfig


class Commands(TyperGroup):
    """Commands of one word or of two: `eval compare` beside `eval CONFIG`, whose own arguments begin at the same
    place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with, its name, and the arguments after it."""
        name = " ".join(args[:2])
        return (name, self.commands[name], args[2:]) if name in self.commands else super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="List and show configs.")
envs_app = typer.Typer(no_args_is_help=True, help="List, write and check environments.")
model_app = typer.Typer(no_args_is_help=True, help="Make a starting model.")
r3_app = typer.Typer(no_args_is_help=True, help="Probe, compare, check and balance routing replay.")
tasks_app = typer.Typer(
    no_args_is_help=True,
    help="Make tasks from your own code: from its commits, from a package's releases, or by putting bugs into it.\n\n"
    "Each candidate's tests run before and after the fix, three times each, in boxes without a network; what is flaky, "
    "leaks or can be hacked falls. OUT/tasks.jsonl has the healthy tasks of all three commands, OUT/report.json says "
    "why the others fell. A command that was stopped goes on where it was.",
)
app.add_typer(config_app, name="config")
app.add_typer(envs_app, name="envs")
app.add_typer(model_app, name="model")
app.add_typer(r3_app, name="r3")
app.add_typer(tasks_app, name="tasks")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a name of `agent-rl config list`.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Overrides of the config.")
]


class ToolCalls(StrEnum):
    """How a chat endpoint's model calls tools."""

    TEXT = "text"
    NATIVE = "native"


class Part(StrEnum):
    """What `agent-rl install` installs."""

    ENGINE = "engine"
    TRAINER = "trainer"
    SANDBOX = "sandbox"


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
    # Last, so that a folder of the user's never hides an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train from a config; a run that was killed goes on from its last checkpoint.

    Exit code 3: the run's guard saved a checkpoint and stopped it.
    """
    from agent_rl.config_files import load_config
    from agent_rl.controller.preflight import check_trainer

    loaded = load_config(config, overrides or ())
    check_trainer()
    loaded = _with_models(loaded)
    from agent_rl.capacity.advice import slots_refusal
    from agent_rl.controller.train import train as run
    from agent_rl.errors import ConfigError

    if (refusal := slots_refusal(loaded)) is not None:
        raise ConfigError(refusal)

    _run_async(run(loaded), RESUMES)


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
        Path | None, typer.Option(help="Folder of the evaluation; by default in the run's own. Resumed if begun.")
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
    from agent_rl.config_files import load_config

    fields, native = request_fields(request or ()), tool_calls is ToolCalls.NATIVE
    options = EvalOptions(PolicyChoice(policy, model, greedy, native, fields), tasks, samples, split, out)
    loaded = load_config(config, overrides or ())
    loaded = _with_models(loaded) if policy == "engine" else loaded
    loaded = with_harness(loaded, harness, options.policy)
    if (failure := _run_async(run_evaluation(loaded, options), RESUMES)) is not None:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("eval compare")
def eval_compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="An evaluation's folder or results.jsonl or report.json; or RUN:step-N/sampled."
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
        Path | None, typer.Option(help="Folder of the examination; by default in the run's own. Resumed if begun.")
    ] = None,
) -> None:
    """Examine a config's parts and tasks: does the true fix win, does nothing else? Exit code 1 if something is wrong.

    Without a config: what this machine lacks for a run, each with the command that mends it. With one it also writes
    quarantine.json, the list of tasks to leave out, for the config key env.quarantine.
    """
    from agent_rl.commands.doctor import run_doctor
    from agent_rl.commands.health import check_installation
    from agent_rl.config_files import load_config

    if config is None:
        raise typer.Exit(0 if _run_async(check_installation()) else 1)
    loaded = load_config(config, overrides or ())
    work = run_doctor(loaded, tasks=tasks, split=split, repeats=repeats, audit=audit, out=out)
    if not _run_async(work, RESUMES):
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
    from agent_rl.config_files import load_config

    _run_async(run_serve(_with_models(load_config(config, overrides or ())), port=port))


@app.command()
def rollout(
    config: ConfigPath,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to roll out, each group_size times.")] = 4,
    split: Annotated[str, typer.Option(help="Split to take them from.")] = "train",
) -> None:
    """Roll out some tasks with the config's model and write their trajectories, without training."""
    from agent_rl.commands.rollout import run_rollout
    from agent_rl.config_files import load_config

    _run_async(run_rollout(_with_models(load_config(config, overrides or ())), tasks=tasks, split=split))


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
    from agent_rl.capacity.advice import make_plan
    from agent_rl.capacity.report import print_plan
    from agent_rl.config_files import load_config

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
        str, typer.Option(help="Layers of each model chunk: one number, or two, which say what all take; or all.")
    ] = "2,4",
) -> None:
    """Run the trainer's own code for a rank on a GPU that is not there: what it would hold, compute and send.

    Exit code 1: a call would fail on a GPU; the last line names it. docs/gpu.md says what this can't see.
    """
    from agent_rl.config_files import load_config
    from agent_rl.rehearsal.report import print_rehearsal
    from agent_rl.rehearsal.run import rehearse as rehearse_ranks

    loaded = load_config(config, overrides or ())
    results = rehearse_ranks(loaded, ranks=rank or (), skew=skew, layers=layers)
    print_rehearsal(loaded, results)
    for result in results:
        if result.fault is not None:
            print(f"error: rank {result.rank}: {result.fault}", file=sys.stderr)
            raise typer.Exit(1)


@app.command()
def setup(config: ConfigPath, overrides: Overrides = None) -> None:
    """Make what a config needs and is not there yet: sandbox image, verified tasks."""
    from agent_rl.commands.setup import prepare
    from agent_rl.config_files import load_config

    _run_async(prepare(load_config(config, overrides or ())), RESUMES)
    typer.echo(f"next: agent-rl train {shlex.quote(str(config))}")


@app.command("runs")
def runs_list(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs or evaluations, or that hold some; by default runs.")
    ] = None,
) -> None:
    """List runs and evaluations: steps, Pass@1, state, and how often the guard spoke."""
    from rich.console import Console

    from agent_rl.commands.runs import list_runs

    list_runs(folders or [Path("runs")], Console())


@app.command()
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or evaluations; several are compared.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 is one that is free.")] = 8642,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the page instead: OUT.html, one file that opens by itself, or a folder for a server."),
    ] = None,
    trajectories: Annotated[
        int, typer.Option(min=0, help="Trajectories of each run in an export, the largest gaps first.")
    ] = 200,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Look at runs in a browser: curves, trajectories, and each token with its gap and its experts.

    The page is served to this machine alone, and follows a run that is going on. Ctrl-C stops it.
    """
    from agent_rl.commands.view import run_view

    run_view(runs, port=port, out=export, trajectories=trajectories, open_browser=not no_open)


@app.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|FILE", help="A run's or an evaluation's folder, or a file with trajectories.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Step of a run; its last by default.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="Only this sample of a task, counted from 0.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List them, also where there is only one.")] = False,
) -> None:
    """Show what an agent did, turn by turn: what it wrote, called and saw, and what came of it. Lists where several
    were found."""
    from rich.console import Console

    from agent_rl.commands.show import show as show_episodes

    show_episodes(path, step=step, task=task, sample=sample, as_list=as_list, console=Console(highlight=False))


@app.command()
def ledger(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Prove from a run's files that every task it drew was trained on, discarded, dropped or left out exactly once."""
    from rich.console import Console

    from agent_rl.commands.ledger import ledger as show_ledger

    show_ledger(run, Console(highlight=False))


@config_app.command("list")
def config_list() -> None:
    """List the configs that come with the package and go by their name."""
    from agent_rl.packaged import shipped_configs

    for name, summary in shipped_configs().items():
        typer.echo(f"{name:<18} {summary}")


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print a config as it is resolved, defaults included. Fails where its parallel layout can't be trained in."""
    import yaml

    from agent_rl.config_files import load_config
    from agent_rl.train.layouts import check_layout

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
    folder: Annotated[Path, typer.Option(help="Where to write it.")] = Path("."),
) -> None:
    """Write a working environment with its test and config, to start your own from."""
    from envs.new_project import write_template

    typer.echo(write_template(name, folder).next_steps())


@app.command()
def install(
    parts: Annotated[list[Part], typer.Argument(help="What to install.")],
) -> None:
    """Install what pip leaves out: the engine's own environment, the trainer's packages, a sandbox.

    The engine environment is the folder .venv-engine beside the one that agent-rl is installed in.
    """
    from agent_rl.bootstrap import main as bootstrap

    steps = {Part.ENGINE: "engine", Part.TRAINER: "trainer-packages", Part.SANDBOX: "sandbox"}
    raise typer.Exit(bootstrap([steps[part] for part in parts]))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The project's folder; made where it is missing.")] = Path("."),
) -> None:
    """Start a project: a folder with a first environment, its test and a config that trains on it."""
    from envs.new_project import FIRST, write_template

    typer.echo(write_template(FIRST, folder).next_steps())


@envs_app.command("check")
def envs_check(
    name: Annotated[str, typer.Argument(help="A registered name or package.module:Class.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[option=value]...", help="Its options.")] = None,
    splits: Annotated[str, typer.Option(help="Its splits, separated by commas.")] = "train,heldout",
) -> None:
    """Check that an environment keeps every promise the training loop relies on. Exit code 1 if one is broken."""
    from agent_rl.commands.envs_check import run_check

    if not _run_async(run_check(name, options or (), splits.split(","))):
        raise typer.Exit(1)


@model_app.command("init")
def model_init(
    out: Annotated[Path, typer.Argument(help="Folder to make.")] = Path(".cache/models/tiny-moe"),
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Warm it up anew on recorded demonstrations (half an hour).")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a warm-up from scratch.")] = 0,
) -> None:
    """Make the tiny Qwen3-MoE that the quickstart starts from, its tokenizer and chat template."""
    from agent_rl.model.shipped import install_model

    if not from_scratch:
        typer.echo(f"{out}: {'made' if install_model(out) else 'there already'}")
        return
    from agent_rl.commands.setup import warm_up
    from agent_rl.controller.preflight import check_trainer

    check_trainer()
    _run_async(warm_up(out, seed))


@r3_app.command()
def compare(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A YAML config, or a finished run's folder.")],
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to roll out, each group_size times.")] = 16,
    split: Annotated[str, typer.Option(help="Split to take them from.")] = "train",
    out: Annotated[Path | None, typer.Option(help="Folder for what is found; by default in the run's own.")] = None,
    trajectories: Annotated[
        Path | None, typer.Option(help="Folder with trajectories (an earlier --out, or a run): roll none out anew.")
    ] = None,
) -> None:
    """Roll out once, run the trainer on it with and without replay, and report how far it is from the engine."""
    from agent_rl.commands.compare import run_compare
    from agent_rl.controller.preflight import check_trainer

    check_trainer()
    work = run_compare(source, overrides or (), tasks=tasks, split=split, out=out, trajectories=trajectories)
    _run_async(work)


@r3_app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a trace (r3.trace in the config).")],
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
            folder, forward_verify=require_forward_verify, shard_identity=require_shard_identity, json=json
        )
    except TraceError as error:
        raise typer.Exit(_complain(str(error))) from None
    raise typer.Exit(0 if holds else 1)


@r3_app.command()
def balance(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of `agent-rl rollout`.")],
    expert_ranks: Annotated[
        str, typer.Option(metavar="R,...", help="Expert-parallel sizes to look at (train.parallel.expert).")
    ] = "2,4,8",
    slots: Annotated[int, typer.Option(min=1, help="Experts that a rank may borrow (train.balance.slots).")] = 4,
    ranks_per_machine: Annotated[
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
    question = Question(slots, ranks_per_machine, tokens, steps)
    run_balance(run, [int(part) for part in expert_ranks.split(",")], question, json)


@r3_app.command()
def probe(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, as in engine.urls.")],
    model: Annotated[
        Path | None, typer.Option(help="Folder with the model's config.json, where the server's own is not here.")
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
    from agent_rl.engine.probe.run import ProbeReport, table
    from agent_rl.engine.probe.run import probe as probe_server
    from agent_rl.model_facts import read_routed_facts
    from agent_rl.observe.files import write_json

    facts = read_routed_facts(model) if model else None
    headers = EngineConfig(api_key_env=api_key_env).headers
    report = _run_async(probe_server(url, facts, retract=retract, headers=headers))
    assert isinstance(report, ProbeReport)
    Console().print(table(report))
    typer.echo(report.line())
    if json is not None:
        write_json(json, report.as_json())
    raise typer.Exit(1 if report.failed else 0)


def _with_models(config: RunConfig) -> RunConfig:
    """``config`` with the models that it names by a hub id fetched, before anything listens for Ctrl-C."""
    from agent_rl.model.hub import with_models

    return with_models(config)


OutFolder = Annotated[Path, typer.Option("--out", help="Folder of the tasks; a build in it is gone on with.")]
TaskCount = Annotated[int | None, typer.Option("--tasks", min=1, help="Stop at so many healthy tasks of this source.")]
Tried = Annotated[int | None, typer.Option("--candidates", min=1, help="Try so many candidates at most.")]
Jobs = Annotated[int, typer.Option(min=1, help="Candidates at once.")]
TestSeconds = Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that one run of the tests may take.")]
DiskMb = Annotated[int, typer.Option(min=64, help="MiB that OUT may have, installed packages included.")]
MemoryMb = Annotated[int, typer.Option(min=128, help="MiB of memory of a box.")]
BackendName = Annotated[str, typer.Option(help="The sandbox where the tests run.")]
WriterUrl = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible endpoint, http(s)://HOST/v1, that writes the issues.")
]
WriterModel = Annotated[str | None, typer.Option(help="The model's name at --writer.")]


@tasks_app.command("from-git")
def tasks_from_git(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Folder of a git repository.")],
    out: OutFolder = Path("tasks"),
    commits: Annotated[int, typer.Option(min=1, help="Look at so many of the newest commits.")] = 500,
    tasks: TaskCount = None,
    candidates: Tried = None,
    jobs: Jobs = 2,
    timeout: TestSeconds = 120.0,
    disk_mb: DiskMb = 16384,
    memory_mb: MemoryMb = 2048,
    backend: BackendName = "bubblewrap",
    writer: WriterUrl = None,
    writer_model: WriterModel = None,
) -> None:
    """Make tasks of the commits that change code and its tests; the hidden tests are those of the commit.

    The issue is the commit's message, or written by the model at --writer; one that gives the fix away is not used.
    """
    from agent_rl.commands.tasks import Bounds, BuildOptions, build, from_git

    options = BuildOptions(
        out, Bounds(tasks, candidates, jobs, disk_mb), timeout, backend, memory_mb, writer, writer_model
    )
    _run_async(build(from_git(repo, commits), options), RESUMES)


@tasks_app.command("from-releases")
def tasks_from_releases(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="A package of the index that pip uses.")],
    old: Annotated[str | None, typer.Argument(metavar="[OLD", help="The release that the agent finds.")] = None,
    new: Annotated[str | None, typer.Argument(metavar="NEW]", help="The release whose tests it must pass.")] = None,
    out: OutFolder = Path("tasks"),
    tasks: TaskCount = None,
    candidates: Tried = None,
    jobs: Jobs = 2,
    timeout: TestSeconds = 120.0,
    disk_mb: DiskMb = 16384,
    memory_mb: MemoryMb = 2048,
    backend: BackendName = "bubblewrap",
    writer: WriterUrl = None,
    writer_model: WriterModel = None,
) -> None:
    """Make tasks of the steps from one release of a package to the next, all of them or the one that is named.

    The source releases are kept in OUT/sdists; `agent-rl tasks inject` takes them, too. None of their code is run
    outside a box.
    """
    from agent_rl.commands.tasks import Bounds, BuildOptions, build, from_releases

    options = BuildOptions(
        out, Bounds(tasks, candidates, jobs, disk_mb), timeout, backend, memory_mb, writer, writer_model
    )
    _run_async(build(from_releases(package, old, new), options), RESUMES)


@tasks_app.command("inject")
def tasks_inject(
    repo: Annotated[
        Path, typer.Argument(metavar="REPO", help="A git repository (its newest commit), a folder, or a .tar.gz.")
    ],
    out: OutFolder = Path("tasks"),
    tasks: TaskCount = None,
    candidates: Tried = None,
    seed: Annotated[int, typer.Option(min=0, help="Which bugs are put where, and in which order.")] = 0,
    jobs: Jobs = 2,
    timeout: TestSeconds = 120.0,
    disk_mb: DiskMb = 16384,
    memory_mb: MemoryMb = 2048,
    backend: BackendName = "bubblewrap",
    writer: WriterUrl = None,
    writer_model: WriterModel = None,
) -> None:
    """Put one bug at a time into functions that tests run; kept where a test notices it and no other change would do.

    The bugs are of the families of the environment mini. The test files that notice are hidden from the agent.
    """
    from agent_rl.commands.tasks import Bounds, BuildOptions, build, inject

    options = BuildOptions(
        out, Bounds(tasks, candidates, jobs, disk_mb), timeout, backend, memory_mb, writer, writer_model
    )
    _run_async(build(inject(repo, seed), options), RESUMES)


class Stopped(Exception):
    """The user stopped the command; everything it had started is cleaned up. The message says what starting it again
    does."""


RESUMES = "start again to resume"
BEGINS_ANEW = "what it did is not kept; started again it begins anew"


def _run_async(work: object, stopped: str = BEGINS_ANEW) -> object:
    """Run a coroutine and return what it does; Ctrl-C and SIGTERM cancel it, and it cleans up after itself."""
    import asyncio
    from collections.abc import Coroutine

    from agent_rl.aio import allow_many_files, cancel_on_signals

    assert isinstance(work, Coroutine)
    allow_many_files()

    async def supervised() -> object:
        cancel_on_signals()
        return await work

    try:
        return asyncio.run(supervised())
    except (asyncio.CancelledError, KeyboardInterrupt):
        # Not KeyboardInterrupt: typer would answer that one itself, without a word.
        raise Stopped(stopped) from None


def main() -> None:
    """Entry point: one clear line and exit code 2 for what the user can mend, a traceback for what only we can."""
    from agent_rl.errors import EngineError, GuardStop, RolloutFailed, TrainerError, UserError, WeightSyncError
    from envs import EnvsError
    from sandbox import SandboxError

    try:
        app()
    except (UserError, EngineError, WeightSyncError, TrainerError, RolloutFailed, EnvsError, SandboxError) as error:
        sys.exit(_complain(str(error)))
    except GuardStop as error:
        print(f"stopped by the guard: {error}", file=sys.stderr)
        sys.exit(3)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(
            _complain(f"{error.filename or 'disk'}: no room left on the disk; free some and start again to resume")
        )
    except Stopped as stopped:
        print(f"stopped; {stopped}", file=sys.stderr)
        sys.exit(130)
    except BaseExceptionGroup as group:
        sys.exit(_complain_of_group(group))


def _complain(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


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
    return _complain(str(first))


if __name__ == "__main__":
    main()
