"""Parses turns with SGLang's own parsers, in SGLang's environment: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import logging
import sys

import torch

if torch.version.cuda is None:  # torchvision registers kernels for operators that only its extension for CUDA defines
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

logging.disable(logging.CRITICAL)


def main() -> None:
    """Line in: ``[parser, text, tools]``. Line out: ``[[name, arguments], ...]``, or null for an exception."""
    for line in sys.stdin:
        parser, text, tools = json.loads(line)
        detector = FunctionCallParser.ToolCallParserEnum[parser]()
        try:
            found = detector.detect_and_parse(text, [Tool.model_validate(tool) for tool in tools])
            print(json.dumps([[call.name, json.loads(call.parameters)] for call in found.calls]))
        except Exception:  # what SGLang raises is a result of the comparison
            print("null")


if __name__ == "__main__":
    main()
