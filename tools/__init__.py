"""The agent's tools, their schemas, and the text formats of tool calls: the names that other packages import."""

from tools.formats import HermesFormat, XmlFormat, parse_turn, tool_format
from tools.schema import tool_function
from tools.split_reasoning import THINK, Reasoning, parse_call, split_reasoning, words_of
from tools.swe import swe_tools
from tools.text import Style
from tools.toolset import FunctionToolSet
from tools.types import (
    ParsedTurn,
    ParseFailure,
    ToolCall,
    ToolCallFormat,
    ToolDefinitionError,
    ToolError,
    ToolFormatError,
    ToolResult,
    ToolSet,
)
