"""The public API for environment authors: ``from agent_rl.api import Task, ToolCall, ToolError``. Imports no torch."""

from envs import (
    Auditable,
    Dialogue,
    EnvContext,
    Environment,
    Episode,
    Finding,
    Grade,
    GradedEpisode,
    GradingError,
    Message,
    Solvable,
    Task,
    TaskRecordError,
    UndecidableError,
    load_environment,
)
from envs.chat_model import ChatModel, Judge, ScriptedUser, SimulatedUser
from envs.conformance import check_environment
from sandbox import ExecResult, Sandbox, SandboxBackend, SandboxError, SandboxSpec, open_backend
from tools import FunctionToolSet, ToolCall, ToolError, ToolResult, ToolSet, swe_tools

__all__ = [
    "Auditable",
    "ChatModel",
    "Dialogue",
    "EnvContext",
    "Environment",
    "Episode",
    "ExecResult",
    "Finding",
    "FunctionToolSet",
    "Grade",
    "GradedEpisode",
    "GradingError",
    "Judge",
    "Message",
    "Sandbox",
    "SandboxBackend",
    "SandboxError",
    "SandboxSpec",
    "ScriptedUser",
    "SimulatedUser",
    "Solvable",
    "Task",
    "TaskRecordError",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "ToolSet",
    "UndecidableError",
    "check_environment",
    "load_environment",
    "open_backend",
    "swe_tools",
]
