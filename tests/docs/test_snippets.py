"""Python, YAML and TOML in the pages work as printed, and the config keys that the pages name exist."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import textwrap
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

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.config.loader import install_model, load_config
from agent_rl.evaluation.prices import read_price
from agent_rl.render.chat import ChatRenderer
from envs.new_project import FIRST, write_template
from tools import ToolCall

ALL = [block for page in pages.PAGES for block in pages.blocks(page)]
KNOWN_LANGUAGES = {"", "bash", "python", "yaml", "toml", "text", "{toctree}"}


def python_blocks(page: str) -> list[Block]:
    return [block for block in ALL if block.language == "python" and block.page == ROOT / page]


def execute(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block with ``names`` defined; return all names after it."""
    exec(compile(block.text, str(block), "exec"), names)
    return names


async def custom_tools(block: Block, directory: Path) -> None:
    tools = execute(block, {})["tools"]
    assert (await tools.call(ToolCall("buy", {"item": "tea", "count": "3"}))).text == "bought 3 tea"
    assert (await tools.call(ToolCall("buy", {"item": "tea", "count": 0}))).failed
    assert (await tools.call(ToolCall("leave", {}))).submitted


async def rendering(block: Block, directory: Path) -> None:
    install_model(directory / "model")
    messages = [{"role": "system", "content": "Repair it."}, {"role": "user", "content": "a.py is broken"}]
    names = {"ChatRenderer": ChatRenderer, "Path": lambda name: directory / name, "messages": messages, "tools": []}
    names["sampled"] = ChatRenderer(directory / "model").observation("x", stop=None)
    assert len(execute(block, names)["tokens"]) > len(names["sampled"])


async def objective_spec(block: Block, directory: Path) -> None:
    assert execute(block, {})["SOFT"].conflict("soft", None, None, 3.0)


async def objective_formula(block: Block, directory: Path) -> None:
    """The loss of the printed objective, named by dotted path, with the clip of its spec."""
    torch = pytest.importorskip("torch", reason="needs the trainer environment")
    from agent_rl.train.loss.objectives import objective_terms

    for name, part in zip(("facts", "formulas"), python_blocks("docs/reference/objectives.md"), strict=False):
        module = types.ModuleType(f"my_package.{name}")
        sys.modules[module.__name__] = module
        execute(part, module.__dict__)
    train = load_config(ROOT / "configs/quickstart.yaml", ["train.objective=my_package.facts:SOFT"]).train
    two, sampled = torch.ones(2), torch.tensor([True, False])
    terms = objective_terms(train.objective, two, two * 0, two, sampled, sampled.long(), train.clip)
    assert terms.loss_T.tolist() == pytest.approx([-(2.718281828**0.7), -1.0])


async def advantage_parts(block: Block, directory: Path) -> None:
    """The printed baseline and scale, named by dotted path."""
    from agent_rl.controller.advantages import group_advantages

    module = types.ModuleType("my_package.advantages")
    sys.modules[module.__name__] = module
    execute(block, module.__dict__)
    train = TrainConfig(baseline="my_package.advantages:MEDIAN", advantage_scale="my_package.advantages:RANGE")
    found = group_advantages([0, 1, 4], baseline=train.baseline, scale=train.advantage_scale)
    assert found.tolist() == [-0.25, 0, 0.75]


async def template_excerpt(block: Block, directory: Path) -> None:
    """The block is a part of the environment that ``agent-rl envs new`` writes."""
    write_template(FIRST, directory)
    assert textwrap.indent(block.text, "    ") in (directory / f"{FIRST}.py").read_text()


async def elsewhere(block: Block, directory: Path) -> None:
    """``tests/envs/test_docs_example.py`` runs the block."""


RUN: dict[str, list[Callable[[Block, Path], Awaitable[None]]]] = {
    "docs/tutorials/first-environment.md": [template_excerpt] * 3,
    "docs/tutorials/users-and-judges.md": [elsewhere],
    "docs/reference/environments.md": [elsewhere] * 4,
    "docs/reference/objectives.md": [objective_spec, objective_formula, advantage_parts],
    "docs/reference/tools.md": [custom_tools, rendering],
}
"""What runs each Python block of a page, in their order."""


