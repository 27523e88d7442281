"""The agent's tools, their schemas, and the text formats of tool calls."""

from tools.errors import ToolDefinitionError, ToolError, ToolFormatError, ToolsError
from tools.formats import TOOL_FORMATS, HermesFormat, XmlFormat, parse_turn, tool_format
from tools.schema import tool_function
from tools.swe import swe_tools
from tools.text import Style
from tools.toolset import FunctionToolSet
from tools.types import ParsedTurn, ParseFailure, ToolCall, ToolCallFormat, ToolResult, ToolSet

__all__ = [
    "TOOL_FORMATS",
    "FunctionToolSet",
    "HermesFormat",
    "ParseFailure",
    "ParsedTurn",
    "Style",
    "ToolCall",
    "ToolCallFormat",
    "ToolDefinitionError",
    "ToolError",
    "ToolFormatError",
    "ToolResult",
    "ToolSet",
    "ToolsError",
    "XmlFormat",
    "parse_turn",
    "swe_tools",
    "tool_format",
    "tool_function",
]
