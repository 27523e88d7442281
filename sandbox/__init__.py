"""Where commands run: isolated sandboxes with limits, behind one protocol."""

from sandbox.errors import (
    ImageMissingError,
    ImagePullError,
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxHostLostError,
    SandboxLostError,
    SandboxStartError,
    SandboxUnavailableError,
    printable,
)
from sandbox.factory import BACKENDS, open_backend
from sandbox.files import blob_name
from sandbox.null_backend import NullBackend
from sandbox.pipes import open_pipes
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
    "SandboxHostLostError",
    "SandboxLostError",
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
    "open_pipes",
    "open_session",
    "printable",
]
