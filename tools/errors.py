"""Errors of the tools package.

::

    ToolsError
    ├── ToolFormatError      a tool-call format cannot be loaded: a mistake of the user, one line
    ├── ToolDefinitionError  a function cannot become a tool: a mistake of its author, raised when the set is created
    └── ToolError            a tool raises it for a wrong call; the tool set turns it into a ``failed`` result
"""

from __future__ import annotations


class ToolsError(Exception):
    """Base of the package's errors."""


class ToolFormatError(ToolsError):
    """A tool-call format that cannot be loaded."""


class ToolDefinitionError(ToolsError):
    """A function that cannot become a tool."""


class ToolError(ToolsError):
    """A wrong call. The message is the agent's observation."""
