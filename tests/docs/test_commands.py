"""Every command in README, CONTRIBUTING and docs is read by the program it names, and is run or listed as not run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from support import doc_pages as pages
from support.doc_pages import ROOT
from traced_step import Layout, trace_step

from agent_rl.cli import app
from agent_rl.config.loader import load_config

AGENT_RL: Any = typer.main.get_command(app)


WRITTEN_BY_COMMANDS = ("letters.yaml", "service.yaml")


@dataclass(frozen=True)
class Command:
    """One command line of a page, without its comment and its environment variables."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def commands() -> Iterator[Command]:
    for page in pages.PAGES:
        for block in pages.blocks(page):
            if block.language == "bash":
                for line in block.text.replace("\\\n", " ").splitlines():
                    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
                    if words:
                        yield Command(str(block), (words[0].removeprefix(".venv/bin/"), *words[1:]))


COMMANDS = {str(command): command for command in commands()}

RUN: Mapping[str, str] = {
    "agent-rl config list": "swebench-verified",
    "agent-rl config show quickstart": "describe_tools: false",
    "agent-rl init project": "agent-rl train letters.yaml",
    "agent-rl plan paper-swe train.lr=1e-6": "GPU",
    "agent-rl config show configs/quickstart.yaml": "describe_tools: false",
    "agent-rl envs list": "mini",
    "agent-rl envs new letters": "letters.yaml",
    "agent-rl envs check letters:Letters": "kept",
    "agent-rl eval configs/quickstart.yaml --policy gold --tasks 2": "100.0%",
    "agent-rl eval configs/quickstart.yaml --policy noop --tasks 2": " 0.0%",
    "agent-rl show runs/quickstart/eval/gold-heldout": "resolved",
    "agent-rl eval compare runs/quickstart/eval/noop-heldout runs/quickstart/eval/gold-heldout": "+100.0 points",
    "agent-rl model init OUT": "made",
    "agent-rl plan configs/paper-swe.yaml": "GPU",
    "agent-rl plan configs/two-nodes.yaml train.ray_address=FIRST:6379": "of 76.0 GiB",
    "agent-rl plan configs/paper-swe.yaml hardware.gpu_memory_gb=141 train.parallel.world_size=16": "GPU",
    "agent-rl plan configs/paper-swe.yaml --tokens 20000 --json": "{",
    "agent-rl r3 check runs/traced/r3_trace --require-forward-verify --require-shard-identity": "holds",
    "python -m sandbox.reap --list": "",
    "agent-rl r3 figures docs/paper-runs/paper-small-{off,r3,r2,tis,gspo,gspo-r3}-[14]-* --out runs/figures": (
        "R3 less no replay, in 12 pairs of runs that differ in nothing else; Pass@1 -0.8 [-6.5, +4.8]"
    ),
    "agent-rl r3 figures docs/paper-runs/paper-long-{off,r3,r2,tis,gspo,gspo-r3}-[14]-* --out runs/figures-long": (
        "R3 less no replay, in 13 pairs of runs that differ in nothing else; Pass@1 +2.5 [-6.1, +11.1]"
    ),
    "agent-rl r3 figures docs/paper-runs/paper-long-off-4-0 docs/paper-runs/paper-long-slow-off-4-0 "
    "--out runs/figures-slow": "68.8",
}
"""Commands that the test runs as they are printed, one after another in one directory, and a part of their output."""

EVALUATIONS = {
    f"runs/quickstart/eval/{policy}-heldout": f"agent-rl eval configs/quickstart.yaml --policy {policy} --tasks 2"
    for policy in ("gold", "noop")
}
AFTER: Mapping[str, Mapping[str, str]] = {
    "agent-rl envs check letters:Letters": {"letters.py": "agent-rl envs new letters"},
    "agent-rl show runs/quickstart/eval/gold-heldout": EVALUATIONS,
    "agent-rl eval compare runs/quickstart/eval/noop-heldout runs/quickstart/eval/gold-heldout": EVALUATIONS,
}
"""What a command needs that earlier ones make: the file or directory, and the earlier command."""

