"""Reads config files: resolves base configs and paths, applies overrides and explains errors. Finds the configs and
starting models that ship with the package."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from agent_rl.config import EnvConfig, RunConfig
from agent_rl.config.base import section_of
from agent_rl.errors import ConfigError, UserError
from envs.registry import path_options

_PACKAGE = Path(__file__).parent.parent
CONFIGS = _PACKAGE / "configs"
MODELS = {name: _PACKAGE / "demo_model" / "data" / name for name in ("tiny-moe", "paper-moe")}
"""Model names that a config may use instead of a path, with their directories."""
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def shipped_configs() -> dict[str, str]:
    """Each shipped config's name (``recipes/NAME`` of a paper's recipe) and the comment in its first line, sorted."""
    files = [*sorted(CONFIGS.glob("*.yaml")), *sorted(CONFIGS.glob("recipes/*.yaml"))]
    heads = {file: file.read_text().partition("\n")[0].removeprefix("# ") for file in files}
    return {file.relative_to(CONFIGS).as_posix().removesuffix(".yaml"): head for file, head in heads.items()}


def find_config(name: Path, directory: Path = Path()) -> Path:
    """The file ``name`` in ``directory``, else the shipped config of that name. ``.yaml`` may be omitted."""
    shipped = CONFIGS / f"{name.as_posix().removesuffix('.yaml')}.yaml"
    if (directory / name).is_file() or name.parent not in (Path(), Path("recipes")) or not shipped.is_file():
        return directory / name
    return shipped


def find_model(directory: Path) -> Path:
    """The shipped model named ``directory`` if no directory of that name exists, else ``directory``.

    A shipped model below the working directory is returned as a relative path, so that a run's record stays valid if
    both are moved.
    """
    shipped = MODELS.get(str(directory))
    if shipped is None or directory.exists():
        return directory
    return shipped.relative_to(Path.cwd()) if shipped.is_relative_to(Path.cwd()) else shipped


def install_model(out: Path, name: str = "tiny-moe") -> bool:
    """Copy the shipped model ``name`` to ``out`` atomically. Returns False if it exists already.

    Raises UserError if ``out`` contains other files, or if the package lacks the model's data.
    """
    if all((out / file).is_file() for file in MODEL_FILES):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists but contains no complete model; remove it or choose another directory")
    data = MODELS[name]
    missing = [file for file in MODEL_FILES if not (data / file).is_file()]
    if missing:
        raise UserError(f"{data}: the shipped model lacks {', '.join(missing)}; reinstall the package")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        copy = Path(scratch) / "model"
        shutil.copytree(data, copy, ignore=lambda _, names: set(names) - set(MODEL_FILES))
        os.replace(copy, out)
    return True


INPUT_PATHS = (
    ("model",),
    ("engine", "python"),
    ("engine", "urls_file"),
    ("sandbox", "image_root"),
    ("env", "quarantine"),
    ("rollout", "harness", "directory"),
    ("train", "kl", "reference"),
    ("sft", "data", "path"),
    ("train", "distill", "teacher"),
)
"""Keys of input files and directories. A relative path is resolved against the directory of its config first."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a YAML config or a shipped one by name, and apply ``section.key=value`` overrides (values are YAML).

    ``base: other.yaml`` (a file in the same directory, or a shipped config) starts from that config; sections are
    merged key by key. A config with another environment than its base drops the base's options of the environment.
    Relative input paths are resolved against the config's directory, then the working directory; output paths against
    the working directory. Raises ConfigError with a one-line message.
    """
    layers = _read_layers(find_config(path), ())
    inputs = [*INPUT_PATHS, *_option_paths([data for _, data in layers])]
    merged: dict[str, Any] = {}
    for directory, data in layers:
        merged = _merge(_without_other_env_options(merged, data), _resolve_paths(data, directory, inputs))
    return _validate(path, merged, overrides)


def load_recorded(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the config that a run recorded; its paths are resolved already. Raises ConfigError."""
    return _validate(path, _read_yaml(path), overrides)


