"""Configs as files: read with the ones they are based on, paths looked up, overrides applied, mistakes explained."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from agent_rl.config import EnvConfig, RunConfig
from agent_rl.config.builtin import find_config, find_model, shipped_configs
from agent_rl.errors import ConfigError
from envs.registry import path_options

INPUTS = (
    ("model",),
    ("engine", "python"),
    ("engine", "urls_file"),
    ("sandbox", "image_root"),
    ("env", "quarantine"),
    ("rollout", "harness", "directory"),
    ("train", "kl", "reference"),
)
"""Keys of files and directories that a run reads; a relative one is looked for beside the config that names it."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML config, or a shipped one by its name, and apply ``section.key=value`` overrides (values are YAML).

    A config that says ``base: other.yaml`` (a file beside it, or a shipped config) changes that one: sections are
    merged key by key; the options of another environment are dropped. A relative path of what a run reads is looked
    for beside the config that names it, then in the working directory; what a run writes goes to the working directory.
    Raises ConfigError, one line.
    """
    layers = _layers(find_config(path), ())
    inputs = [*INPUTS, *(("env", "options", option) for option in _env_paths([data for _, data in layers]))]
    merged: dict[str, Any] = {}
    for directory, data in layers:
        merged = _merged(_without_another_env(merged, data), _looked_up(data, directory, inputs))
    return _validated(path, merged, overrides)


def load_recorded(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config as a run wrote it down, its paths found already. Raises ConfigError, one line."""
    return _validated(path, _read_yaml(path), overrides)


def _validated(path: Path, data: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    for override in sorted(overrides, key=lambda text: not text.startswith("env.name=")):
        data = _overridden(data, override)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from None
    return config.model_copy(update={"model": find_model(config.model)})


def _layers(path: Path, above: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """The directory and the mapping of every config from the lowest base up to ``path``; ``above`` led here."""
    if not path.is_file():
        raise ConfigError(
            f"{f'{above[-1]}: base: ' if above else ''}{path}: no such config file "
            f"(shipped, by name: {', '.join(shipped_configs())})"
        )
    data = _read_yaml(path)
    base = data.pop("base", None)
    if base is None:
        return [(path.parent, data)]
    below = find_config(Path(str(base)), path.parent)
    if below.resolve() in (path.resolve(), *(config.resolve() for config in above)):
        raise ConfigError(f"{path}: base: {base} leads back here; a config can't be its own base")
    return [*_layers(below, (*above, path)), (path.parent, data)]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{path}:{where.line + 1 if where else '?'}: not valid YAML: {getattr(error, 'problem', error)}"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, this is a {type(data).__name__}")
    return data


def _section(data: Any, *keys: str) -> dict[str, Any]:
    """The mapping under ``keys``; an empty one where there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _env_paths(layers: Sequence[dict[str, Any]]) -> frozenset[str]:
    """The options of the layers' environment that are paths; it is loaded only where some option may be one."""
    may_be_paths = any(isinstance(value, str) for data in layers for value in _section(data, "env", "options").values())
    names = [name for data in layers if isinstance(name := _section(data, "env").get("name"), str)]
    return path_options((names or [EnvConfig().name])[-1]) if may_be_paths else frozenset()


def _looked_up(data: dict[str, Any], directory: Path, inputs: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """``data`` with those of the paths under ``inputs`` that exist in ``directory`` leading there."""
    for *parents, leaf in inputs:
        section = _section(data, *parents)
        value = section.get(leaf)
        if isinstance(value, str) and value and (directory / value).exists():
            section[leaf] = str(directory / value)
    return data


def _without_another_env(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` without what it says of its environment's tasks where ``changes`` names another environment."""
    env, name = _section(base, "env"), _section(changes, "env").get("name")
    if name in (None, env.get("name", EnvConfig().name)):
        return base
    return {**base, "env": {key: value for key, value in env.items() if key not in ("options", "quarantine")}}


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _overridden(data: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    *parents, leaf = key.split(".")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if key == "env.name":
        data = _without_another_env(data, {"env": {"name": value}})
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    node[leaf] = value
    return data


def _explain(error: ValidationError) -> str:
    """The first problem in one line: the key, what was wrong, what would be right."""
    problem = error.errors()[0]
    location = tuple(str(part) for part in problem["loc"])
    key = ".".join(location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}: {_key_hint(location)}{more}"
    if problem["type"] == "missing":
        return f"{key}: required, and not given{more}"
    if problem["type"] == "value_error":  # of our own validators: they name the keys
        return f"{problem['ctx']['error']}{more}"
    return f"{key}: {problem['msg']}, got {problem['input']!r}{more}"


def _key_hint(location: tuple[str, ...]) -> str:
    """Which key was meant instead of ``location``: the same name in another section, else the nearest one beside it."""
    elsewhere = [path for path in _paths(RunConfig) if path.rpartition(".")[2] == location[-1]]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    known = _known_keys(location[:-1])
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


def _paths(model: type[BaseModel], section: str = "") -> list[str]:
    """Every key below ``model``, with its sections."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(f"{section}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _paths(field.annotation, f"{section}{name}.")
    return found


def _known_keys(section: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in section:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