@pytest.mark.parametrize(("page", "number"), [(page, at) for page, checks in RUN.items() for at in range(len(checks))])
async def test_the_python_block_runs_as_it_is_printed(page: str, number: int, tmp_path: Path) -> None:
    await RUN[page][number](python_blocks(page)[number], tmp_path)


def test_every_python_block_is_run() -> None:
    printed = {str(page.relative_to(ROOT)) for page in pages.PAGES}
    counts = {page: len(python_blocks(page)) for page in printed if python_blocks(page)}
    assert counts == {page: len(checks) for page, checks in RUN.items()}


def test_every_block_has_a_language() -> None:
    strange = [str(block) for block in ALL if block.language not in KNOWN_LANGUAGES]
    hidden = [str(b) for b in ALL if not b.language and re.match(r"(\$ )?(agent-rl|make|python|pip) ", b.text)]
    assert strange + hidden == [], "unknown language, or a command outside of a bash block"


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "yaml"], ids=str)
def test_the_yaml_block_is_a_part_of_a_config_or_a_price_table(block: Block, tmp_path: Path) -> None:
    for document in yaml.safe_load_all(block.text):
        config = tmp_path / "config.yaml"
        if isinstance(document, list):
            config.write_text(block.text)
            assert read_price(config, document[0]["model"]).source
            continue
        config.write_text(yaml.safe_dump({"name": "x", "model": "m"} | document))
        load_config(config)


def test_every_entry_point_group_that_a_page_names_is_looked_for() -> None:
    groups = {"agent_rl.envs", *re.findall(r"entry point of the\s+group\s+`([\w.]+)`", all_text())}
    groups |= {group for b in ALL if b.language == "toml" for group in tomllib.loads(b.text)["project"]["entry-points"]}
    files = [path for package in ("envs", "tools", "sandbox", "agent_rl") for path in (ROOT / package).rglob("*.py")]
    sources = "".join(path.read_text() for path in files)
    assert [group for group in groups if f'"{group}"' not in sources] == []


def all_text() -> str:
    return "".join(page.read_text() for page in pages.PAGES)


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's type allows: a model, one of a union, or the values of a mapping."""
    if inspect.isclass(annotation) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in sections(part)]


def is_key(model: type[BaseModel], path: list[str]) -> bool:
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    inner = sections(field.annotation)
    named = path[0] == "sources"  # sections by names of the user
    return len(path) <= 1 + named or path[0] == "options" or any(is_key(one, path[1 + named :]) for one in inner)


def is_code(path: list[str]) -> bool:
    """Whether a dotted name is a module of a package, or a name in one."""
    try:
        module = importlib.import_module(".".join(path[:-1]))
    except ModuleNotFoundError:
        return False
    return hasattr(module, path[-1]) or importlib.util.find_spec(".".join(path)) is not None


KEY = re.compile(rf"(?P<key>(?:{'|'.join(RunConfig.model_fields)})(?:\.\w+)+)(?P<value>=.*|: .*)?$", re.DOTALL)
FILE = re.compile(r"\.(py|md|yaml|jsonl|json|png)$")


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_config_keys_of_a_page_exist_and_take_the_values(page: Path) -> None:
    unknown = []
    for line, span in pages.code_spans(page):
        match = KEY.match(span)
        if match is None or FILE.search(match["key"]) or ".NAME." in span:
            continue
        path, value = match["key"].split("."), match["value"] or ""
        if not is_key(RunConfig, path) and not is_code(path):
            unknown.append(f"{page.name}:{line}: {span}")
        elif value.startswith("=") and not value.isupper():
            load_config(ROOT / "configs/quickstart.yaml", [span])
    assert not unknown, "no config keys:\n" + "\n".join(unknown)
