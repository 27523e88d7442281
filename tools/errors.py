"""Errors of the tools package.

::

    ToolsError
    ├── ToolFormatError      a tool-call format cannot be loaded: a user's mistake, in one line
    ├── ToolDefinitionError  a function cannot be offered as a tool: the author's mistake, found when the set is made
    └── ToolError            raised by a tool to answer its caller: becomes a ``failed`` result, never escapes the set
"""

from __future__ import annotations


class ToolsError(Exception):
    """Base of the package's errors."""


class ToolFormatError(ToolsError):
    """A tool-call format that cannot be loaded."""


class ToolDefinitionError(ToolsError):
    """A function that cannot be offered as a tool."""


class ToolError(ToolsError):
    """A call that went wrong; the message is what the agent is shown."""
