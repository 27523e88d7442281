"""Where commands run: isolated boxes with limits, behind one protocol."""

from sandbox.absent import NoBoxes
from sandbox.bounds import bounded
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
from sandbox.files import blob_name
from sandbox.pipes import open_pipes
from sandbox.pool import SandboxPool
from sandbox.select import BACKENDS, open_backend
from sandbox.session import open_session
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
    "NoBoxes",
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
