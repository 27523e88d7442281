"""What all sections of the config share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

Precision = Literal["float32", "bfloat16"]

MAX_STALENESS = 8
"""How many updates old a trained token's weights may be at most."""
OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""


def registered(key: str, load: Callable[[str], object], error: type[Exception]) -> AfterValidator:
    """For the value of ``key``: a name for which ``load`` raises ``error``, in one line, is refused."""

    def check(name: str) -> str:
        try:
            load(name)
        except error as problem:
            raise ValueError(f"{key}: {problem}") from None
        return name

    return AfterValidator(check)


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
