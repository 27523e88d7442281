"""Isolated sandboxes with resource limits, in which commands run: one protocol, several backends."""

from sandbox.errors import (
    ImageMissingError,
    ImagePullError,
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SandboxNodeLostError,
    SandboxStartError,
    SandboxUnavailableError,
    printable,
)
from sandbox.factory import BACKENDS, NullBackend, open_backend
from sandbox.files import blob_name
from sandbox.pool import SandboxPool
from sandbox.shell_session import open_session
from sandbox.timeouts import bounded
from sandbox.types import (
    ExecResult,
    ImagePolicy,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    SessionResult,
    ShellSession,
    TreeFile,
    TreeLimits,
)

__all__ = [
    "BACKENDS",
    "ExecResult",
    "ImageMissingError",
    "ImagePolicy",
    "ImagePullError",
    "NullBackend",
    "Sandbox",
    "SandboxBackend",
    "SandboxDiskFullError",
    "SandboxError",
    "SandboxFileError",
    "SandboxLostError",
    "SandboxNodeLostError",
    "SandboxPool",
    "SandboxSpec",
    "SandboxStartError",
    "SandboxUnavailableError",
    "SessionResult",
    "ShellSession",
    "TreeFile",
    "TreeLimits",
    "blob_name",
    "bounded",
    "open_backend",
    "open_session",
    "printable",
]