NOT_RUN: Mapping[str, tuple[str, ...]] = {
    "sets up environments, or runs the suite or all benchmarks": (
        "make quickstart",
        "make test",
        "make setup",
        "make check",
        "make docs",
        "make real-tasks",
    ),
    "needs an engine and minutes: tests/integration and tests/engine run the same commands smaller": (
        "agent-rl train configs/quickstart.yaml name=mine train.lr=1e-4",
        "agent-rl train configs/quickstart.yaml name=traced train.steps=1 eval.tasks=0 r3.trace.steps=[1]",
        "agent-rl train letters.yaml",
        "agent-rl eval configs/quickstart.yaml",
        "agent-rl eval configs/quickstart.yaml --greedy --tasks 64",
        "agent-rl eval configs/quickstart.yaml --samples 8",
        "agent-rl eval configs/quickstart.yaml --harness python3 agents/mine/agent.py --tasks 8",
        "agent-rl serve configs/quickstart.yaml --port 8377",
        "agent-rl train configs/quickstart.yaml train.steps=14 eval.tasks=64 eval.every=7 "
        "rollout.harness={command: python tests/endpoint/programs/quickstart_agent.py, location: host}",
        "agent-rl r3 compare configs/quickstart.yaml --tasks 96 --out runs/compare",
        "agent-rl r3 compare runs/quickstart",
        "agent-rl r3 compare configs/paper-small.yaml --tasks 12 --out runs/compare-paper",
        "agent-rl r3 compare configs/quickstart.yaml train.dtype=bfloat16 --trajectories runs/compare "
        "--out runs/compare-bf16",
        "agent-rl r3 compare configs/quickstart.yaml engine.dtype=float32 --rescore --trajectories runs/compare "
        "--out runs/compare-fp32",
    ),
    "tests/envs/test_maths.py does the same in its own process; rollout needs an engine": (
        "agent-rl envs check math",
        "agent-rl eval configs/quickstart.yaml env.name=math --policy gold --tasks 4",
        "agent-rl rollout configs/quickstart.yaml env.name=math rollout.max_turns=1 --tasks 4",
    ),
    "needs a finished run: tests/controller/test_eval_compare.py": (
        "agent-rl eval compare runs/quickstart:step-0/sampled runs/quickstart:step-20/sampled",
        "agent-rl eval compare A B --points 5 --json",
    ),
    "answers by what the machine lacks: tests/controller/test_doctor.py": ("agent-rl doctor",),
    "needs a server or an endpoint": (
        "agent-rl r3 probe http://127.0.0.1:30000",
        "agent-rl eval configs/quickstart.yaml --policy https://host/v1 --model NAME",
        "agent-rl eval configs/harness-claude-code.yaml engine.urls=[http://host:30000] --tasks 8",
        "agent-rl eval configs/swebench-verified.yaml env.scaffold=r2egym model=PATH engine.urls=[http://host:30000]",
    ),
    "needs a cluster: tests/sandbox/test_hosts.py and tests/engine/test_engine_hosts.py have one of this machine": (
        "ray start --head --port 6379",
        "ray start --address FIRST:6379",
        "agent-rl doctor configs/two-nodes.yaml model=PATH train.ray_address=FIRST:6379",
        "agent-rl train configs/two-nodes.yaml model=PATH train.ray_address=FIRST:6379",
        "agent-rl train configs/paper-swe.yaml train.ray_address=FIRST:6379 engine.urls_file=engines.txt",
    ),
    "takes a minute: tests/dryrun runs it smaller": (
        "agent-rl dry-run configs/paper-swe.yaml --layers 2,4",
        "agent-rl dry-run configs/two-nodes.yaml --rank 0 --rank 7 --skew 2 --layers all",
        "agent-rl dry-run configs/paper-swe-8gpu.yaml --layers 2,4 train.parallel.tensor=1 engine.colocate=false "
        "train.offload_optimizer=false train.optimizer_moments=bfloat16 train.offload_activations=true",
    ),
    "needs a GPU: tests/gpu runs its checks on CPUs": ("python tests/gpu/gpu_run.py",),
    "needs the trajectories of a finished run": (
        "agent-rl eval configs/quickstart.yaml --policy replay:runs/quickstart/trajectories/step-000010.jsonl.zst",
    ),
    "serves until it is stopped, or needs a finished run: tests/viewer": (
        "agent-rl view runs/quickstart",
        "agent-rl view runs/a runs/b --port 9000",
        "agent-rl view runs/quickstart --export run.html --trajectories 50",
    ),
    "needs the routes of a finished run: tests/controller/test_balance_command.py": (
        "agent-rl r3 balance runs/quickstart --expert-ranks 2,4,8",
    ),
    "runs hundreds of episodes": (
        "agent-rl doctor configs/quickstart.yaml --tasks 64",
        "agent-rl doctor configs/quickstart.yaml --split heldout --tasks 200 --repeats 3",
    ),
    "takes half an hour": (
        "agent-rl model init OUT --from-scratch",
        "agent-rl model init OUT --shape paper --from-scratch",
    ),
    "trains for hours, or needs such runs: tests/controller/test_figures.py draws small ones": (
        "python benchmarks/run_matrix.py configs/paper-small.yaml --seeds 0 1 2 --minutes 200",
        "python benchmarks/run_matrix.py configs/paper-small.yaml train.mini_steps=1 --seeds 0 1 2 --minutes 200",
        "python benchmarks/run_matrix.py configs/paper-small.yaml name=paper-long train.steps=60 eval.every=20 "
        "--settings off r3 --seeds 0 1 2 3 --minutes 300",
        "python benchmarks/run_matrix.py configs/paper-small.yaml name=paper-long train.steps=60 eval.every=20 "
        "train.mini_steps=1 --seeds 0 1 2 --minutes 500",
        "python benchmarks/run_matrix.py configs/paper-small.yaml name=paper-long train.steps=60 eval.every=20 "
        "--settings r2 tis gspo gspo-r3 --seeds 0 1 2 --minutes 400",
        "python benchmarks/run_matrix.py configs/paper-small.yaml name=paper-long-slow train.steps=60 eval.every=20 "
        "train.lr=7.5e-5 --settings off --seeds 0 --minutes 60",
        "python benchmarks/run_matrix.py configs/paper-small.yaml --seeds 0 --settings "
        "r3 off old-logprob-only update-only sampled-only alternate-layers ahead fresh-only shifted",
        "python benchmarks/run_matrix.py configs/quickstart.yaml train.mini_steps=4 train.steps=12 eval.tasks=0 "
        "--seeds 0 --settings "
        "r3 off old-logprob-only update-only sampled-only alternate-layers ahead fresh-only shifted",
        "agent-rl r3 figures runs/paper-small-off-4-0 runs/paper-small-r3-4-0 --out runs/figures",
    ),
    "removes sandboxes of other runs, or never ends": ("python -m sandbox.reap", "python -m sandbox.reap --every 60"),
    "needs root, debootstrap and minutes": (
        "python -m sandbox.base_image",
        "python -m sandbox.base_image --pip pytest==8.3.5",
        "python -m sandbox.base_image --rootfs DIR",
        "python -m sandbox.base_image --engine podman",
    ),
    "measures the real tasks for minutes: tests/redteam/test_apart.py measures a small one": (
        "python -m envs.swe.isolate .cache/tasks/real.jsonl --out .cache/tasks/isolated.jsonl",
    ),
    "downloads sources of real releases": ("python -m scripts.build_release_tasks --out .cache/tasks/real.jsonl",),
    "makes tasks of a repository for minutes: tests/envs/test_swe_harvest.py makes some of small ones": (
        "agent-rl tasks from-git service --out tasks",
        "agent-rl tasks inject service --out tasks --tasks 50",
        "agent-rl doctor real env.options.path=tasks/tasks.jsonl",
        "agent-rl eval real --policy gold env.options.path=tasks/tasks.jsonl",
        "agent-rl plan service.yaml",
        "agent-rl train service.yaml",
    ),
    "measures for minutes": (
        "python benchmarks/bench_balance_step.py --rounds 4 --tokens 4096",
        "python benchmarks/bench_balance.py",
        "python benchmarks/bench_codec.py",
        "python benchmarks/bench_step.py --rounds 9",
        "python benchmarks/bench_view.py",
        "python benchmarks/kill_runs.py --kills 50",
        "python benchmarks/own_tasks.py --out OUT",
    ),
    "runs tests, which would run this one": (
        "python -m pytest tests/rollout -q",
        "python -m pytest tests/train -q -m not slow",
        "python -m pytest tests/endpoint/test_programs.py -m exhaustive",
    ),
    "is a program that is not installed with the project": (
        "pre-commit install",
        "npm install --prefix .cache/agents @anthropic-ai/claude-code@2.1.330 @openai/codex@0.169.0",
    ),
}


