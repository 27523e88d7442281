"""What readers of families use of a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError

_MAX_COUNT = 1 << 16


class ConfigKeys:
    """The keys of a ``config.json``; records those that were read, so that others can be refused."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw, self._path = raw, path
        self.known: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        """The value of ``key``; ``default`` where it is missing or null."""
        self.known.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """The value of ``key``. Raises ConfigError where it is missing."""
        if (value := self.get(key, None)) is None:
            raise ConfigError(f"{self._path}: {key} is missing; {self._raw['model_type']} requires it")
        return value

    def count(self, key: str, default: int) -> int:
        """A number of layers, experts or dimensions. Raises ConfigError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
            raise ConfigError(f"{self._path}: {key} must be an integer from 0 to {_MAX_COUNT}, got {value!r}")
        return value

    def given(self, *keys: str) -> None:
        """Raises ConfigError where one of ``keys`` is missing; null is a value."""
        if missing := [key for key in keys if key not in self._raw]:
            raise ConfigError(f"{self._path}: {missing[0]} is missing; {self._raw['model_type']} requires it")

    def positive(self, key: str) -> int:
        """As :meth:`count`, of at least 1. Raises ConfigError where it is missing."""
        self.require(key)
        if (value := self.count(key, 0)) == 0:
            raise ConfigError(f"{self._path}: {key} must be positive")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value. Raises ConfigError for anything else."""
        if not isinstance(value := self.get(key, default), bool):
            raise ConfigError(f"{self._path}: {key} must be true or false, got {value!r}")
        return value

    def each(self, key: str, *allowed: Any) -> None:
        """Raises ConfigError where the list ``key`` has another value than the ``allowed`` ones."""
        if others := sorted(set(self.get(key, ())).difference(allowed)):
            raise ConfigError(f"{self._path}: {key} has {others[0]!r}, only {allowed[0]!r} is supported")

    def expect(self, key: str, *allowed: Any) -> None:
        """Raises ConfigError where ``key`` is present with another value than the ``allowed`` ones."""
        if (value := self.get(key, allowed[0])) not in allowed:
            raise ConfigError(f"{self._path}: {key}={value!r} is not supported, only {allowed[0]!r} is")

    def dense_layers(self, layers: int) -> int:
        """The number of first layers without experts, ``first_k_dense_replace``. Raises ConfigError where
        ``mlp_layer_types`` of transformers differs from it."""
        first, kinds = self.count("first_k_dense_replace", 0), self.get("mlp_layer_types", None)
        if kinds is not None and kinds != (["dense"] * first + ["sparse"] * layers)[:layers]:
            raise ConfigError(f"{self._path}: mlp_layer_types differs from first_k_dense_replace={first}")
        return first

    def sigmoid_router(self) -> dict[str, Any]:
        """The router and the shared experts of DeepSeek-V3 and GLM-4, by the names of
        :func:`agent_rl.models.families.read_config`."""
        shared = self.count("n_shared_experts", 0)
        return {
            "shared_expert_intermediate_size": shared * self.positive("moe_intermediate_size"),
            "scoring": "sigmoid",
            "routed_scaling_factor": float(self.get("routed_scaling_factor", 1.0)),
            "expert_groups": self.count("n_group", 1),
            "top_groups": self.count("topk_group", 1),
        }

    def windows(self, layer_types: Sequence[str], window: int) -> tuple[int, ...]:
        """By layer the number of keys that a query sees, 0 for all, from ``layer_types``."""
        widths = {"full_attention": 0, "sliding_attention": window}
        layers = self.require("num_hidden_layers")
        if len(layer_types) != layers or not widths.keys() >= set(layer_types) or not window:
            raise ConfigError(
                f"{self._path}: layer_types must name one of {', '.join(widths)} for each of the {layers} layers, and "
                "sliding_window be a number of tokens"
            )
        return tuple(widths[kind] for kind in layer_types)

    def rotary_dim(self, default: float = 1.0) -> int:
        """The number of rotated dimensions of each head, from ``partial_rotary_factor``; 0 for all."""
        own = self.get("partial_rotary_factor", default)
        factor = (self._raw.get("rope_parameters") or {}).get("partial_rotary_factor", own)
        heads = self._raw.get("num_attention_heads") or 1
        head_dim = self._raw.get("head_dim") or self._raw.get("hidden_size", 0) // heads
        return 0 if factor == 1 else int(head_dim * factor)
