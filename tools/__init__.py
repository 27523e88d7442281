"""What the agent may call: tools, their schemas, and the text formats of tool calls."""

from tools.errors import ToolDefinitionError, ToolError, ToolFormatError, ToolsError
from tools.formats import TOOL_FORMATS, HermesFormat, XmlFormat, tool_format
from tools.schema import tool_function
from tools.swe import swe_tools
from tools.text import Style
from tools.toolset import FunctionToolSet
from tools.turns import parse_turn
from tools.types import ParseFailure, Spoken, ToolCall, ToolCallFormat, ToolResult, ToolSet

__all__ = [
    "TOOL_FORMATS",
    "FunctionToolSet",
    "HermesFormat",
    "ParseFailure",
    "Spoken",
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
