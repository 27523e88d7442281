"""What a task is, how it starts, how it is graded."""

from envs.context import EnvContext, ToolStyle
from envs.registry import ENVIRONMENTS, EnvironmentLoadError, load_environment, needs_sandboxes
from envs.scaffold import HasScaffold, Scaffold, ScaffoldError, find_scaffold
from envs.types import (
    Audited,
    Dialogue,
    Environment,
    EnvsError,
    Episode,
    Finding,
    Grade,
    GradingError,
    HasSandbox,
    Message,
    Solvable,
    Task,
    TaskRecordError,
    UndecidableError,
)

__all__ = [
    "ENVIRONMENTS",
    "Audited",
    "Dialogue",
    "EnvContext",
    "Environment",
    "EnvironmentLoadError",
    "EnvsError",
    "Episode",
    "Finding",
    "Grade",
    "GradingError",
    "HasSandbox",
    "HasScaffold",
    "Message",
    "Scaffold",
    "ScaffoldError",
    "Solvable",
    "Task",
    "TaskRecordError",
    "ToolStyle",
    "UndecidableError",
    "find_scaffold",
    "load_environment",
    "needs_sandboxes",
]
