"""Environments by name: registered, an entry point of the group ``agent_rl.envs``, or ``package.module:Class``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from envs.context import EnvContext
from envs.scaffold import DEFAULT_SCAFFOLD, HasScaffold, ScaffoldError
from envs.tool_environment import ToolClassEnvironment, is_tool_class, takes_sandbox, validate_options
from envs.types import Environment, EnvsError
from sandbox.registry import Registry

_METHODS = ("name", "prepare", "tasks", "start", "gold")


class EnvironmentLoadError(EnvsError):
    """An environment that cannot be loaded: one line for the user."""


ENVIRONMENTS = Registry(
    "environment",
    "agent_rl.envs",
    {
        "harbor": "envs.harbor:HarborEnvironment",
        "math": "envs.math:MathEnvironment",
        "mini": "envs.mini:MiniEnvironment",
        "orders": "envs.orders:Orders",
        "swe": "envs.swe:SweEnvironment",
    },
    EnvironmentLoadError,
)


def load_environment(name: str, context: EnvContext, options: Mapping[str, Any] | None = None) -> Environment:
    """Create the environment ``name`` as ``Class(context, **options)``, or from a tool class
    (:mod:`envs.tool_environment`).

    Raises ``EnvironmentLoadError`` for an unknown name, a path that does not import, an unknown option, or a class that
    is not an environment; ``ScaffoldError`` if the environment has its own tools and the context another scaffold.
    """
    environment = _create(name, context, options)
    if context.scaffold.name != DEFAULT_SCAFFOLD and not isinstance(environment, HasScaffold):
        raise ScaffoldError(
            f"env.scaffold {context.scaffold.name}: environment {name!r} has its own tools and prompts: "
            f"omit env.scaffold, or use an environment that supports scaffolds (swe, mini)"
        )
    return environment


def _create(name: str, context: EnvContext, options: Mapping[str, Any] | None) -> Environment:
    cls = ENVIRONMENTS.load(name)
    if not callable(cls):
        raise EnvironmentLoadError(f"environment {name!r} is a {type(cls).__name__}, not a class")
    if _uses_tool_class(cls):
        return ToolClassEnvironment(context, cls, name, options or {})
    _check_options(name, cls, options or {})
    environment = cls(context, **(options or {}))
    missing = [method for method in _METHODS if not hasattr(environment, method)]
    if missing:
        raise EnvironmentLoadError(f"environment {name!r} is not an environment, it lacks {', '.join(missing)}")
    return environment


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Check the name and the options without creating anything. Raises as :func:`load_environment` for an unknown name
    or option, and ToolClassError for the wrong options of a tool class."""
    cls = ENVIRONMENTS.load(name)
    if _uses_tool_class(cls):
        validate_options(cls, name, options)
    elif callable(cls):
        _check_options(name, cls, options)


def needs_sandbox(name: str) -> bool:
    """Whether environment ``name`` starts sandboxes. A tool class does if its constructor takes a sandbox, another
    class unless it sets ``needs_sandbox = False``. Raises ``EnvironmentLoadError``."""
    cls = ENVIRONMENTS.load(name)
    return takes_sandbox(cls) if _uses_tool_class(cls) else getattr(cls, "needs_sandbox", True)


def _uses_tool_class(cls: Any) -> bool:
    """Whether ``cls`` is a tool class and not an implementation of the whole protocol."""
    if hasattr(cls, "start") or not all(hasattr(cls, name) for name in ("tasks", "setup", "grade")):
        return False
    if not is_tool_class(cls):
        raise EnvironmentLoadError(f"{cls.__name__}: setup and grade have to be async: write async def")
    return True


def path_options(name: str) -> frozenset[str]:
    """The options of environment ``name`` that its constructor or its class ``Options`` annotates with ``Path``.

    Empty if it does not load; :func:`load_environment` reports the reason.
    """
    try:
        cls = ENVIRONMENTS.load(name)
        hints = get_type_hints(cls.Options if is_tool_class(cls) and hasattr(cls, "Options") else cls.__init__)
    except (EnvsError, NameError, AttributeError):
        return frozenset()
    return frozenset(option for option, hint in hints.items() if Path in (hint, *get_args(hint)))


def _check_options(name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for option in options:
        if option not in accepted:
            matches = difflib.get_close_matches(option, accepted, n=1, cutoff=0.5)
            hint = f"did you mean {matches[0]!r}?" if matches else f"options: {', '.join(accepted) or 'none'}"
            raise EnvironmentLoadError(f"environment {name!r}: unknown option {option!r}: {hint}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name in accepted and parameter.name not in options:
            raise EnvironmentLoadError(f"environment {name!r}: option {parameter.name!r} is required")
