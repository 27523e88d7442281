"""Types that all sections of the config share."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

Precision = Literal["float32", "bfloat16"]

MAX_STALENESS = 8
"""Largest allowed age of a trained token's weights, in weight updates."""
OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""
ON = BeforeValidator(lambda value: "on" if value is True else value)
"""YAML reads a bare ``on`` as true."""


def registered_name(key: str, load: Callable[[str], object], error: type[Exception]) -> AfterValidator:
    """A validator for the config key ``key``: rejects a name for which ``load`` raises ``error``."""

    def check(name: str) -> str:
        try:
            load(name)
        except error as problem:
            raise ValueError(f"{key}: {problem}") from None
        return name

    return AfterValidator(check)


class Section(BaseModel):
    """Base of every section. Instances are immutable; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in the type of a key: ``Section``, ``Section | None``, or a list or mapping of sections."""
    options = (annotation, *typing.get_args(annotation))
    return next((part for part in options if isinstance(part, type) and issubclass(part, BaseModel)), None)
