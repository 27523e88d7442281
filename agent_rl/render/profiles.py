"""How the model families write tool calls and thoughts. Sampling parameters are not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tools import THINK, Reasoning
from tools.formats.harmony import HARMONY


@dataclass(frozen=True, slots=True)
class Profile:
    """``formats``: tool-call formats, each with a text that the chat templates of its models hold; the first match
    counts. ``reasoning``: the markers of thoughts. ``end_of_thoughts``: the text between thoughts and what follows; ""
    where the chat template has it. ``history_fields``: the template writes control tokens around thoughts and calls of
    earlier turns, so it needs them as fields of a message; otherwise they are part of the message's text."""

    formats: tuple[tuple[str, str], ...] = (("qwen3-coder", "<function="), ("hermes", ""))
    reasoning: Reasoning = THINK
    end_of_thoughts: str = ""
    history_fields: bool = False

    def tool_format(self, template: str) -> str:
        """The name of the tool-call format of a model with the chat template ``template``."""
        return next(name for name, text in self.formats if text in template)


_HARMONY_END = "<|end|><|start|>assistant<|channel|>commentary"
"""Closes an analysis message and opens one for a call or text. Without the channel the model may open another analysis
message."""

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "deepseek_v3": Profile((("deepseek-v3", "```json"), ("deepseek-v3.1", ""))),
        "deepseek_v32": Profile((("deepseek-dsml", ""),)),
        "glm4_moe": Profile((("glm", ""),)),
        "glm_moe_dsa": Profile((("glm", ""),)),
        "gpt_oss": Profile((("harmony", ""),), HARMONY, _HARMONY_END, history_fields=True),
        "kimi_k2": Profile((("kimi", ""),)),
        "minimax_m2": Profile((("minimax", ""),)),
    }
)
"""By the ``model_type`` of config.json. Other families have the default profile."""


def profile_of(model_type: str) -> Profile:
    return PROFILES.get(model_type, Profile())
