"""Python and YAML in README, CONTRIBUTING and docs work as printed, and the config keys they name exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import sys
import tomllib
import types
import typing
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from support import doc_pages as pages
from support.doc_pages import ROOT, Block

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.models.builtin import install_model
from agent_rl.render.chat import ChatRenderer
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import GroupSettings, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.scripted_policies import ByteRenderer
from envs import EnvContext, load_environment
from r3.payload import RouteLayout
from tools import ToolCall
from tools.formats import tool_format

ALL = [block for page in pages.PAGES for block in pages.blocks(page)]
KNOWN_LANGUAGES = {"", "bash", "python", "yaml", "toml", "text", "{toctree}"}
TESTED_ELSEWHERE = {"docs/environments.md": 2}
"""How many Python blocks of a page ``tests/envs/test_docs_example.py`` runs."""


def python_blocks(page: str) -> list[Block]:
    return [block for block in ALL if block.language == "python" and block.page == ROOT / page]


async def execute(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block, which may await at its top level, with ``names`` defined; return all names after it."""
    code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waits = eval(code, names) if code.co_flags & inspect.CO_COROUTINE else exec(code, names)
    if isinstance(waits, Awaitable):
        await waits
    return names


async def tools_page(block: Block, directory: Path) -> None:
    tools = (await execute(block, {}))["tools"]
    assert (await tools.call(ToolCall("buy", {"item": "tea", "count": "3"}))).text == "bought 3 tea"
    assert (await tools.call(ToolCall("buy", {"item": "tea", "count": 0}))).failed
    assert (await tools.call(ToolCall("leave", {}))).submitted


async def rendering_page(block: Block, directory: Path) -> None:
    install_model(directory / "model")
    messages = [{"role": "system", "content": "Repair it."}, {"role": "user", "content": "a.py is broken"}]
    names = {"ChatRenderer": ChatRenderer, "Path": lambda name: directory / name, "messages": messages, "tools": []}
    names["sampled"] = ChatRenderer(directory / "model").observation("x", stop_included=True)
    assert len((await execute(block, names))["tokens"]) > len(names["sampled"])


async def rollout_page(block: Block, directory: Path) -> None:
    """Episodes of the environment that ``docs/environments.md`` prints, in the real loop, with a scripted engine."""
    printed = types.ModuleType("printed_sums")
    exec(python_blocks("docs/environments.md")[0].text, printed.__dict__)
    sys.modules[printed.__name__] = printed
    env = load_environment("printed_sums:Sums", EnvContext(backend=None), {"count": 2})  # type: ignore[arg-type]
    renderer, fmt = ByteRenderer(), tool_format("hermes")
    turns = [renderer.encode(fmt.render(ToolCall(*call))) for call in (("answer", {"number": 0}), ("finish", {}))]
    names: dict[str, Any] = {"tasks": env.tasks("train"), "env": env, "renderer": renderer, "fmt": fmt, "show": None}
    names["engine"] = ScriptedEngine(lambda session, turn, tokens: turns[turn], layout=RouteLayout(2, (0, 1), 8, 2))
    names["config"] = load_config(ROOT / "configs/quickstart.yaml", ["rollout.max_tokens=8192"])
    parts = (functools, run_episode, collect_groups, GroupSettings, Limiter, EpisodeRules)
    groups = (await execute(block, names | {part.__name__: part for part in parts}))["rollout"].groups
    assert [len(group.trajectories) for group in groups] == [8, 8]
    assert {trajectory.reward for group in groups for trajectory in group.trajectories} == {0.0, 1.0}


async def objective_facts_block(block: Block, directory: Path) -> None:
    assert (await execute(block, {}))["SOFT"].refusal("soft", None, None, 3.0)


