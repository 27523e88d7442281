"""The recipes of papers: each config has the values of its row in scripts/stated_settings.yaml, and can be planned."""

from __future__ import annotations

from collections import Counter
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config, shipped_configs
from agent_rl.dryrun.run import dry_run
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.suggestions import make_plan
from agent_rl.train.parallel_checks import layout_problems
from scripts.make_recipes import PAGE, RECIPES, Recipe, config_text, hardware_of, page_text, read_recipes

TABLE = read_recipes()
each = pytest.mark.parametrize("recipe", TABLE, ids=[recipe.name for recipe in TABLE])


def value_at(config: RunConfig, key: str) -> Any:
    """The value under a dotted key, in sections and mappings."""

    def below(place: Any, name: str) -> Any:
        return getattr(place, name) if isinstance(place, BaseModel) else place[name]

    found = reduce(below, key.split("."), config)
    return list(found) if isinstance(found, tuple) else str(found) if isinstance(found, Path) else found


@each
def test_a_recipe_has_the_stated_values_and_fits_its_hardware(recipe: Recipe) -> None:
    """Nothing drifts: neither the file from the table, nor the base config from what the table says."""
    file = RECIPES / f"{recipe.name}.yaml"
    config = load_config(file)
    found = {key: value_at(config, key) for key in recipe.settings}
    assert found == {key: stated.value for key, stated in recipe.settings.items()}
    plan = make_plan(config)
    assert plan.refusal() is None
    assert layout_problems(config, planned_model(config.model)) == []
    assert file.read_text() == config_text(recipe, hardware_of(plan, config)), "python -m scripts.make_recipes"


def test_every_row_has_a_recipe_and_no_recipe_has_no_row() -> None:
    assert {file.stem for file in RECIPES.glob("*.yaml")} == {recipe.name for recipe in TABLE}
    assert PAGE.read_text() == page_text(TABLE), "python -m scripts.make_recipes"
    rows = Counter(recipe.name.rsplit("-")[1] if recipe.paper.key == "r3" else recipe.paper.key for recipe in TABLE)
    assert rows == {"table1": 11, "table2": 2, "table3": 4, "nemo": 2, "kat": 5, "foremoe": 3}
    assert {f"recipes/{recipe.name}" for recipe in TABLE} <= shipped_configs().keys()
    assert load_config(Path("recipes/kat-rescore")).name == "kat-rescore", "found by its name from any directory"


def test_rows_differ_only_in_what_they_compare() -> None:
    """Two recipes of one table and model have equal settings but those of the method."""
    method = {"objective", "eps_low", "eps_high", "replay", "correction", "old_logprob"}
    for prefix in ("r3-table1-sft-", "r3-table1-base-", "r3-table2-", "r3-table3-", "kat-"):
        rests = []
        for recipe in TABLE:
            if recipe.name.startswith(prefix):
                config = load_config(RECIPES / f"{recipe.name}.yaml").model_dump(exclude={"name"})
                train = {key: value for key, value in config["train"].items() if key not in method}
                rests.append((train.pop("mini_steps"), config | {"train": train}))
        for steps, rest in rests:
            assert rest == next(other for others, other in rests if others == steps), prefix


SHORTER = {
    "foremoe-qwen35-35b-a3b": ("rollout.max_tokens=4096", "rollout.max_new_tokens=2048", "train.microbatch_tokens=4096")
}
"""The delta rule is simulated chunk by chunk, at 65,536 tokens for many minutes."""


@cache
def dry_run_groups() -> dict[str, list[str]]:
    """Names of recipes by what a dry run of them depends on: the model's shape, the training settings but plain
    numbers, the longest trajectory, the engines and the GPUs."""
    groups: dict[str, list[str]] = {}
    for recipe in TABLE:
        config = load_config(RECIPES / f"{recipe.name}.yaml")
        numbers = {"steps", "mini_steps", "lr", "eps_low", "eps_high"}
        parts = config.train.model_dump_json(exclude=numbers), config.engine, config.hardware, config.rollout.max_tokens
        groups.setdefault(repr((planned_model(config.model), *parts)), []).append(recipe.name)
    return groups


@pytest.mark.exhaustive
@pytest.mark.megatron
@each
def test_the_trainers_code_runs_a_recipe_on_a_simulated_gpu(recipe: Recipe) -> None:
    """One layer per model chunk, on the first rank and on the last of a pipeline; one recipe of each group."""
    first = next(names[0] for names in dry_run_groups().values() if recipe.name in names)
    if first != recipe.name:
        pytest.skip(f"its dry run is that of {first}")
    config = load_config(RECIPES / f"{recipe.name}.yaml", SHORTER.get(recipe.name, ()))
    for result in dry_run(config, ranks=(), skew=1.0, layers="1"):
        assert result.fault is None
