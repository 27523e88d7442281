"""What a task is, how it starts, how it is graded."""

from envs.context import EnvContext, ToolStyle
from envs.registry import ENVIRONMENTS, EnvironmentLoadError, load_environment, needs_boxes
from envs.scaffold import Interface, Interfaced, InterfaceError, find_interface
from envs.types import (
    Audited,
    Boxed,
    Dialogue,
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
    UndecidableError,
)

__all__ = [
    "ENVIRONMENTS",
    "Audited",
    "Boxed",
    "Dialogue",
    "EnvContext",
    "Environment",
    "EnvironmentLoadError",
    "EnvsError",
    "Episode",
    "Finding",
    "Grade",
    "GradingError",
    "Interface",
    "InterfaceError",
    "Interfaced",
    "Message",
    "Solvable",
    "Task",
    "TaskRecordError",
    "ToolStyle",
    "UndecidableError",
    "find_interface",
    "load_environment",
    "needs_boxes",
]
