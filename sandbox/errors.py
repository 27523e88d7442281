"""Errors of the sandbox package.

::

    SandboxError                 infrastructure failure; never the policy's fault
    ├── SandboxUnavailableError  this machine has no usable backend
    ├── ImageMissingError        the image or root file system is missing, or differs between nodes
    ├── ImageBuildError          the Dockerfile of an image failed
    ├── ImagePullError           the image could not be pulled; all attempts failed
    ├── SandboxStartError        the sandbox could not be started (retryable)
    ├── SandboxLostError         the sandbox died while it was in use
    │   └── SandboxNodeLostError the node of the sandbox is gone
    ├── SandboxDiskFullError     the disk of the sandboxes is full
    └── SandboxFileError         the path does not allow the file operation
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with U+FFFD in place of every unprintable character except newline and tab.

    Errors quote text that was printed in a sandbox; it must not control the user's terminal.
    """
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


class SandboxError(Exception):
    """A sandbox failed. The message is passed through :func:`printable`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class SandboxUnavailableError(SandboxError):
    """This machine has no usable backend."""


class ImageMissingError(SandboxError):
    """The spec's image is not on this machine, or differs between sandbox nodes."""


class ImageBuildError(SandboxError):
    """An image could not be built from its directory."""


class ImagePullError(SandboxError):
    """Every attempt to pull an image failed."""


class SandboxStartError(SandboxError):
    """A sandbox could not be started."""


class SandboxLostError(SandboxError):
    """A sandbox died while it was in use."""


class SandboxNodeLostError(SandboxLostError):
    """The node of a sandbox is gone, with all its sandboxes."""


class SandboxDiskFullError(SandboxError):
    """The disk of the sandboxes is full."""


class SandboxFileError(SandboxError):
    """A file is absent, not regular, or too large."""
