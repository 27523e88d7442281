"""Writes configs/recipes and docs/reference/recipes.md from scripts/stated_settings.yaml: ``python -m
scripts.make_recipes``.

A recipe is a row of a paper's table: the base config, the stated values of the row's groups and of the row itself, and
the choices for what the text leaves open. A value names where it is stated. The first lines of a config name the row
and the hardware of its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from agent_rl.planner.plan import GIB, RunPlan
from agent_rl.planner.suggestions import make_plan

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "scripts" / "stated_settings.yaml"
RECIPES = ROOT / "configs" / "recipes"
PAGE = ROOT / "docs" / "reference" / "recipes.md"
WIDTH = 120
INTRODUCTION = """\
This page lists the configs in `configs/recipes`, one for each row of a paper's table or curve of a figure, and where
each value is stated. `agent-rl train recipes/NAME model=PATH` runs one. No recipe has been run at its full size. Keys
that are not listed have the values of the base config, which are our choice, or those that the recipe lists as its
`choices`.

`scripts/stated_settings.yaml` is the table, `python -m scripts.make_recipes` writes the configs and this page, and
`tests/test_recipes.py` compares them. See also their
[dry runs](../research/dry-runs.md#recipes-of-papers) at a few layers.
"""


@dataclass(frozen=True, slots=True)
class Paper:
    """What is reproduced, and ``compared``: the text that the values were compared with."""

    key: str
    title: str
    source: str
    compared: str


@dataclass(frozen=True, slots=True)
class Stated:
    """A value and where it is stated; ``origin``: the group or recipe of the table that has it."""

    value: Any
    where: str
    origin: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row. ``settings`` and ``choices``: values by dotted key. ``unstated``: what the text leaves open.
    ``missing``: what it states and agent-rl has no key for. Both are pairs of text and origin."""

    name: str
    paper: Paper
    base: str
    row: str
    reported: str
    groups: Sequence[str]
    settings: Mapping[str, Stated]
    choices: Mapping[str, Any]
    unstated: Sequence[tuple[str, str]]
    missing: Sequence[tuple[str, str]]


def read_recipes(path: Path = TABLE) -> list[Recipe]:
    """The rows of the table, in its order."""
    data = yaml.safe_load(path.read_text())
    papers = {key: Paper(key, **fields) for key, fields in data["papers"].items()}
    return [_recipe(name, row, data["groups"], papers) for name, row in data["recipes"].items()]


def _recipe(
    name: str, row: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]], papers: Mapping[str, Paper]
) -> Recipe:
    used = row.get("groups", ())
    parts = {**{group: groups[group] for group in used}, name: row}
    settings = {
        key: Stated(value, where, origin)
        for origin, part in parts.items()
        for key, (value, where) in part.get("settings", {}).items()
    }
    choices = {key: value for part in parts.values() for key, value in part.get("choices", {}).items()}
    (paper,) = [part["paper"] for part in parts.values() if "paper" in part]
    (base,) = [part["base"] for part in parts.values() if "base" in part]
    unstated, missing = (
        [(note, origin) for origin, part in parts.items() for note in part.get(kind, ())]
        for kind in ("unstated", "missing")
    )
    fields = row["row"], row["reported"], used, settings, choices, unstated, missing
    return Recipe(name, papers[paper], base, *fields)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings. A mapping as a value is merged with dotted keys below it."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = {**place.get(last, {}), **value} if isinstance(value, dict) else value
    return tree


def config_text(recipe: Recipe, hardware: str = "") -> str:
    """The config file. ``hardware``: what its plan needs."""
    values = nested({**recipe.choices, **{key: stated.value for key, stated in recipe.settings.items()}})
    head = [f"# {recipe.paper.source}, {recipe.row}.", f"# Reported: {recipe.reported}."]
    head += [f"# Hardware: {hardware}."] if hardware else []
    head += [
        "# Written by `python -m scripts.make_recipes`; docs/reference/recipes.md says where each value is stated."
    ]
    sections = {key: values[key] for key in RunConfig.model_fields if key in values}
    body = {"base": f"{recipe.base}.yaml", "name": recipe.name, **sections}
    text = yaml.safe_dump(body, sort_keys=False, width=WIDTH, default_flow_style=None)
    return "\n".join([*head, text])


def hardware_of(plan: RunPlan, config: RunConfig) -> str:
    """``32 trainer GPUs (45 GiB each) and 16 engine GPUs (65 GiB each) of 80 GiB``."""
    parts = []
    for name, label in (("GPU of a trainer rank", "trainer"), ("GPU of an engine", "engine")):
        resource = plan.resource(name)
        assert resource is not None, f"{config.name} has no {name}"
        parts.append(f"{resource.count} {label} GPUs ({round(resource.total / GIB)} GiB each)")
    return f"{' and '.join(parts)} of {config.hardware.gpu_memory_gb:g} GiB"


def page_text(recipes: Sequence[Recipe]) -> str:
    return "\n".join(_page(recipes)) + "\n"


def _page(recipes: Sequence[Recipe]) -> Iterator[str]:
    yield "# Recipes of papers\n"
    yield INTRODUCTION
    for paper in dict.fromkeys(recipe.paper for recipe in recipes):
        yield from _paper(paper, [recipe for recipe in recipes if recipe.paper == paper])


def _paper(paper: Paper, recipes: Sequence[Recipe]) -> Iterator[str]:
    source = paper.source if "http" in paper.source else f"[{paper.source}](https://arxiv.org/abs/{paper.source[6:]})"
    yield f"## {paper.key}\n"
    yield f"{paper.title}; {source}. Compared with: {paper.compared}.\n"
    yield "| recipe | row | reported | settings of |\n|---|---|---|---|"
    for one in recipes:
        origins = ", ".join(
            [*one.groups, "itself"] if any(of.origin == one.name for of in one.settings.values()) else one.groups
        )
        yield f"| `{one.name}` | {one.row} | {one.reported} | {origins} |"
    yield "\n| settings of | key | value | stated in |\n|---|---|---|---|"
    settings = [(of.origin, key, of) for recipe in recipes for key, of in recipe.settings.items()]
    for origin, key, stated in {(origin, key): (origin, key, of) for origin, key, of in settings}.values():
        yield f"| {origin} | `{key}` | `{_yaml(stated.value)}` | {stated.where} |"
    for title, notes in (
        ("Not stated", [note for recipe in recipes for note in recipe.unstated]),
        ("Stated, without a key here", [note for recipe in recipes for note in recipe.missing]),
    ):
        if notes:
            yield f"\n{title}:\n"
            yield from (f"- {origin}: {note}" for note, origin in dict.fromkeys(notes))
    yield ""


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=WIDTH).removesuffix("...\n").strip()


def main() -> None:
    RECIPES.mkdir(exist_ok=True)
    recipes = read_recipes()
    for file in RECIPES.glob("*.yaml"):
        file.unlink()
    for recipe in recipes:
        file = RECIPES / f"{recipe.name}.yaml"
        file.write_text(config_text(recipe))
        config = load_config(file)
        file.write_text(config_text(recipe, hardware_of(make_plan(config), config)))
    PAGE.write_text(page_text(recipes))


if __name__ == "__main__":
    main()
