"""Errors of the sandbox package.

::

    SandboxError                 the sandbox broke: infrastructure, never the policy's fault
    ├── SandboxUnavailableError  no container engine and no bubblewrap answers here
    ├── ImageMissingError        the image or root file system is not on this machine, or not the same on all hosts
    ├── ImagePullError           the image could not be pulled, its retries spent
    ├── SandboxStartError        the sandbox could not be started (worth a retry)
    ├── SandboxLostError         the sandbox died under a command
    │   └── SandboxHostLostError the machine that the sandbox was on is gone
    ├── SandboxDiskFullError     no room left on the host
    └── SandboxFileError         a file operation on a path that does not allow it
"""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` without what would steer a terminal or could not be encoded for it: U+FFFD in the place of each control
    character but newline and tab. Much of what errors quote was printed in a sandbox."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


class SandboxError(Exception):
    """A sandbox broke. The message is made :func:`printable`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class SandboxUnavailableError(SandboxError):
    """No usable backend on this machine."""


class ImageMissingError(SandboxError):
    """The spec's image is not on this machine, or is not the same on all sandbox hosts."""


class ImagePullError(SandboxError):
    """A registry did not give an image, however often it was asked."""


class SandboxStartError(SandboxError):
    """A sandbox could not be started."""


class SandboxLostError(SandboxError):
    """A sandbox died while it was in use."""


class SandboxHostLostError(SandboxLostError):
    """The machine that a sandbox was on is gone, and with it all its sandboxes."""


class SandboxDiskFullError(SandboxError):
    """The host has no room left."""


class SandboxFileError(SandboxError):
    """A file is absent, not regular, or too large."""
