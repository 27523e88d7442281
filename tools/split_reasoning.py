"""Separates a model's thoughts from what it says. Only what is outside of the thoughts is searched for calls."""

from __future__ import annotations

from dataclasses import dataclass

from tools.types import MarksText, ParseFailure, ToolCall, ToolCallFormat


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around a model's thoughts.

    ``prompt_opens``: the generation prompt ends in ``open``, so a sampled turn begins inside the thoughts. Without it a
    turn has thoughts only if it begins with ``open``, so that a call may hold ``close`` in its text.
    """

    open: str
    close: str
    prompt_opens: bool

    def unclosed(self, text: str) -> bool:
        """Whether the turn ``text`` ends inside the thoughts."""
        return self.begins(text) and self.close not in text

    def begins(self, text: str) -> bool:
        """Whether the turn ``text`` begins inside the thoughts."""
        return self.prompt_opens or text.lstrip().startswith(self.open)


THINK = Reasoning("<think>", "</think>", prompt_opens=False)


def split_reasoning(text: str, reasoning: Reasoning = THINK) -> tuple[str, str]:
    """``(thoughts, content)`` of a turn. The content of a turn whose thoughts are not closed is empty."""
    if not reasoning.begins(text):
        return "", text
    thoughts, _, content = text.partition(reasoning.close)
    return thoughts.lstrip().removeprefix(reasoning.open).strip(), content


def parse_call(fmt: ToolCallFormat, text: str, reasoning: Reasoning = THINK) -> ToolCall | ParseFailure:
    """The first call of a turn outside of its thoughts, or a failure."""
    if reasoning.unclosed(text):
        return unclosed_failure(reasoning)
    return fmt.parse(split_reasoning(text, reasoning)[1])


def words_of(fmt: ToolCallFormat, text: str, reasoning: Reasoning = THINK) -> str:
    """What a turn without a call says outside of its thoughts."""
    content = split_reasoning(text, reasoning)[1].strip()
    return fmt.plain_text(content) if isinstance(fmt, MarksText) else content


def unclosed_failure(reasoning: Reasoning) -> ParseFailure:
    return ParseFailure(f"no tool call found; {reasoning.open} is not closed")
