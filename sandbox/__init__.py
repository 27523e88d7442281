"""Where commands run: isolated boxes with limits, behind one protocol."""

from sandbox.errors import (
    ImageMissingError,
    ImagePullError,
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox.pool import SandboxPool
from sandbox.select import open_backend
from sandbox.types import ExecResult, ImagePolicy, Sandbox, SandboxBackend, SandboxSpec

__all__ = [
    "ExecResult",
    "ImageMissingError",
    "ImagePolicy",
    "ImagePullError",
    "Sandbox",
    "SandboxBackend",
    "SandboxDiskFullError",
    "SandboxError",
    "SandboxFileError",
    "SandboxLostError",
    "SandboxPool",
    "SandboxSpec",
    "SandboxStartError",
    "SandboxUnavailableError",
    "open_backend",
]
