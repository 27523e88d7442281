"""Isolated sandboxes with resource limits, in which commands run: one protocol, several backends."""

from sandbox.errors import (
    ImageBuildError,
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
    Change,
    ExecResult,
    ImagePolicy,
    ImageSettings,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    SessionResult,
    ShellSession,
    TreeFile,
    TreeLimits,
)
from sandbox.user import UserSandbox, image_builder
