"""Every command in README, CONTRIBUTING, SECURITY and docs is one that its program takes; some of them are run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from support import doc_pages as pages
from support.doc_pages import ROOT
from traced_step import Layout, trace_step
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config.loader import load_config

AGENT_RL: Any = typer.main.get_command(app)
FOREIGN_PROGRAMS = ("docker", "kubectl", "npm", "pip", "pre-commit", "ray", "sbatch")
WRITTEN_BY_USERS = ("letters.yaml", "service.yaml", "desk.yaml")

RUN: Mapping[str, str] = {
    "agent-rl config list": "swebench-verified",
    "agent-rl config show quickstart": "describe_tools: false",
    "agent-rl init project": "agent-rl train letters.yaml",
    "agent-rl plan paper-swe train.lr=1e-6": "GPU",
    "agent-rl envs new letters": "letters.yaml",
    "agent-rl envs check letters:Letters": "passed",
    "agent-rl eval configs/quickstart.yaml --policy gold --tasks 2": "100.0%",
    "agent-rl eval configs/quickstart.yaml --policy noop --tasks 2": " 0.0%",
    "agent-rl show runs/quickstart/eval/gold-heldout": "resolved",
    "agent-rl eval compare runs/quickstart/eval/noop-heldout runs/quickstart/eval/gold-heldout": "+100.0 points",
    "agent-rl model init OUT": "created",
    "agent-rl plan configs/paper-swe.yaml": "GPU",
    "agent-rl plan configs/two-nodes.yaml train.ray_address=FIRST:6379": "of 76.0 GiB",
    "agent-rl plan configs/paper-swe.yaml hardware.gpu_memory_gb=141 train.parallel.world_size=16": "GPU",
    "agent-rl plan configs/paper-swe.yaml --tokens 20000 --json": "{",
    "agent-rl r3 check runs/traced/r3_trace --require-forward-verify --require-shard-identity": "token identity held",
    "python -m sandbox.reap --list": "",
}
"""Commands that the test runs as they are printed, in this order and in one directory, and a part of their output."""


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The place and the words of every command line, without its comment and its environment variables."""
    for page in pages.PAGES:
        for block in pages.blocks(page):
            for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
                words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
                if words:
                    yield str(block), (words[0].removeprefix(".venv/bin/"), *words[1:])


COMMANDS = {" ".join(words): (place, words) for place, words in commands()}


@pytest.mark.parametrize("text", COMMANDS)
def test_every_command_is_one_that_its_program_takes(text: str) -> None:
    place, (program, *arguments) = COMMANDS[text]
    readers = {"agent-rl": read_agent_rl, "make": read_make, "python": read_python}
    if program in readers:
        readers[program](arguments)
    else:
        assert program in FOREIGN_PROGRAMS, f"{place}: what is {program}?"


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
    if config is None or Path(config).parts[0] == "runs" or Path(config).name in WRITTEN_BY_USERS:
        return
    if Path(config).suffix == ".yaml":
        load_config(ROOT / config, given.get("overrides") or ())


def read_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(arguments) <= set(targets)


def read_python(arguments: list[str]) -> None:
    """The file or module exists and names the options; of pytest the given paths exist."""
    if arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in arguments if word.startswith(("tests", "benchmarks")))
        return
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, f"no module {arguments[1]}"
    text = (Path(str(spec.origin)) if arguments[0] == "-m" else ROOT / arguments[0]).read_text()
    assert not (unknown := [word for word in arguments if word.startswith("--") and f'"{word}"' not in text]), unknown


def test_commands_and_options_named_in_a_sentence_exist() -> None:
    for page in pages.PAGES:
        for line, span in pages.code_spans(page):
            program, _, rest = span.partition(" ")
            if program == "python":
                read_python(rest.split())
            elif program == "agent-rl" and rest:
                command, words = find(rest.split())
                known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
                unknown = [word for word in words if word.startswith("--") and word not in known]
                assert not unknown, f"{page.name}:{line}: {span}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the repository's configs, docs and caches, and the trace of a step, but without its runs."""
    made = tmp_path_factory.mktemp("commands")
    for name in ("configs", "docs", ".cache"):
        (ROOT / name).mkdir(exist_ok=True)
        (made / name).symlink_to(ROOT / name)
    trace_step(made / "runs/traced/r3_trace", Layout(context=2))
    return made


@pytest.mark.slow
@pytest.mark.bubblewrap
def test_commands_run_as_they_are_printed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, since most of a short command's time is its imports."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for text, part in RUN.items():
        assert text in COMMANDS, f"{text} is in no page"
        assert part in run(text.split()), text
    sys.modules.pop("letters", None)


def run(words: list[str]) -> str:
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout
    result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}\n{result.exception!r}"
    return result.output
