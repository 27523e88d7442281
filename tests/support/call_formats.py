"""The formats of model families, and pieces of text that their parsers search for."""

from __future__ import annotations

JSON_FORMATS = ("hermes", "kimi", "deepseek-v3", "deepseek-v3.1", "harmony")
TAG_FORMATS = ("xml", "qwen3-coder", "glm", "minimax", "deepseek-dsml")
MARKERS = (
    *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *(
        "<tool_call>f",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<\\/arg_value>",
        "</arg_key>\n<arg_value>",
    ),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>", '<parameter name="a">'),
    *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
    *(
        '<｜DSML｜parameter name="a" string="true">',
        '<｜DSML｜parameter name="a" string="false">',
        "</｜DSML｜parameter>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "functions.f:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool▁call▁end｜>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>assistant", "<|end|>", "<|call|>", "<|return|>"),
    *("commentary", "analysis", "final", " to=functions.f", '{"name": "f", "arguments": {', '{"a": ', "}", "[", '"'),
)
