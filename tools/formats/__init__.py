"""The text formats of tool calls, and :func:`parse_turn`, which reads a whole turn in any of them.

All parsers are total: any text gives a :class:`ToolCall` or a :class:`ParseFailure` with one line for the agent. They
read control tokens as text. Plain text that spells a control token counts as the token, as in SGLang: only text that
the model sampled is parsed, and it chose to write the marker.
"""

from __future__ import annotations

from sandbox.registry import Registry
from tools.formats.json_calls import HermesFormat
from tools.formats.tag_calls import XmlFormat
from tools.formats.turns import parse_turn, with_typed_arguments
from tools.types import ToolCallFormat, ToolFormatError

__all__ = ["TOOL_FORMATS", "HermesFormat", "XmlFormat", "parse_turn", "tool_format", "with_typed_arguments"]

TOOL_FORMATS = Registry(
    "tool-call format",
    "agent_rl.tool_formats",
    {
        "hermes": "tools.formats.json_calls:HermesFormat",
        "kimi": "tools.formats.json_calls:KimiFormat",
        "deepseek-v3": "tools.formats.json_calls:DeepSeekV3Format",
        "deepseek-v3.1": "tools.formats.json_calls:DeepSeekV31Format",
        "harmony": "tools.formats.harmony:HarmonyFormat",
        "xml": "tools.formats.tag_calls:XmlFormat",
        "qwen3-coder": "tools.formats.tag_calls:Qwen3CoderFormat",
        "glm": "tools.formats.tag_calls:GlmFormat",
        "minimax": "tools.formats.tag_calls:MiniMaxFormat",
        "deepseek-dsml": "tools.formats.tag_calls:DsmlFormat",
        "r2egym": "tools.r2egym:R2EGymFormat",
        "mini-swe-agent": "tools.mini_swe_agent:MiniSweAgentFormat",
        "openhands": "tools.openhands:OpenHandsFormat",
    },
    ToolFormatError,
)


def tool_format(name: str) -> ToolCallFormat:
    """An instance of the registered format ``name``. Raises ``ToolFormatError`` if it cannot be loaded."""
    factory = TOOL_FORMATS.load(name)
    fmt: ToolCallFormat = factory() if callable(factory) else factory
    missing = [part for part in ("name", "parse", "render", "describe") if not hasattr(fmt, part)]
    if missing:
        raise ToolFormatError(f"tool-call format {name!r} lacks {', '.join(missing)}")
    return fmt
