"""What a task is, how it starts, how it is graded."""

from envs.context import EnvContext, ToolStyle
from envs.registry import EnvironmentLoadError, list_environments, load_environment
from envs.types import (
    Audited,
    Environment,
    EnvsError,
    Episode,
    Finding,
    Grade,
    GradingError,
    Message,
    Solvable,
    Task,
    TaskRecordError,
)

__all__ = [
    "Audited",
    "EnvContext",
    "Environment",
    "EnvironmentLoadError",
    "EnvsError",
    "Episode",
    "Finding",
    "Grade",
    "GradingError",
    "Message",
    "Solvable",
    "Task",
    "TaskRecordError",
    "ToolStyle",
    "list_environments",
    "load_environment",
]
