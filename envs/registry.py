"""Environments by name: registered, an entry point of the group ``agent_rl.envs``, or ``package.module:Class``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from envs.context import EnvContext
from envs.scaffold import OWN, HasScaffold, ScaffoldError
from envs.tool_environment import ToolClassEnvironment, is_tool_class, takes_sandbox
from envs.types import Environment, EnvsError
from sandbox.registry import Registry

_METHODS = ("name", "prepare", "tasks", "start", "gold")


class EnvironmentLoadError(EnvsError):
    """An environment cannot be loaded: a user's mistake, in one line."""


ENVIRONMENTS = Registry(
    "environment",
    "agent_rl.envs",
    {"math": "envs.math:MathEnvironment", "mini": "envs.mini:MiniEnvironment", "swe": "envs.swe:SweEnvironment"},
    EnvironmentLoadError,
)


def load_environment(name: str, context: EnvContext, options: Mapping[str, Any] | None = None) -> Environment:
    """The environment ``name`` made as ``Class(context, **options)``, or of a class of tools
    (:mod:`envs.tool_environment`).

    Raises ``EnvironmentLoadError`` for an unknown name (with the nearest known one), a path that does not import, an
    option that the class does not take, or a class that is no environment; ``ScaffoldError`` for one that has its own
    tools, where the context has another project's interface.
    """
    environment = _made(name, context, options)
    if context.scaffold.name != OWN and not isinstance(environment, HasScaffold):
        raise ScaffoldError(
            f"env.scaffold {context.scaffold.name}: environment {name!r} has tools and prompts of its own, which "
            f"leave no room for it: leave env.scaffold out, or take an environment that serves interfaces (swe, mini)"
        )
    return environment


def _made(name: str, context: EnvContext, options: Mapping[str, Any] | None) -> Environment:
    make = ENVIRONMENTS.load(name)
    if not callable(make):
        raise EnvironmentLoadError(f"environment {name!r} is a {type(make).__name__}, not a class")
    if _is_small(make):
        return ToolClassEnvironment(context, make, name, options or {})
    _check_options(name, make, options or {})
    environment = make(context, **(options or {}))
    missing = [method for method in _METHODS if not hasattr(environment, method)]
    if missing:
        raise EnvironmentLoadError(f"environment {name!r} is no environment, it lacks {', '.join(missing)}")
    return environment


def needs_sandboxes(name: str) -> bool:
    """Whether environment ``name`` starts sandboxes: a class of tools does where its constructor takes a sandbox,
    another class unless it says ``sandboxes = False``. Raises ``EnvironmentLoadError`` where it does not load."""
    make = ENVIRONMENTS.load(name)
    return takes_sandbox(make) if _is_small(make) else getattr(make, "sandboxes", True)


def _is_small(make: Any) -> bool:
    """Whether ``make`` is a class of tools, and not an environment of the whole protocol."""
    return is_tool_class(make) and not hasattr(make, "start")


def path_options(name: str) -> frozenset[str]:
    """The options of environment ``name`` that its constructor, or its class ``Options``, annotates with ``Path``.

    None where it does not load: :func:`load_environment` tells why.
    """
    try:
        make = ENVIRONMENTS.load(name)
        hints = get_type_hints(make.Options if is_tool_class(make) and hasattr(make, "Options") else make.__init__)
    except (EnvsError, NameError, AttributeError):
        return frozenset()
    return frozenset(option for option, hint in hints.items() if Path in (hint, *get_args(hint)))


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(make).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    takes = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for option in options:
        if option not in takes:
            near = difflib.get_close_matches(option, takes, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(takes) or 'none'}"
            raise EnvironmentLoadError(f"environment {name!r}: unknown option {option!r}: {hint}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name in takes and parameter.name not in options:
            raise EnvironmentLoadError(f"environment {name!r}: option {parameter.name!r} is required, and not given")
