"""What a task is, how it starts, how it is graded."""

from envs.context import EnvContext, ToolStyle
from envs.registry import ENVIRONMENTS, EnvironmentLoadError, load_environment
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
    "ENVIRONMENTS",
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
    "load_environment",
]