def test_every_command_is_run_or_listed_with_the_reason_why_not() -> None:
    listed = [text for texts in (RUN, *NOT_RUN.values()) for text in texts]
    assert len(listed) == len(set(listed)), "a command is listed twice"
    new = [f"{command.place}: {text}" for text, command in COMMANDS.items() if text not in listed]
    assert not new, "neither run nor listed here:\n" + "\n".join(new)
    assert not (gone := set(listed) - set(COMMANDS)), f"in no page any more: {gone}"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=str)
def test_every_command_is_one_that_its_program_takes(command: Command) -> None:
    program, *arguments = command.words
    readers = {"agent-rl": read_agent_rl, "make": read_make, "python": read_python}
    if program in readers:
        readers[program](arguments)
    else:
        assert program in ("npm", "pre-commit", "ray"), f"{command.place}: what is {program}?"


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the words after it."""
    command, rest = AGENT_RL, list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        _, command, rest = command.resolve_command(typer.Context(command), rest)
    return command, rest


def read_agent_rl(arguments: list[str]) -> None:
    """Parse with the real command line, without running; configs are loaded with the overrides."""
    command, rest = find(arguments)
    given = command.make_context(command.name, rest).params
    config = given.get("config") or given.get("source")
    if config is not None and Path(config).suffix == ".yaml" and Path(config).name not in WRITTEN_BY_COMMANDS:
        load_config(ROOT / config, given.get("overrides") or ())


def read_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(arguments) <= set(targets)


def read_python(arguments: list[str]) -> None:
    """The file or module is there, takes the options, and the directories it is given are there."""
    if arguments[0] != "-m":
        source = ROOT / arguments[0]
    elif arguments[1] == "pytest":
        assert all((ROOT / word).exists() for word in arguments if word.startswith(("tests", "benchmarks")))
        return
    else:
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, f"no module {arguments[1]}"
        source = Path(str(spec.origin))
    text = source.read_text()
    assert not (unknown := [word for word in arguments if word.startswith("--") and f'"{word}"' not in text]), unknown


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the repository's configs, docs and caches, and the trace of a step, but without its runs."""
    directory = tmp_path_factory.mktemp("commands")
    for name in ("configs", "docs", ".cache"):
        (ROOT / name).mkdir(exist_ok=True)
        (directory / name).symlink_to(ROOT / name)
    trace_step(directory / "runs/traced/r3_trace", Layout(context=2))
    return directory


@pytest.mark.bubblewrap
@pytest.mark.parametrize("text", RUN)
def test_the_command_runs_as_it_is_printed(text: str, directory: Path) -> None:
    for needed, earlier in AFTER.get(text, {}).items():
        if not (directory / needed).exists():
            run(earlier, directory)
    assert RUN[text] in run(text, directory)


def run(text: str, directory: Path) -> str:
    name, _, arguments = text.partition(" ")
    program = [sys.executable, "-m", "agent_rl.cli"] if name == "agent-rl" else [sys.executable]
    line = f"{shlex.join(program)} {arguments}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=directory, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


SPANS = [
    pytest.param(span, id=f"{page.name}:{line} {span}")
    for page in pages.PAGES
    for line, span in pages.code_spans(page)
    if span.startswith(("agent-rl ", "python "))
]


@pytest.mark.parametrize("span", SPANS)
def test_commands_and_options_named_in_a_sentence_exist(span: str) -> None:
    program, *words = span.split()
    if program == "python":
        read_python(words)
        return
    command, rest = find(words)
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
    assert not (unknown := [word for word in rest if word.startswith("--") and word not in known]), unknown