def _validate(path: Path, data: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    for override in sorted(overrides, key=lambda text: not text.startswith("env.name=")):
        data = _apply_override(data, override)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from None
    return config.model_copy(update={"model": find_model(config.model)})


def _read_layers(path: Path, derived: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """Directory and mapping of every config from the first base to ``path``. ``derived``: configs based on ``path``."""
    if not path.is_file():
        raise ConfigError(
            f"{f'{derived[-1]}: base: ' if derived else ''}{path}: file not found "
            f"(shipped configs: {', '.join(shipped_configs())})"
        )
    data = _read_yaml(path)
    base = data.pop("base", None)
    if base is None:
        return [(path.parent, data)]
    below = find_config(Path(str(base)), path.parent)
    if below.resolve() in (path.resolve(), *(config.resolve() for config in derived)):
        raise ConfigError(f"{path}: base: {base} leads back to this config; a config cannot be its own base")
    return [*_read_layers(below, (*derived, path)), (path.parent, data)]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping with a key twice, where YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), _UniqueKeyLoader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{path}:{mark.line + 1 if mark else '?'}: not valid YAML: {getattr(error, 'problem', error)}"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a config must be a mapping of sections, not a {type(data).__name__}")
    return data


def _section(data: Any, *keys: str) -> dict[str, Any]:
    """The mapping under ``keys``; empty if it is missing."""
    return next(_sections(data, *keys), {})


def _sections(data: Any, *keys: str) -> Iterator[dict[str, Any]]:
    """The mapping under ``keys``, or all of a list of mappings."""
    if isinstance(data, list):
        for item in data:
            yield from _sections(item, *keys)
    elif isinstance(data, dict):
        if keys:
            yield from _sections(data.get(keys[0]), *keys[1:])
        else:
            yield data


def _option_paths(layers: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The keys of the environments' options that are paths."""
    sources = dict.fromkeys(
        (section, "sources", name)
        for section in ("train", "eval")
        for data in layers
        for name in _section(data, section, "sources")
    )
    keyed = [(("env",), "name"), *((source, "env") for source in sources)]
    return [
        (*place, "options", option)
        for place, key in keyed
        for option in _env_path_options([_section(data, *place) for data in layers], key)
    ]


def _env_path_options(layers: Sequence[dict[str, Any]], key: str) -> frozenset[str]:
    """Names of an environment's options that are paths. ``key`` of ``layers`` names it. Loads the environment only if
    an option is a string."""
    may_be_paths = any(isinstance(value, str) for data in layers for value in _section(data, "options").values())
    names = [name for data in layers if isinstance(name := data.get(key), str)]
    return path_options((names or [EnvConfig().name])[-1]) if may_be_paths else frozenset()


def _resolve_paths(data: dict[str, Any], directory: Path, inputs: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Prefixes ``directory`` to the paths under the keys ``inputs`` that exist there; changes and returns ``data``."""
    for *parents, leaf in inputs:
        for section in _sections(data, *parents):
            value = section.get(leaf)
            if isinstance(value, str) and value and (directory / value).exists():
                section[leaf] = str(directory / value)
    return data


def _without_other_env_options(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` without ``env.options`` and ``env.quarantine`` if ``changes`` names another environment."""
    env, name = _section(base, "env"), _section(changes, "env").get("name")
    if name in (None, env.get("name", EnvConfig().name)):
        return base
    return {**base, "env": {key: value for key, value in env.items() if key not in ("options", "quarantine")}}


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    *parents, leaf = key.split(".")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if key == "env.name":
        data = _without_other_env_options(data, {"env": {"name": value}})
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    node[leaf] = value
    return data


def _first_problem(error: ValidationError) -> str:
    """The first problem in one line: the key, the error, the expected value."""
    problem = error.errors()[0]
    location = tuple(str(part) for part in problem["loc"])
    key = ".".join(location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}: {_key_hint(location)}{more}"
    if problem["type"] == "missing":
        return f"{key} is required{more}"
    if problem["type"] == "value_error":  # raised by this package's validators, which name the keys
        return f"{problem['ctx']['error']}{more}"
    return f"{key}: {problem['msg']}, got {problem['input']!r}{more}"


def _key_hint(location: tuple[str, ...]) -> str:
    """A suggestion for the unknown key ``location``: that name in another section, else the nearest name in its
    section."""
    elsewhere = [path for path in _paths(RunConfig) if path.rpartition(".")[2] == location[-1]]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    known = _known_keys(location[:-1])
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


def _paths(model: type[BaseModel], section: str = "") -> list[str]:
    """The full path of every key of ``model`` and its sections."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(f"{section}{name}")
        if (inner := section_of(field.annotation)) is not None:
            paths += _paths(inner, f"{section}{name}.")
    return paths


def _known_keys(section: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in section:
        if part.isdigit():  # the index in a list of sections
            continue
        if part not in model.model_fields or (inner := section_of(model.model_fields[part].annotation)) is None:
            return []
        model = inner
    return list(model.model_fields)
