"""Tasks, the environments that start and grade them, and the scaffolds in which agents work."""

from envs.context import EnvContext, ToolStyle
from envs.registry import ENVIRONMENTS, EnvironmentLoadError, load_environment, needs_sandbox
from envs.scaffold import HasScaffold, Scaffold, ScaffoldError, load_scaffold
from envs.types import (
    Auditable,
    Dialogue,
    Environment,
    EnvsError,
    Episode,
    Finding,
    Grade,
    GradedEpisode,
    GradesGroups,
    GradingError,
    HasSandbox,
    Message,
    ProtocolError,
    Solvable,
    Task,
    TaskRecordError,
    UndecidableError,
    target_of,
    user_of,
)