async def objective_formula_block(block: Block, directory: Path) -> None:
    """The loss of the printed objective, named by dotted path, with the clip that its facts give."""
    torch = pytest.importorskip("torch", reason="needs the trainer environment")
    from agent_rl.train.loss.objectives import objective_terms

    for name, part in zip(("facts", "formulas"), python_blocks("docs/trainer.md"), strict=True):
        module = types.ModuleType(f"my_package.{name}")
        exec(part.text, module.__dict__)
        sys.modules[module.__name__] = module
    train = load_config(ROOT / "configs/quickstart.yaml", ["train.objective=my_package.facts:SOFT"]).train
    two, sampled = torch.ones(2), torch.tensor([True, False])
    terms = objective_terms(train.objective, two, two * 0, two, sampled, sampled.long(), train.clip)
    assert terms.loss_T.tolist() == pytest.approx([-(2.718281828**0.7), -1.0])


RUN: dict[str, list[Callable[[Block, Path], Awaitable[None]]]] = {
    "docs/tools.md": [tools_page],
    "docs/rendering.md": [rendering_page],
    "docs/rollout.md": [rollout_page],
    "docs/trainer.md": [objective_facts_block, objective_formula_block],
}
"""What runs each Python block of a page, in their order."""


@pytest.mark.parametrize(("page", "number"), [(page, at) for page, checks in RUN.items() for at in range(len(checks))])
async def test_the_python_block_runs_as_it_is_printed(page: str, number: int, tmp_path: Path) -> None:
    await RUN[page][number](python_blocks(page)[number], tmp_path)


def test_every_python_block_is_run() -> None:
    covered = TESTED_ELSEWHERE | {page: len(checks) for page, checks in RUN.items()}
    printed = {str(page.relative_to(ROOT)) for page in pages.PAGES}
    assert {page: len(python_blocks(page)) for page in printed if python_blocks(page)} == covered


def test_every_block_says_its_language() -> None:
    strange = [str(block) for block in ALL if block.language not in KNOWN_LANGUAGES]
    hidden = [str(b) for b in ALL if not b.language and re.match(r"(\$ )?(agent-rl|make|python|pip) ", b.text)]
    assert strange + hidden == [], "unknown language, or a command outside of a bash block"


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "yaml"], ids=str)
def test_the_yaml_block_is_a_part_of_a_config(block: Block, tmp_path: Path) -> None:
    for document in yaml.safe_load_all(block.text):
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({"name": "x", "model": "m"} | document))
        load_config(config)


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "toml"], ids=str)
def test_the_toml_block_names_groups_of_entry_points_that_are_looked_for(block: Block) -> None:
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    files = [path for package in ("envs", "tools", "sandbox", "agent_rl") for path in (ROOT / package).rglob("*.py")]
    sources = "".join(path.read_text() for path in files)
    assert [group for group in groups if f'"{group}"' not in sources] == []


def models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's type allows: a model, one of a union, or the values of a mapping."""
    if inspect.isclass(annotation) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in models(part)]


def is_key(model: type[BaseModel], path: list[str]) -> bool:
    if path and path[0] in model.model_fields:
        field = model.model_fields[path[0]]
        return (
            len(path) == 1 or path[0] == "options" or any(is_key(inner, path[1:]) for inner in models(field.annotation))
        )
    return False


def is_code(path: list[str]) -> bool:
    """Whether a dotted name is a module of a package, or a name in one."""
    if importlib.util.find_spec(".".join(path[:1])) is None:
        return False
    module = ".".join(path[:-1])
    try:
        return importlib.util.find_spec(".".join(path)) is not None or hasattr(
            importlib.import_module(module), path[-1]
        )
    except ModuleNotFoundError:
        return False


KEY = re.compile(rf"(?P<key>(?:{'|'.join(RunConfig.model_fields)})(?:\.\w+)+)(?P<value>=.*|: .*)?$", re.DOTALL)
KEYS = [
    pytest.param(match, id=f"{page.name}:{line} {span}")
    for page in pages.PAGES
    for line, span in pages.code_spans(page)
    if (match := KEY.match(span)) and not re.search(r"\.(py|md|yaml|jsonl|json|png)$", match["key"])
]


@pytest.mark.parametrize("match", KEYS)
def test_the_config_key_exists_and_takes_the_value(match: re.Match[str]) -> None:
    path = match["key"].split(".")
    assert is_key(RunConfig, path) or is_code(path), f"no config key {match['key']}"
    if (match["value"] or "").startswith("=") and not match["value"].isupper():
        load_config(ROOT / "configs/quickstart.yaml", [match[0]])
