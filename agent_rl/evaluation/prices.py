"""Prices of models, from a table that the user gives, and the cost of an evaluation."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, TypeAdapter, ValidationError

from agent_rl.errors import UserError
from agent_rl.evaluation.report import EvalReport
from agent_rl.evaluation.usage import Usage

EXPECTED = "expected a YAML list of {model: PATTERN, input: 1.25, cached_input: 0.125, output: 10, source: TEXT}"


class Price(BaseModel):
    """Prices in USD per million tokens of the models whose names match the shell pattern ``model``.

    ``cached_input`` is ``input`` where None. ``source`` says where and when the prices were read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    input: NonNegativeFloat
    output: NonNegativeFloat
    cached_input: NonNegativeFloat | None = None
    source: str = ""

    def cost(self, usage: Usage) -> float:
        """USD for ``usage``. Reasoning tokens are part of the completion, which has the price ``output``."""
        cached_input = self.input if self.cached_input is None else self.cached_input
        fresh = max(0, usage.prompt - usage.cached)
        return (fresh * self.input + usage.cached * cached_input + usage.completion * self.output) / 1e6


def read_price(path: Path, model: str) -> Price:
    """The first entry of the table in ``path`` that matches ``model``. Raises UserError if there is none."""
    try:
        prices = TypeAdapter(list[Price]).validate_python(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        place = " ".join(map(str, first["loc"]))
        raise UserError(f"--prices {path}: {f'entry {place}: ' if place else ''}{first['msg']}; {EXPECTED}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--prices {path}: cannot be read ({' '.join(str(error).split())}); {EXPECTED}") from None
    price = next((price for price in prices if fnmatchcase(model, price.model)), None)
    if price is None:
        patterns = ", ".join(price.model for price in prices) or "none"
        raise UserError(f"--prices {path}: no pattern matches the model {model}; the patterns are {patterns}")
    return price


def with_costs(report: EvalReport, price: Price) -> EvalReport:
    """``report`` with the cost of each task whose tokens are known, and their sum."""
    outcomes = tuple(replace(one, cost=None if one.usage is None else price.cost(one.usage)) for one in report.outcomes)
    cost = None if report.usage is None else price.cost(report.usage)
    return replace(report, outcomes=outcomes, cost=cost, price=price.model_dump())
